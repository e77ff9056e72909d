"""Steps predicted from a profile of 1F1B, and the same steps measured, in one run.

    torchrun --nproc-per-node 2 benchmarks/gpu/prediction.py OUT.json "2048,2048,4,8,16" [KINDS]

The first argument is the file for the results; ``validation/pages/make_prediction.py`` makes
``validation/results/prediction.md`` from it. The second has sizes: hidden, sequence, blocks of a rank, micro-batches to
profile, and more numbers of micro-batches to predict. Forward and backward of all micro-batches in bfloat16, no
optimizer, a GPU a rank. Without GPUs it runs over gloo on processors, in float32: that tries the code.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace as changed
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from our_step import start
from predicting import (
    Measured,
    Power,
    between_us,
    cost_of,
    given_cost,
    graph_times,
    measured_starts,
    part_times,
    predicted_starts,
    simulated,
    spans_of,
    stage_times,
    start_errors,
    with_power,
)
from sizes import Size
from timed_rank import OurRank

from pipeproof.comm.lower import lower
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.measure.profile_from_logs import measured_profile
from pipeproof.exec.rank.torch.comm import TorchWorld, connect_groups
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.certificate import graph_digest
from pipeproof.verify.subject import make_subject

KINDS = ("gpipe", "1f1b", "interleaved", "interleaved_zb", "zb_v", "dualpipe_v")
NUM_STEPS = 3
"""Steps of each way to run one, after one that does not count."""
NUM_REPLAYS = 2


class Benchmark:
    """All ranks make one of these and do the same with it."""

    def __init__(self) -> None:
        self.framework, self.report = start()
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.on_gpu = self.framework.device.type == "cuda"
        self._worlds: dict[Any, TorchWorld] = {}
        self._left_bytes = 0
        """Bytes allocated before the current plan: captured communication leaves some behind."""

    def plan(self, size: Size, kind: str, **changes: Any) -> dict[str, Any]:
        """The plan as data; memory is counted without an optimizer, as it is measured."""
        data = size.plan(kind, self.num_ranks)
        run = data["run"] if self.on_gpu else {**data["run"], "device": "cpu", "dtype": "float32"}
        memory = {"optimizer_bytes": 0, "gradient_dtype": run["dtype"]}
        return {**data, "run": run, "memory": memory, **changes}

    def of(self, data: Mapping[str, Any]) -> tuple[LoweredPlan, OurRank]:
        """This rank of a plan; plans with the same channels share their communicators."""
        plan = lower(plan_from_dict(dict(data)).spec)
        key = plan.graph.channels, plan.graph.groups
        if key not in self._worlds:
            self._worlds[key] = connect_groups(self.rank, self.framework.device, *key, lambda _: None)
        self._left_bytes = torch.cuda.memory_allocated() if self.on_gpu else 0
        rank = self.rank if plan.mesh.num_ranks > 1 else 0
        ours = OurRank(plan, rank, self.framework, self._worlds[key])
        return plan, ours

    def gathered(self, one: Any) -> list[Any]:
        """Values of all ranks, by rank."""
        everyone: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(everyone, one)
        return everyone

    def peak_bytes(self) -> list[int]:
        """By rank the largest allocation since the last step began; nothing without GPUs."""
        return self.gathered(torch.cuda.max_memory_allocated() - self._left_bytes if self.on_gpu else 0)

    def forget(self) -> None:
        """Give the memory of the last plan back."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def profile(self, size: Size) -> Measured:
        """1F1B as it runs, and three chunks of each rank by themselves."""
        data = self.plan(size, "1f1b")
        _, ours = self.of(data)
        ours.step(0)
        logs = self.gathered([e for number in range(NUM_STEPS + 1) for e in ours.timed_step(number)])
        ours.step(0)
        peaks = self.peak_bytes()
        alone = self.gathered(part_times([e for n in range(NUM_STEPS) for e in ours.alone_step(n)])[self.rank])
        del ours
        self.forget()
        subject = make_subject(plan_from_dict(data))
        profile = measured_profile(subject, graph_digest(subject), dict(enumerate(logs)), {}, 1)
        stages = stage_times(profile)
        message_us = profile.messages[0].median_us if profile.messages else 0.0
        memory = simulated(data, given_cost(stages, message_us)).memory
        excess = [peak - int(curve.peak) for peak, curve in zip(peaks, memory, strict=True)]
        chunks = self._chunks(size)
        excess = excess if self.on_gpu else [0] * len(peaks)
        step_us, *_ = measured_starts(
            {rank: [e for e in log if e.step == number] for rank, log in enumerate(logs)}
            for number in range(1, NUM_STEPS + 1)
        )
        busy = [size.num_micro_batches * sum(stage.values()) / step_us for stage in stages]
        slower = [sum(full.values()) / sum(stage.values()) for full, stage in zip(alone, stages, strict=True)]
        return Measured(stages, chunks, message_us, between_us(profile), excess, Power(fmean(busy), fmean(slower)))

    def _chunks(self, size: Size) -> list[Any]:
        data = self.plan(size, "1f1b", topology={"pp": 1})
        data["model"]["num_layers"] = size.num_layers // 2 * 3
        data["schedule"] = {"kind": "looped_bfs", "num_chunks": 3, "num_micro_batches": 4, "micro_batch_size": 1}
        _, ours = self.of(data)
        ours.alone_step(0)
        times = part_times([e for number in range(NUM_STEPS) for e in ours.alone_step(number)])
        del ours
        self.forget()
        return self.gathered([times[chunk] for chunk in range(3)])

    def case(self, size: Size, kind: str, measured: Measured) -> dict[str, Any]:
        """One schedule, predicted and measured; microseconds and bytes."""
        data = self.plan(size, kind)
        plan, ours = self.of(data)
        cost, simulation = with_power(plan, data, cost_of(plan, measured), measured.power)
        step_us, starts, lengths = predicted_starts(simulation, cost)
        ours.step(0)
        plain = self._extents([ours.step(number) for number in range(NUM_STEPS)])
        peaks = self.peak_bytes()
        steps = [dict(enumerate(self.gathered(ours.timed_step(number)))) for number in range(NUM_STEPS + 1)][1:]
        measured_us, own_starts, own_lengths = measured_starts(steps)
        largest, most = start_errors(starts, own_starts)
        held = [int(curve.peak) + more for curve, more in zip(simulation.memory, measured.excess_bytes, strict=True)]
        result = {
            "kind": kind,
            "num_micro_batches": size.num_micro_batches,
            "predicted_us": step_us,
            "measured_us": measured_us,
            "untimed_us": plain,
            "largest_start_error_us": largest,
            "p95_start_error_us": most,
            "predicted_bytes": max(held) if self.on_gpu else None,
            "measured_bytes": max(peaks) if self.on_gpu else None,
            "predicted": spans_of(starts, lengths),
            "measured": spans_of(own_starts, own_lengths),
        }
        if self.on_gpu:
            result |= self._graphs(plan, data, ours, measured)
        del ours
        self.forget()
        return result

    def _graphs(self, plan: LoweredPlan, data: Mapping[str, Any], ours: OurRank, measured: Measured) -> dict[str, Any]:
        """The step as one CUDA graph; simulated with the times of each computation as a graph; and work alone.

        Computations are timed one right after the other, so a GPU has least of clock and power there.
        """
        ops = self.gathered(ours.replayed_ops(NUM_REPLAYS))
        self.forget()
        alone = self.gathered([end - start for start, end in ours.replayed_alone(NUM_REPLAYS)])
        self.forget()
        whole = self._extents(ours.replayed(NUM_REPLAYS))
        times = graph_times(one for of_rank in ops for one in of_rank)
        cost = given_cost([times[stage] for stage in range(len(plan.stages))], measured.message_us)
        powered, simulation = with_power(plan, data, cost, measured.power.from_full())
        return {
            "graph_us": whole,
            "graph_full_power_us": predicted_starts(simulated(data, cost), cost)[0],
            "graph_predicted_us": predicted_starts(simulation, powered)[0],
            "work_us": max(median(one) for one in alone) / 1e3,
        }

    def _extents(self, own: Sequence[tuple[int, int]]) -> float:
        """Microseconds from the first rank's start to the last one's end: the median of several."""
        ranks = self.gathered(list(own))
        steps = zip(*ranks, strict=True)
        return median(max(end for _, end in step) - min(start for start, _ in step) for step in steps) / 1e3


