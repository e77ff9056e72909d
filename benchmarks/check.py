"""Times a whole check of large plans, part by part, next to PyTorch's own generation and lowering.

``python benchmarks/check.py`` prints

1. interleaved 1F1B on 64 ranks with 4 stages each and 256 micro-batches
   (131,072 compute operations): our generation, lowering, rules and digest,
   next to what the constructor of PyTorch's ``ScheduleInterleaved1F1B`` does
   (generation, validation, FSDP actions, ``_add_send_recv``) and its
   ``_simulate_comms_compute``, and the ratios;
2. the same with a half and a quarter of the micro-batches: cost per operation;
3. a plan the size of Llama 3 405B: PP 16, 8 chunks, TP 8 with sequence
   parallelism, DP 64, 128 micro-batches;
4. a plan of 10,240 ranks (PP 16, TP 8, DP 80) in which one rank lacks one
   collective: every rank is a program of its own.

Each part runs in a process of its own, which reports its peak memory. PyTorch
is measured where it is installed (``pip install torch==2.13.0``); nothing is
asserted: times are the machine's. ``--without-simulation`` leaves out
PyTorch's slow part.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

RANKS, CHUNKS, MICRO_BATCHES = 64, 4, 256


def main() -> None:
    """Run every part in turn and print the tables."""
    ours = part("ours", MICRO_BATCHES)
    print(f"interleaved 1F1B, {RANKS} ranks x {CHUNKS} stages, {MICRO_BATCHES} micro-batches, seconds")
    print_parts("pipeproof", ours)
    if importlib.util.find_spec("torch") is None:
        print("PyTorch is not installed: pip install torch==2.13.0 to compare with it")
    else:
        theirs = part("torch", MICRO_BATCHES)
        print_parts(f"PyTorch {theirs['version']}", theirs)
        constructor = sum(s for name, s in theirs["parts"].items() if name != "_simulate_comms_compute")
        print_ratio(ours, "what its constructor does", constructor)
        print_ratio(
            ours, "generate + _add_send_recv alone", sum(theirs["parts"][n] for n in ("generate", "_add_send_recv"))
        )
    print("\ncost per operation")
    for num_micro_batches in (MICRO_BATCHES // 4, MICRO_BATCHES // 2, MICRO_BATCHES):
        result = ours if num_micro_batches == MICRO_BATCHES else part("ours", num_micro_batches)
        total, rows = sum(result["parts"].values()), result["num_ops"]
        each = f"{total / rows * 1e6:.2f} us each"
        print(f"  {num_micro_batches:>4} micro-batches: {rows:>8,} operations, {total:.2f} s, {each}")
    print("\nlike Llama 3 405B: PP 16 x 8 chunks, TP 8 with SP, DP 64, 128 micro-batches, seconds")
    print_parts("pipeproof", part("llama", 128))
    print("\n10,240 ranks, one without a collective, PP 16 x TP 8 x DP 80, 8 micro-batches, seconds")
    print_parts("pipeproof", part("broken", 8))


def print_ratio(ours: dict[str, Any], name: str, seconds: float) -> None:
    """Total of our times, in units of a part of PyTorch's."""
    total = sum(ours["parts"].values())
    print(f"  ratio: pipeproof's all {total:.2f} s / PyTorch's {name} {seconds:.2f} s = {total / seconds:.2f}")


def print_parts(name: str, result: dict[str, Any]) -> None:
    """One line a part, then the sum."""
    for part_name, seconds in result["parts"].items():
        print(f"  {name:<16} {part_name:<28} {seconds:>7.3f}")
    total = sum(result["parts"].values())
    print(f"  {name:<16} {'all':<28} {total:>7.3f}  ({result['num_ops']:,} operations, {result['peak_mib']:.0f} MiB)")


