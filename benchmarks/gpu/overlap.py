"""Steps with overlapped pairs that alternate (``schedule.overlap``), next to the same plan without overlap.

    torchrun --nproc-per-node 2 benchmarks/gpu/overlap.py "2048,4096,4,8" 64,8,1024 dualpipe_v

The first argument is the size (hidden, sequence, blocks of a pipeline rank, micro-batches), the second the experts of
a block (how many, how many for a token, inner size), the third schedules. ``--pp N`` is the number of pipeline ranks,
by default 1; the experts of a block are shared out over the others. Both dispatchers. ``--timeline FILE`` draws the
last timed step of both sides, with the device's times, in a format of ``pipeproof run -o``, by its suffix.

Forward and backward of all micro-batches, bfloat16, no optimizer. The two sides are timed one step after the other; a
step counts from a common start to the end of the slowest rank. It prints medians, then the median, smallest and largest
ratio of pairs of steps, then all steps. In further steps of each side the device times all operations: ``comm`` is the
time of the collectives over ``ep``, ``exposed`` the part of it in which the rank computed nothing, ``busy`` the time in
which it computed, and ``idle`` the rest of the step, of the rank where most is exposed. ``GiB`` is the peak of a step
above the memory at its start. The bits of losses and gradients are compared with kernels that add in one order.
``predicted`` are simulated steps, with the same parts: with a profile of the plan without overlap, with messages as the
backend has them, and with the slowdown of products next to exchanges as it was measured by itself.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from measure import forget, leave
from our_step import start
from sizes import Size
from timed_rank import OurRank

from pipeproof.cli.timeline_option import write_timeline
from pipeproof.comm.lower import lower
from pipeproof.exec.launch.run_report import measured_timeline
from pipeproof.exec.measure.profile_from_logs import measured_profile
from pipeproof.exec.rank.op_log import LogEntry
from pipeproof.exec.rank.torch.comm import connect_groups
from pipeproof.exec.rank.torch.framework import TorchFramework
from pipeproof.schedule.ops import CHILD_KINDS, COMPUTE_KINDS, PART_KINDS, parse_op
from pipeproof.sim.simulate import simulate
from pipeproof.sim.timeline import Timeline
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.profile_file import Profile
from pipeproof.verify.certificate import graph_digest
from pipeproof.verify.subject import make_subject

NUM_PAIRS = 10
NUM_TIMED = 3
NUM_ROWS, NUM_PRODUCTS, NUM_EXCHANGES = 2**15, 8, 10
"""For the slowdown: rows of an exchange, and products that end before the exchanges do."""
DISPATCHERS = ("all_to_all", "all_gather")
Interval = tuple[int, int]


@dataclass(frozen=True)
class Exposed:
    """Milliseconds of a rank's step: collectives over ``ep`` ran, ran without computation; computation; neither."""

    comm: float
    exposed: float
    busy: float
    idle: float

    @classmethod
    def most(cls, timeline: Timeline) -> Exposed:
        """The figures of one step's rank on which most is exposed."""
        ranks = range(len(timeline.ranks))
        return max((cls._of(timeline, rank) for rank in ranks), key=lambda each: each.exposed)

    @classmethod
    def _of(cls, timeline: Timeline, rank: int) -> Exposed:
        entries = [
            (parse_op(span.op), (int(timeline.us(span.start) * 1000), int(timeline.us(span.end) * 1000)))
            for span in timeline.spans if span.rank == rank
        ]  # fmt: skip
        moved = [times for op, times in entries if op.kind in CHILD_KINDS and op.axis == "ep"]
        children = [times for op, times in entries if op.kind in CHILD_KINDS]
        containers = {op.target for op, _ in entries if op.kind in PART_KINDS}
        whole = [times for op, times in entries if op.kind in COMPUTE_KINDS and op not in containers]
        parts = [times for op, times in entries if op.kind in PART_KINDS]
        busy = [*_without(whole, children), *parts]
        comm, exposed, computed = (_ms(of) for of in (moved, _without(moved, busy), busy))
        return cls(comm, exposed, computed, float(timeline.makespan_us) / 1e3 - exposed - computed)

    def __str__(self) -> str:
        return f"comm {self.comm:8.2f} exposed {self.exposed:8.2f} busy {self.busy:8.2f} idle {self.idle:8.2f}"


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

    def __init__(self, data: dict[str, Any], overlap: str, framework: TorchFramework) -> None:
        schedule = {**data["schedule"], "overlap": overlap}
        self._device = framework.device
        self.data = {**data, "schedule": schedule}
        self.plan = plan = lower(plan_from_dict(self.data).spec).unfolded()
        rank, graph = dist.get_rank(), plan.graph
        self.world = connect_groups(rank, self._device, graph.channels, graph.groups, lambda _: None)
        self.ours = OurRank(plan, rank, framework, self.world)
        self.gib = 0.0

    def step_ms(self) -> float:
        """One step, of the slowest rank."""
        return self._measured(lambda: self.ours.step(0))

    def results(self) -> dict[str, torch.Tensor]:
        """Losses and gradients of a step, in the host's memory."""
        self.ours.step(0)
        self.ours.adapter.finish()
        stages = self.ours.adapter.stages.values()
        found = {name: weight.gradient for stage in stages for name, weight in stage.parameters.items()}
        loss = self.ours.adapter.outcome.loss
        whole = {name: gradient.cpu().clone() for name, gradient in found.items()}
        return whole if loss is None else {**whole, "loss": torch.as_tensor(loss)}

    def timed(self) -> list[list[LogEntry]]:
        """The logs of all ranks of ``NUM_TIMED`` steps, operations timed, after one that makes the events."""
        log = [entry for number in range(NUM_TIMED + 1) for entry in self.ours.timed_step(number)]
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, log)
        return gathered

    def slowdown(self) -> float:
        """Share by which products take longer while experts exchange rows; 0 without GPUs."""
        if self._device.type != "cuda":
            return 0.0
        collectives: Any = next(c for i, c in self.world.collectives.items() if self.plan.graph.groups[i].axis == "ep")
        sizes = [NUM_ROWS // len(collectives.ranks)] * len(collectives.ranks)
        rows = torch.randn(NUM_ROWS, 2048, device=self._device, dtype=torch.bfloat16)
        weight = torch.randn(2048, 1024, device=self._device, dtype=torch.bfloat16)

        def products_ms(num_exchanges: int) -> float:
            begun = [collectives.begun.exchange(rows, sizes, sizes) for _ in range(num_exchanges)]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(NUM_PRODUCTS):
                torch.mm(rows, weight)
            end.record()
            for each in begun:
                each.wait()
            torch.cuda.synchronize(self._device)
            dist.barrier()
            return begin.elapsed_time(end)

        alone, slowed = (median(products_ms(number) for _ in range(NUM_PAIRS)) for number in (0, NUM_EXCHANGES))
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, slowed / alone - 1)
        return max(0.0, *gathered)

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


