"""Steps with overlapped pairs that take turns (``schedule.overlap``), alternately with the same plan without overlap.

    torchrun --nproc-per-node 2 benchmarks/gpu/overlap.py "2048,4096,4,8" 64,8,1024 dualpipe_v

The first argument is the size (hidden, sequence, blocks of a pipeline rank, micro-batches), the second the experts of
a block (how many, how many for a token, inner size), the third schedules. ``--pp N`` is the number of pipeline ranks,
by default 1; the experts of a block are shared out over the others. Both dispatchers, over the values of
``transport.experts`` that ``--movers`` names; operation by operation, and the all-gather also as one CUDA graph.

Forward and backward of all micro-batches, bfloat16, no optimizer. The two sides are timed one step after the other; a
step counts from a common start to the end of the slowest rank. Printed are medians, and of pairs of steps the median,
smallest and largest ratio. In one more step of each side the device times all operations: ``comm`` is the time of the
collectives over ``ep``, ``exposed`` the part of it in which the rank computed nothing, and ``busy`` the time in which
it computed, of the rank where most is exposed. ``GiB`` is the peak of a step above what it found. The bits of losses
and gradients are compared with kernels that add in one order.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measure import forget
from our_step import start
from sizes import Size
from timed_rank import OurRank

from pipeproof.comm.lower import lower
from pipeproof.exec.rank.op_log import LogEntry
from pipeproof.exec.rank.torch.comm import Copied, connect_groups
from pipeproof.exec.rank.torch.framework import TorchFramework
from pipeproof.schedule.ops import CHILD_KINDS, COMPUTE_KINDS, PART_KINDS, parse_op
from pipeproof.specs.load_plan import plan_from_dict

NUM_PAIRS = 10
DISPATCHERS = ("all_to_all", "all_gather")
Interval = tuple[int, int]


@dataclass(frozen=True)
class Exposed:
    """Milliseconds of a step in which collectives over ``ep`` ran, ran without computation, and the rank computed."""

    comm: float
    exposed: float
    busy: float

    @classmethod
    def of(cls, log: Iterable[LogEntry]) -> Exposed:
        """From a log with times of the device."""
        entries = [(parse_op(entry.op), (entry.start_ns, entry.end_ns)) for entry in log]
        moved = [times for op, times in entries if op.kind in CHILD_KINDS and op.axis == "ep"]
        children = [times for op, times in entries if op.kind in CHILD_KINDS]
        containers = {op.target for op, _ in entries if op.kind in PART_KINDS}
        whole = [times for op, times in entries if op.kind in COMPUTE_KINDS and op not in containers]
        parts = [times for op, times in entries if op.kind in PART_KINDS]
        busy = [*_without(whole, children), *parts]
        return cls(*(_ms(of) for of in (moved, _without(moved, busy), busy)))


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _without(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """The intervals without the others."""
    left: list[Interval] = []
    cuts = _merged(others)
    for begin, end in _merged(intervals):
        at = begin
        for first, last in cuts:
            if last > at and first < end:
                left.append((at, min(first, end)))
                at = last
        left.append((at, end))
    return [(begin, end) for begin, end in left if begin < end]


def _ms(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in _merged(intervals)) / 1e6


class Side:
    """One of the two plans on this rank."""

    def __init__(self, data: dict[str, Any], overlap: str, framework: TorchFramework, *, replay: bool) -> None:
        schedule = {**data["schedule"], "overlap": overlap}
        run = {**data["run"], "replay": replay and framework.device.type == "cuda"}
        self._device = framework.device
        plan = lower(plan_from_dict({**data, "schedule": schedule, "run": run}).spec).unfolded()
        rank, graph = dist.get_rank(), plan.graph
        world = connect_groups(rank, self._device, graph.channels, graph.groups, lambda _: None, Copied.of(plan))
        self.ours = OurRank(plan, rank, framework, world)
        self.gib = 0.0

    def step_ms(self) -> float:
        """One step, of the slowest rank."""
        return self._measured(lambda: self.ours.step(0))

    def replays(self) -> Callable[[], float]:
        """The same of a captured step."""
        replay = self.ours.captured()
        return lambda: self._measured(replay)

    def results(self) -> dict[str, torch.Tensor]:
        """Losses and gradients of a step, in the host's memory."""
        self.ours.step(0)
        self.ours.adapter.finish()
        stages = self.ours.adapter.stages.values()
        found = {name: weight.gradient for stage in stages for name, weight in stage.parameters.items()}
        loss = self.ours.adapter.outcome.loss
        whole = {name: gradient.cpu().clone() for name, gradient in found.items()}
        return whole if loss is None else {**whole, "loss": torch.as_tensor(loss)}

    def exposed(self) -> Exposed:
        """Of the rank on which most is exposed; the second of two timed steps, for the first makes its events."""
        self.ours.timed_step(0)
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, Exposed.of(self.ours.timed_step(0)))
        return max(gathered, key=lambda each: each.exposed)

    def _measured(self, work: Callable[[], Interval]) -> float:
        on_gpu = self._device.type == "cuda"
        before = torch.cuda.memory_allocated(self._device) if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        begin, end = work()
        most = torch.tensor([float(end - begin), 0.0], dtype=torch.float64, device=self._device)
        if on_gpu:
            torch.cuda.synchronize(self._device)
            most[1] = (torch.cuda.max_memory_allocated(self._device) - before) / 2**30
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        ns, gib = most.tolist()
        self.gib = max(self.gib, gib)
        return ns / 1e6


