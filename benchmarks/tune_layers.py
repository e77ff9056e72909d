"""The layout that ``pipeproof.torch.tune`` chooses, next to every cut with every kind of schedule, run one by one.

    torchrun --nproc-per-node 4 benchmarks/tune_layers.py
    torchrun --nproc-per-node 4 benchmarks/tune_layers.py --layers-ms 2,9,3,1,7,2,4 --micro-batches 6

Layers of an ``nn.Sequential`` over gloo wait instead of computing: F for the given milliseconds, I and W for as long
each. So the times of ranks do not depend on the number of processors. Kinds with W run with ``split='linear'``, the
others with ``split='whole'``. The fastest ones of all and the chosen one are then run again in turns: the last line has
their fastest steps and the ratio of the chosen one to the best.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeproof.analysis.tune.layer_cuts import Layers, Problem, Way, tried_kinds
from pipeproof.torch import Pipeline, PlanRefused, Search, stages_of_sequential, tune

WIDTH = 8
NUM_BEST, NUM_ROUNDS = 4, 5
"""Layouts that are run again, and how often."""


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        time.sleep(seconds)
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Waiting(nn.Module):
    """A layer whose F, I and W take ``ms`` milliseconds each."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.ms = ms
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear.weight.register_hook(self._wait_for_weight)

    def _wait_for_weight(self, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(self.ms / 1e3)
        return gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        return _Wait.apply(self.linear(x), self.ms / 1e3)


class Job:
    """The layers and the micro-batches of a step."""

    def __init__(self, layers_ms: Sequence[float], num_micro_batches: int) -> None:
        self.layers_ms, self.num_micro_batches = layers_ms, num_micro_batches
        self.example = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))
        self.batch = self.example.repeat(num_micro_batches, 1)

    def model(self) -> nn.Sequential:
        """The layers with equal weights on all ranks."""
        torch.manual_seed(0)
        return nn.Sequential(*map(Waiting, self.layers_ms))

    def cuts(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Every kind with its split, and every cut for it."""
        num_layers, num_ranks = len(self.layers_ms), dist.get_world_size()
        layers = Layers((0,) * num_layers, has_ends=False)
        for split in ("whole", "linear"):
            way = Way(split, split == "linear", ())
            for kind, chunks in tried_kinds(Problem(layers, way, num_ranks, self.num_micro_batches)):
                if (split == "linear") == (kind.split_backwards(num_ranks, self.num_micro_batches) > 0):
                    for inner in combinations(range(1, num_layers), num_ranks * chunks - 1):
                        yield kind.name, split, tuple(b - a for a, b in pairwise((0, *inner, num_layers)))

    def pipeline(self, kind: str, split: str, sizes: Sequence[int]) -> Pipeline:
        """A layout."""
        return Pipeline(
            stages_of_sequential(self.model(), len(sizes), sizes=sizes), schedule=kind, split=split,  # type: ignore[arg-type]
            num_micro_batches=self.num_micro_batches, loss_fn=nn.functional.mse_loss, example=(self.example,),
        )  # fmt: skip

    def step_of(self, pipe: Pipeline) -> Callable[[], float]:
        """Milliseconds of one step."""
        args = (self.batch,) if pipe.is_first else ()
        target = self.batch if pipe.is_last else None

        def step() -> float:
            dist.barrier()
            started = time.perf_counter()
            pipe.step(*args, target=target)
            dist.barrier()
            return (time.perf_counter() - started) * 1e3

        step()
        return step


def main() -> None:
    """Tune the layers, and try all layouts."""
    parser = argparse.ArgumentParser(description="The layout that tune chooses, next to all others.")
    parser.add_argument("--layers-ms", default="2,5,3,8,1,4,2,6", help="milliseconds of F of each layer, ',' between")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3, help="steps of each layout; the fastest counts")
    parser.add_argument("--trials", type=int, default=3, help="layouts that tune runs")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    job = Job([float(text) for text in options.layers_ms.split(",")], options.micro_batches)
    is_shown = dist.get_rank() == 0
    layout = tune(
        job.model(), loss_fn=nn.functional.mse_loss, example=(job.example,), target=job.example,
        num_micro_batches=job.num_micro_batches, search=Search(num_trials=options.trials, without_pipeline=False),
    )  # fmt: skip
    chosen = layout.rows[0].schedule, layout.split, layout.rows[0].sizes
    if is_shown:
        print(layout, flush=True)
    found = []
    for cut in job.cuts():
        try:
            pipe = job.pipeline(*cut)
        except PlanRefused:
            continue
        step = job.step_of(pipe)
        found.append((_slowest(min(step() for _ in range(options.steps))), cut))
        pipe.close()
        if is_shown:
            print(json.dumps({"kind": cut[0], "sizes": cut[2], "ms": round(found[-1][0], 1)}), flush=True)
    again = {cut: job.step_of(job.pipeline(*cut)) for cut in {chosen: 0, **dict.fromkeys(_best(found))}}
    best = dict.fromkeys(again, float("inf"))
    for _ in range(NUM_ROUNDS):
        best = {cut: min(best[cut], _slowest(step())) for cut, step in again.items()}
    if is_shown:
        print(json.dumps({
            "num_layouts": len(found), "tune_s": dict(layout.seconds),
            "fastest_ms": {f"{kind} {sizes}": round(ms, 1) for (kind, _, sizes), ms in best.items()},
            "chosen": [chosen[0], *chosen[2]], "ratio": round(best[chosen] / min(best.values()), 4),
        }))  # fmt: skip
    dist.destroy_process_group()


def _best(found: Sequence[tuple[float, Any]]) -> list[Any]:
    return [cut for _, cut in sorted(found)[:NUM_BEST]]


def _slowest(ms: float) -> float:
    """The time of the slowest rank: with it all ranks choose the same layouts."""
    value = torch.tensor(ms, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


if __name__ == "__main__":
    main()