def _line(size: Size, case: Mapping[str, Any]) -> str:
    def percent(part: float, whole: float) -> str:
        return f"{100 * part / whole:5.1f}%"

    step = case["measured_us"]
    text = (
        f"{size.hidden:5} {case['kind']:15} {case['num_micro_batches']:3} "
        f"{case['predicted_us'] / 1e3:8.2f} {step / 1e3:8.2f} {percent(case['predicted_us'] - step, step)} "
        f"{percent(case['largest_start_error_us'], step)} {percent(case['p95_start_error_us'], step)} "
        f"{percent(step - case['untimed_us'], case['untimed_us'])} "
    )
    if case["measured_bytes"]:
        held, graph = case["measured_bytes"], case["graph_us"]
        text += (
            f"{case['predicted_bytes'] / 2**30:6.2f} {held / 2**30:6.2f} "
            f"{percent(case['predicted_bytes'] - held, held)} {graph / 1e3:8.2f} "
            f"{percent(graph - case['graph_predicted_us'], case['graph_predicted_us'])} {case['work_us'] / 1e3:8.2f}"
        )
    return text


def main() -> None:
    """Predict and measure the sizes on the command line."""
    out, kinds = Path(sys.argv[1]), sys.argv[3].split(",") if sys.argv[3:] else KINDS
    benchmark = Benchmark()
    name = torch.cuda.get_device_name() if benchmark.on_gpu else "processors, float32"
    about = {"device": name, "torch": torch.__version__, "num_ranks": benchmark.num_ranks}
    benchmark.report(
        "size  schedule         mb     pred     meas   err  start   p95  timing  GiB: pred, meas, err  graph err work"
    )
    sizes: list[dict[str, Any]] = []
    for text in sys.argv[2].split(";"):
        hidden, sequence, layers, *counts = map(int, text.split(","))
        size = Size(hidden, sequence, layers, counts[0])
        measured = benchmark.profile(size)
        cases: list[dict[str, Any]] = []
        sizes.append({"hidden": hidden, "sequence": sequence, "layers_a_rank": layers,
                      "profiled_micro_batches": counts[0], "message_us": measured.message_us,
                      "between_us": measured.between_us,
                      "busy": measured.power.busy, "slower_alone": measured.power.slower,
                      "stages": measured.stages, "chunks_alone": measured.chunks, "cases": cases})  # fmt: skip
        for count, kind in ((count, kind) for count in counts for kind in kinds):
            cases.append(benchmark.case(changed(size, num_micro_batches=count), kind, measured))
            benchmark.report(_line(size, cases[-1]))
            if benchmark.rank == 0:  # each time: a run that is cut short keeps its measurements
                out.write_text(json.dumps({**about, "sizes": sizes}, separators=(",", ":")) + "\n", encoding="utf-8")
    dist.barrier()
    os._exit(0)  # communicators of captured graphs would hold a normal exit up


if __name__ == "__main__":
    main()