def _alternated(steps: Sequence[Callable[[], float]]) -> tuple[list[float], str]:
    """The medians of both sides, and the median, smallest and largest ratio of the second to the first."""
    for step in steps:
        step()
        step()
    pairs = [tuple(step() for step in steps) for _ in range(NUM_PAIRS)]
    ratios = [second / first for first, second in pairs]
    medians = [median(side) for side in zip(*pairs, strict=True)]
    return medians, f"{median(ratios):6.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def _equal_bits(sides: Sequence[Side]) -> str:
    """Compare the results of both sides, and of the first one with its own."""
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    plain, again, other = (side.results() for side in (sides[0], *sides))
    torch.use_deterministic_algorithms(mode=False)
    differ = [[n for n in plain if not torch.equal(plain[n], found[n])] for found in (again, other)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, differ)
    again_differ, other_differ = (sum(len(of_rank[i]) for of_rank in gathered) for i in range(2))
    control = f" ({again_differ} differ without overlap too)" if again_differ else ""
    return f"{len(plain)} tensors a rank, " + (f"{other_differ} differ{control}" if other_differ else "bits equal")


def main() -> None:
    """Time what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("size")
    parser.add_argument("experts")
    parser.add_argument("kinds")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--movers", default="backend")
    parser.add_argument("--dispatchers", default=",".join(DISPATCHERS))
    options = parser.parse_args()
    framework, report = start()
    ep = dist.get_world_size() // options.pp
    num_experts, top_k, ffn = map(int, options.experts.split(","))
    moe = {"num_experts": num_experts, "top_k": top_k, "ffn_size": ffn}
    size = replace(Size.read(options.size), dtype=getattr(torch, options.dtype))
    report(f"hidden {size.hidden}, sequence {size.seq_length}, {size.num_layers} blocks a pipeline rank, "
           f"{size.num_micro_batches} micro-batches of {options.rows}, "
           f"{num_experts} experts of {ffn}, {top_k} a token, pp {options.pp}, ep {ep}, {NUM_PAIRS} pairs of steps"
    )  # fmt: skip
    kinds, movers, dispatchers = (each.split(",") for each in (options.kinds, options.movers, options.dispatchers))
    for kind, mover in itertools.product(kinds, movers):
        for dispatcher in dispatchers:
            data = replace(size, moe={**moe, "dispatcher": dispatcher}).plan(kind, options.pp, ep=ep)
            data["transport"] = {"experts": mover}
            data["schedule"]["micro_batch_size"] = options.rows
            title = f"{kind} {dispatcher}{', copies' if mover == 'copy_engine' else ''}"
            sides = [Side(data, overlap, framework, replay=False) for overlap in ("none", "pairs")]
            medians, ratio = _alternated([side.step_ms for side in sides])
            report(f"{title}, op by op: none {medians[0]:8.2f} pairs {medians[1]:8.2f} ratio {ratio}")
            found = [side.exposed() for side in sides]
            for name, one, side in zip(("none", "pairs"), found, sides, strict=True):
                report(f"{title}, {name:5}: comm {one.comm:8.2f} exposed {one.exposed:8.2f} busy {one.busy:8.2f}   "
                       f"GiB {side.gib:.2f}")  # fmt: skip
            hidden = 1 - found[1].exposed / found[0].exposed
            report(f"{title}: {hidden:.0%} of the exposed communication is hidden; {_equal_bits(sides)}")
            del sides
            forget(framework.device)
            if dispatcher == "all_to_all":
                continue  # the host reads how many rows go where
            sides = [Side(data, overlap, framework, replay=True) for overlap in ("none", "pairs")]
            for side in sides:
                side.step_ms()
            medians, ratio = _alternated([side.replays() for side in sides])
            report(f"{title}, replayed: none {medians[0]:8.2f} pairs {medians[1]:8.2f} ratio {ratio}")
            del sides
            forget(framework.device)
    dist.barrier()
    os._exit(0)  # communicators of captured graphs would hold a normal exit up


if __name__ == "__main__":
    main()
