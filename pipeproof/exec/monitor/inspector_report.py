"""Report about a job from the logs of NCCL's Inspector: stragglers, and the last finished operation of each rank.

The Inspector logs finished operations only. So its logs show which ranks the
others wait for while the job runs, and where each rank was last, but not the
operation in which a job hangs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.exec.monitor.lateness import Lateness, lateness, straggler_findings
from pipeproof.interop.hang.nccl_inspector import FinishedOp, InspectorLogs

_ROOTED = frozenset({"Broadcast", "Reduce", "Gather", "Scatter"})
_MOST_NAMED = 16


@dataclass(frozen=True)
class InspectorReport:
    """By communicator: the last finished operation of each rank, and lateness; ranks are those of the communicator."""

    last: Mapping[str, Mapping[int, FinishedOp]]
    lateness: Mapping[str, tuple[Lateness, ...]]
    findings: tuple[Finding, ...]
    num_lost: int

    def lines(self) -> Iterator[str]:
        """Return the last operations as text; ranks with the same one are in one line."""
        for name, ranks in self.last.items():
            num_ranks = next(iter(ranks.values())).num_ranks
            yield f"communicator {name} of {num_ranks} ranks, last finished operations:"
            by_text: dict[str, list[int]] = defaultdict(list)
            for rank, op in sorted(ranks.items()):
                by_text[op.text].append(rank)
            for text, members in by_text.items():
                first = ranks[members[0]].process
                where = f" (PID {first.pid} on {first.host})" if len(members) == 1 else ""
                yield f"  rank{'s' if len(members) > 1 else ''} {', '.join(map(str, members))}{where}: {text}"
            missing = [rank for rank in range(num_ranks) if rank not in ranks]
            if missing:
                named = ", ".join(map(str, missing[:_MOST_NAMED])) + (", .." if len(missing) > _MOST_NAMED else "")
                yield f"  no log of rank{'s' if len(missing) > 1 else ''} {named}"
        if self.num_lost:
            yield f"{self.num_lost} operations were lost: the rings of the Inspector were too small"

    def to_json(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {
            "communicators": [
                {
                    "id": name,
                    "num_ranks": next(iter(ranks.values())).num_ranks,
                    "last": [
                        {"rank": rank, "op": op.text, "host": op.process.host, "pid": op.process.pid}
                        for rank, op in sorted(ranks.items())
                    ],
                }
                for name, ranks in self.last.items()
            ],
            "lateness": [{"group": name, **asdict(row)} for name, rows in self.lateness.items() for row in rows],
            "lost": self.num_lost,
            "findings": [finding_to_json(finding) for finding in self.findings],
        }


def report_logs(logs: InspectorLogs) -> InspectorReport:
    """Return the last operation of each rank, and the lateness of the members of each communicator."""
    last: dict[str, dict[int, FinishedOp]] = {}
    collectives: dict[str, dict[tuple[str, int], dict[int, FinishedOp]]] = {}
    for op in logs.ops:
        last.setdefault(op.communicator, {})[op.rank] = op
        if op.peer is None and op.is_on_device and op.op not in _ROOTED:
            members = collectives.setdefault(op.communicator, {}).setdefault((op.op, op.number), {})
            members[op.rank] = op
    late = {name: rows for name, each in collectives.items() if (rows := _lateness(each))}
    return InspectorReport(last, late, tuple(straggler_findings(late)), logs.num_lost)


def _lateness(collectives: Mapping[tuple[str, int], Mapping[int, FinishedOp]]) -> tuple[Lateness, ...]:
    """Return the lateness of the ranks; empty if the logs do not have the time in which the job ran.

    All ranks leave a collective together, so who spent the shortest time in it came last.
    """
    whole = [ops for ops in collectives.values() if len(ops) == next(iter(ops.values())).num_ranks]
    if not whole:
        return ()
    times = [op.logged_us for ops in whole for op in ops.values()]
    seconds = (max(times) - min(times)) / 1e6
    if seconds < sum(max(op.exec_us for op in ops.values()) for ops in whole) / 1e6:
        return ()  # logged at the end of the job only
    return lateness([{rank: -op.exec_us / 1e6 for rank, op in ops.items()} for ops in whole], seconds)