def part(name: str, num_micro_batches: int) -> dict[str, Any]:
    """Measure one part in a process of its own."""
    command = [sys.executable, __file__, "--part", name, str(num_micro_batches), *sys.argv[1:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


class Parts:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time inside to the part ``name``."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def measure_ours(num_micro_batches: int) -> dict[str, Any]:
    """Interleaved 1F1B on one rank per stage group: no replicas to save work on."""
    return measure_check(
        {
            "pipeproof": 1,
            "model": model(num_layers=RANKS * CHUNKS),
            "topology": {"pp": RANKS},
            "schedule": schedule(num_micro_batches, CHUNKS),
        }
    )


def measure_llama(num_micro_batches: int) -> dict[str, Any]:
    """126 layers on 128 stages: the first holds the embedding alone, the last the head."""
    layers = [[f"layer.{i}"] for i in range(126)]
    return measure_check(
        {
            "pipeproof": 1,
            "model": {
                "kind": "gpt", "num_layers": 126, "hidden_size": 16384, "num_heads": 128, "ffn_size": 53248,
                "vocab_size": 128256, "seq_length": 8192,
            },
            "topology": {"pp": 16, "tp": 8, "dp": 64, "sequence_parallel": True},
            "schedule": schedule(num_micro_batches, 8),
            "stages": [["embed"], *layers, ["norm", "head"]],
        }
    )  # fmt: skip


def measure_broken(num_micro_batches: int) -> dict[str, Any]:
    """A plan of replicas in which one rank has a program of its own: nothing is folded."""
    import numpy as np

    from pipeproof.schedule.op_table import OpGraph
    from pipeproof.specs.load_plan import plan_from_dict
    from pipeproof.verify.registry import RULES
    from pipeproof.verify.subject import make_subject

    parts = Parts()
    gc.disable()
    plan = {
        "pipeproof": 1,
        "model": model(num_layers=32),
        "topology": {"pp": 16, "tp": 8, "dp": 80, "sequence_parallel": True},
        "schedule": {"kind": "1f1b", "num_micro_batches": num_micro_batches, "micro_batch_size": 1},
    }
    with parts.timed("lower"):
        subject = make_subject(plan_from_dict(plan)).unfolded()
    graph = subject.graph
    with parts.timed("build the changed graph"):
        rank = graph.num_ranks // 2
        first = int(graph.offsets[rank])
        lost = first + int(np.flatnonzero(graph.group[first:] >= 0)[0])
        offsets = graph.offsets - (np.arange(len(graph.offsets)) > rank)
        rows = np.delete(np.arange(graph.num_ops), lost)
        changed = OpGraph(graph.columns.take(rows, offsets), graph.tensors, graph.groups, graph.global_rank)
        subject = subject.with_graph(changed)
    errors = set()
    for rule in RULES:
        with parts.timed(f"rules {rule.doc.code[:3]}xx"):
            errors |= {finding.code for finding in rule.check(subject) if finding.severity == "error"}
    assert errors, "the missing collective is found"
    return {"parts": parts.seconds, "num_ops": changed.num_ops}


def model(num_layers: int) -> dict[str, Any]:
    """A GPT whose layers' sizes do not matter here."""
    return {
        "kind": "gpt", "num_layers": num_layers, "hidden_size": 64, "num_heads": 8, "ffn_size": 128,
        "vocab_size": 256, "seq_length": 64,
    }  # fmt: skip


def schedule(num_micro_batches: int, num_chunks: int) -> dict[str, Any]:
    """Interleaved 1F1B."""
    return {
        "kind": "interleaved", "num_micro_batches": num_micro_batches, "micro_batch_size": 1, "num_chunks": num_chunks,
    }  # fmt: skip


def measure_check(plan: dict[str, Any]) -> dict[str, Any]:
    """Generate, lower, run every rule family, digest; what ``pipeproof check`` does after reading the file."""
    from pipeproof.comm.lower import plan_schedule
    from pipeproof.specs.load_plan import plan_from_dict
    from pipeproof.verify.certificate import graph_digest
    from pipeproof.verify.memory_budget import in_flight
    from pipeproof.verify.registry import RULES
    from pipeproof.verify.subject import make_subject

    parts = Parts()
    gc.disable()  # as the command does: loaded and built objects stay until its end
    loaded = plan_from_dict(plan)
    with parts.timed("generate"):
        plan_schedule(loaded.spec)
    with parts.timed("lower"):
        subject = make_subject(loaded)
    parts.seconds["lower"] -= parts.seconds["generate"]  # lowering generates for itself
    errors = 0
    for rule in RULES:
        with parts.timed(f"rules {rule.doc.code[:3]}xx"):
            errors += sum(finding.severity == "error" for finding in rule.check(subject))
    with parts.timed("memory figures"):
        in_flight(subject)
    with parts.timed("digest"):
        graph_digest(subject)
    assert errors == 0, "the benchmark's plans are right"
    return {"parts": parts.seconds, "num_ops": subject.graph.num_ops}


def measure_torch(num_micro_batches: int) -> dict[str, Any]:
    """PyTorch's schedule of the same plan, made as its constructor makes it but without stages to run."""
    import torch
    from torch.distributed.pipelining import schedules

    def stage_to_rank(stage: int) -> int:
        return stage % RANKS

    parts = Parts()
    num_stages = RANKS * CHUNKS
    made = object.__new__(schedules.ScheduleInterleaved1F1B)
    made.pp_group_size, made.n_local_stages, made._n_microbatches = RANKS, CHUNKS, num_micro_batches
    made.number_of_rounds = max(1, num_micro_batches // RANKS)
    made.microbatches_per_round = num_micro_batches // made.number_of_rounds
    with parts.timed("generate"):
        order = {rank: made._calculate_single_rank_operations(rank) for rank in range(RANKS)}
    with parts.timed("_validate_schedule"):
        schedules._validate_schedule(order, RANKS, num_stages, num_micro_batches)
    with parts.timed("_add_unshard_reshard"):
        compute = {rank: schedules._add_unshard_reshard(ops) for rank, ops in order.items()}
    with parts.timed("_add_reduce_grad"):
        compute = {rank: schedules._add_reduce_grad(ops, num_micro_batches) for rank, ops in compute.items()}
    with parts.timed("_add_send_recv"):
        complete = schedules._add_send_recv(compute, stage_to_rank=stage_to_rank, num_stages=num_stages)
    if "--without-simulation" not in sys.argv:  # which does not know the FSDP actions
        known = {rank: [a for a in actions if a.microbatch_index is not None] for rank, actions in complete.items()}
        with parts.timed("_simulate_comms_compute"):
            schedules._simulate_comms_compute(known, stage_to_rank, num_stages)
    return {"parts": parts.seconds, "num_ops": sum(map(len, complete.values())), "version": torch.__version__}


MEASURES: dict[str, Callable[[int], dict[str, Any]]] = {
    "ours": measure_ours,
    "llama": measure_llama,
    "broken": measure_broken,
    "torch": measure_torch,
}

if __name__ == "__main__":
    if "--part" in sys.argv:
        where = sys.argv.index("--part")
        outcome = MEASURES[sys.argv[where + 1]](int(sys.argv[where + 2]))
        outcome["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(outcome))
    else:
        main()