def _profile(side: Side, logs: Sequence[Sequence[LogEntry]]) -> Profile:
    """The profile of timed steps; without messages between steps."""
    subject = make_subject(plan_from_dict(side.data))
    return measured_profile(subject, graph_digest(subject), dict(enumerate(logs)), {}, 1)


def _predicted(plain: Side, pairs: Side, profile: Profile, slowdown: float) -> list[Timeline]:
    """Simulated steps of both sides, by a profile of the first."""
    content = profile.model_dump(mode="json", by_alias=True)
    for stage in content["stages"]:  # these steps have no optimizer
        free = {name: 0 if name != "count" else 1 for name in stage["ops"][0]["whole"]}
        stage["ops"].append({**stage["ops"][0], "kind": "STEP", "whole": free, "own": free})
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(content, file)
        file.flush()
        cost = {"profile": file.name, "p2p": "backend"}
        sides = zip((plain, pairs), (cost, {**cost, "collective_slowdown": round(slowdown, 3)}), strict=True)
        plans = [lower(plan_from_dict({**side.data, "cost": cost}).spec) for side, cost in sides]
        return [simulate(plan).timeline for plan in plans]


def _alternated(steps: Sequence[Callable[[], float]]) -> tuple[list[float], str]:
    """The medians of both sides; the median, smallest and largest ratio of the second to the first, and all steps."""
    for step in steps:
        step()
        step()
    pairs = [tuple(step() for step in steps) for _ in range(NUM_PAIRS)]
    ratios = [second / first for first, second in pairs]
    medians = [median(side) for side in zip(*pairs, strict=True)]
    every = "; ".join(" ".join(f"{ms:.0f}" for ms in side) for side in zip(*pairs, strict=True))
    return medians, f"{median(ratios):6.3f} ({min(ratios):.3f} to {max(ratios):.3f}), steps {every}"


