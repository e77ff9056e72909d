"""Dumps with the fields of PyTorch's Flight Recorder, written by hand."""

import json
import pickle


class Recorder:
    """One rank's dump in the making: operations in the order in which the rank issues them."""

    def __init__(self, rank, groups, version="2.10"):
        self.rank = rank
        self.groups = groups
        self.version = version
        self.entries = []
        self.collectives = dict.fromkeys(groups, 0)
        self.messages = dict.fromkeys(groups, 0)

    def collective(self, kind, state, sizes=((4,),), dtype="Float", group="0", out=None):
        """A collective of a group; ``out`` are the sizes of its results, where they differ."""
        self.collectives[group] += 1
        self._entry(kind, group, state, sizes, dtype, out=out)

    def message(self, kind, peer, state, sizes=((4,),), dtype="Float", group="0"):
        """A send to, or a receive from, a global rank."""
        self.messages[group] += 1
        self._message(kind, peer, state, sizes, dtype, group)

    def batch(self, messages, state, group="0"):
        """Messages (kind, peer) that are launched as one."""
        self.messages[group] += 1
        for kind, peer in messages:
            self._message(kind, peer, "scheduled", ((4,),), "Float", group)
        self._entry("coalesced", group, state, (), "Float", is_p2p=True)

    def coalesced(self, collectives, state, group="0"):
        """Collectives (name, sizes) that are launched as one; they share a number."""
        self.collectives[group] += 1
        for name, sizes in collectives:
            self._entry(name, group, "scheduled", sizes, "Float")
        self._entry("coalesced", group, state, (), "Float")

    def _message(self, kind, peer, state, sizes, dtype, group):
        ranks = self.groups[group]
        arrow = "->" if kind == "send" else "<-"
        self._entry(
            f"{kind} {ranks.index(self.rank)}{arrow}{ranks.index(peer)}", group, state, sizes, dtype, is_p2p=True
        )

    def _entry(self, name, group, state, sizes, dtype, is_p2p=False, out=None):
        self.entries.append(
            {
                "record_id": len(self.entries),
                "pg_id": 0,
                "process_group": (group, "default_pg" if group == "0" else "undefined"),
                "collective_seq_id": self.collectives[group],
                "p2p_seq_id": self.messages[group],
                "op_id": len(self.entries) + 1,
                "profiling_name": f"nccl:{name}",
                "time_created_ns": 1_000 * len(self.entries),
                "input_sizes": [list(size) for size in sizes],
                "input_dtypes": [dtype] * len(sizes),
                "output_sizes": [list(size) for size in (out or sizes)],
                "output_dtypes": [dtype] * len(sizes),
                "state": state,
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": state == "completed",
                "timeout_ms": 600_000,
                "is_p2p": is_p2p,
                "frames": [
                    {"name": "send", "filename": "/usr/lib/python3/site-packages/torch/distributed/c10d.py", "line": 7},
                    {"name": "step", "filename": "/home/me/train.py", "line": 10 + len(self.entries)},
                ],
            }
        )

    def content(self):
        """Content of this rank's dump."""
        config = {
            name: {"name": name, "desc": "default_pg" if name == "0" else "undefined", "ranks": str(ranks)}
            for name, ranks in self.groups.items()
            if self.rank in ranks
        }
        return {"version": self.version, "pg_config": config, "pg_status": {}, "entries": self.entries}

    def write(self, directory, form="pickle"):
        path = directory / f"nccl_trace_rank_{self.rank}"
        path.write_bytes(
            pickle.dumps(self.content(), protocol=2) if form == "pickle" else json.dumps(self.content()).encode()
        )


def recorders(num_ranks, groups=None):
    """A recorder for each rank; group ``0`` has all of them."""
    groups = {"0": list(range(num_ranks)), **(groups or {})}
    return [Recorder(rank, groups) for rank in range(num_ranks)]
