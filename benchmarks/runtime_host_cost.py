"""Host time of the runtime for each operation of a schedule, without computation and without communication.

One rank of a plan runs in this process. Its stages return their tensors, and its transfers are done when they are
posted. Only the interpreter, the tensors between operations and the progress for the stall watch are left. Times are
CPU times of the thread, the smallest of the rounds: other processes matter little. ``progress`` is the difference to a
run without it, and ``log`` the time that a log with times adds, as for a profile.

    python benchmarks/runtime_host_cost.py --schedules 1f1b zb_v
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.rank.op_log import HostClock
from pipeproof.exec.rank.torch.arrays import TorchArrays
from pipeproof.exec.train.module_plan import Request, StageFacts, complete_plan
from pipeproof.exec.train.script_framework import ScriptFramework
from pipeproof.exec.train.train_rank import TrainRank
from pipeproof.schedule.ops import OpKind
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.subject import make_subject

_ROWS, _WIDTH = 1, 8


class _Done:
    """A transfer that is done when it is posted."""

    posted_ns = start_ns = end_ns = 0

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def wait(self) -> None:
        """Return at once."""


class _Channels:
    def post(self, channel: Any, buffer: Any, after: Any = ()) -> _Done:
        return _Done(buffer)


class _World:
    channels, collectives = _Channels(), {}  # type: ignore[var-annotated]


class _Weights:
    def accumulate(self) -> None:
        """Compute nothing."""


class _Stage:
    """A stage whose output, and whose gradient of the input, are always one tensor."""

    parameters: dict[str, Any] = {}  # noqa: RUF012 - a stage without weights

    def __init__(self) -> None:
        self._value, self._weights = torch.zeros(_ROWS, _WIDTH), _Weights()

    def forward(self, inputs: Any, **_: Any) -> tuple[torch.Tensor]:
        for leaf in inputs:
            leaf.grad = self._value
        return (self._value,)

    def backward_input(self, outputs: Any, gradients: Any) -> _Weights:
        return self._weights

    def return_gradients(self) -> None:
        """Do nothing: no weight is shared."""


@dataclass(slots=True)
class _Watch:
    """The assignments of ``StallWatch.enter``."""

    at: tuple[int, int] = (-1, -1)
    since: float = 0.0

    def enter(self, step: int, op_id: int) -> None:
        """Note an operation and the time."""
        self.at, self.since = (step, op_id), time.monotonic()


def main() -> None:
    """Measure each schedule and print JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "interleaved", "zb_v"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10, help="steps in a round")
    parser.add_argument("--profile", action="store_true", help="print the functions that need most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for kind in options.schedules:
        plan = _plan(kind, options)
        kinds = [plan.graph.ops[i].kind for i in plan.graph.rank_ops(options.rank)]
        ranks = {
            "all": _rank(plan, options.rank, _Watch().enter, None),
            "progress": _rank(plan, options.rank, lambda *_: None, None),
            "log": _rank(plan, options.rank, _Watch().enter, HostClock()),
        }
        best = dict.fromkeys(ranks, float("inf"))
        for step in range(options.rounds):
            for name, rank in ranks.items():
                best[name] = min(best[name], _us_per_step(rank, step * options.steps, options.steps))
        own = {f"{name}_us": round(abs(best[name] - best["all"]) / len(kinds), 3) for name in ("progress", "log")}
        compute = sum(
            each in (OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT) for each in kinds
        )
        print(json.dumps({
            "schedule": kind, "ranks": options.ranks, "micro_batches": options.micro_batches, "operations": len(kinds),
            "computations": compute, "step_us": round(best["all"], 1),
            "operation_us": round(best["all"] / len(kinds), 2), **own,
        }), flush=True)  # fmt: skip
        if options.profile:
            _profile(ranks["all"], options.rounds * options.steps)


def _us_per_step(rank: TrainRank, first: int, num: int) -> float:
    start = time.thread_time_ns()
    for step in range(first, first + num):
        rank.run(step)
    return (time.thread_time_ns() - start) / num / 1000


def _plan(kind: str, options: argparse.Namespace) -> LoweredPlan:
    num = options.ranks * (1 if kind in ("1f1b", "gpipe", "zb_h1", "zb_h2") else 2)
    out = [{"shape": ["b", _WIDTH], "dtype": "float32", "gradient": True}]
    facts = [StageFacts.whole(n, "Stage", [], out if n < num - 1 else [], 0) for n in range(num)]
    request = Request(None, {"kind": kind}, options.micro_batches, "torch", "cpu", "float32", options.ranks, 1)
    return make_subject(plan_from_dict(complete_plan(request.skeleton(num), facts, (), _ROWS))).plan


def _rank(plan: LoweredPlan, index: int, enter: Callable[[int, int], None], clock: Any) -> TrainRank:
    framework: Any = ScriptFramework(TorchArrays(torch.device("cpu")), {n: _Stage() for n in range(len(plan.stages))})
    return TrainRank(plan, index, framework, _World(), enter, clock=clock, is_proved=True)  # type: ignore[arg-type]


def _profile(rank: TrainRank, first: int) -> None:
    profile = cProfile.Profile()
    profile.enable()
    _us_per_step(rank, first, 100)
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