def _last_step(side: Side, logs: Sequence[Sequence[LogEntry]]) -> Timeline:
    """The last timed step."""
    last = {rank: [entry for entry in log if entry.step == NUM_TIMED] for rank, log in enumerate(logs)}
    return measured_timeline(make_subject(plan_from_dict(side.data)), last)


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
    """Time the schedules on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("size")
    parser.add_argument("experts")
    parser.add_argument("kinds")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--rows", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dispatchers", default=",".join(DISPATCHERS))
    parser.add_argument("--timeline", type=Path)
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
    kinds, dispatchers = (each.split(",") for each in (options.kinds, options.dispatchers))
    for kind in kinds:
        for dispatcher in dispatchers:
            data = replace(size, moe={**moe, "dispatcher": dispatcher}).plan(kind, options.pp, ep=ep)
            data["schedule"]["micro_batch_size"] = options.rows
            title = f"{kind} {dispatcher}"
            sides = [Side(data, overlap, framework) for overlap in ("none", "pairs")]
            medians, ratio = _alternated([side.step_ms for side in sides])
            report(f"{title}: none {medians[0]:8.2f} pairs {medians[1]:8.2f} ratio {ratio}")
            logs = [side.timed() for side in sides]
            timelines = [_last_step(side, log) for side, log in zip(sides, logs, strict=True)]
            profiles = [_profile(side, log) for side, log in zip(sides, logs, strict=True)]
            found = [Exposed.most(timeline) for timeline in timelines]
            names = "none", "pairs"
            if options.timeline is not None and dist.get_rank() == 0:
                for name, side, timeline in zip(names, sides, timelines, strict=True):
                    file = options.timeline.with_stem(f"{options.timeline.stem}-{dispatcher}-{name}")
                    graph = make_subject(plan_from_dict(side.data)).graph
                    write_timeline(file, f"{title}, overlap: {name}", timeline, graph)
            for name, one, side in zip(names, found, sides, strict=True):
                report(f"{title}, {name:5}: {one}   GiB {side.gib:.2f}")
            slowdown = sides[1].slowdown()
            simulated = _predicted(*sides, profiles[0], slowdown)
            predicted = [float(timeline.makespan_us) / 1e3 for timeline in simulated]
            timed = [float(timeline.makespan_us) / 1e3 for timeline in timelines]
            report(f"{title}, predicted: none {predicted[0]:8.2f} pairs {predicted[1]:8.2f} "
                   f"ratio {predicted[1] / predicted[0]:.3f}, products slower by {slowdown:.3f}; pairs "
                   f"{predicted[1] / medians[1] - 1:+.1%} of the step, {predicted[1] / timed[1] - 1:+.1%} of timed ones"
            )  # fmt: skip
            for name, timeline in zip(names, simulated, strict=True):
                report(f"{title}, predicted {name:5}: {Exposed.most(timeline)}")
            hidden = 1 - found[1].exposed / found[0].exposed
            report(f"{title}: {hidden:.0%} of the exposed communication is hidden; {_equal_bits(sides)}")
            del sides
            forget(framework.device)
    leave()


if __name__ == "__main__":
    main()
