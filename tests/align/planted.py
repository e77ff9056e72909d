"""Seven faults planted into a training with experts, a module of multi-token prediction and a tied weight.

Each changes functions of the stages, or of a rank's work at the end of a step, in this process alone; the plan, its
graph and the reference are right. ``python -m tests.align.planted FILE`` runs them all under three schedules and writes
what ``align`` says.
"""

import json
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import paddle
import pytest
from paddle.autograd import PyLayer

from pipeproof.exec.rank import step_end
from pipeproof.exec.rank.step_end import StepEnd
from pipeproof.schedule.ops import Op
from pipeproof.stages.common import stage as common_stage
from pipeproof.stages.common.experts import RouterBalance
from pipeproof.stages.paddle import functional
from pipeproof.stages.paddle import stage as paddle_stage
from pipeproof.stages.paddle.experts import PaddleExperts
from pipeproof.stages.paddle.runtime import start_paddle
from pipeproof.stages.paddle.stage import PaddleStage
from tests.align.recorded_plan import ReferenceRun, record, reference_run
from tests.cli.commands import invoke
from tests.plans import subject

LAYER = "layer.2"
"""Layer of a fault in one layer: neither the first block nor the last."""
SCHEDULES = {
    "1f1b": {"kind": "1f1b"},
    "interleaved": {"kind": "interleaved", "num_chunks": 2},
    "zb_v": {"kind": "zb_v", "num_chunks": 2},
}
MODEL = {
    "tied_embedding": True,
    "moe": {
        "num_experts": 12, "top_k": 3, "ffn_size": 8, "num_shared_experts": 1, "dense_layers": 1,
        "aux_loss": 0.1, "z_loss": 0.01, "expert_bias_rate": 0.003,
    },
    "mtp": {"num_modules": 1, "loss_weight": 0.3},
}  # fmt: skip
TOPOLOGY = {"pp": 2, "tp": 2, "sequence_parallel": True, "ep": 4}


def plan_under(schedule: str, *, topology=TOPOLOGY, steps: int = 2):
    """Four blocks, two micro-batches of two rows, on all ranks of ``topology``."""
    return subject(
        model=MODEL,
        topology=topology,
        schedule={**SCHEDULES[schedule], "num_micro_batches": 2, "micro_batch_size": 2},
        run={"steps": steps, "seed": 7, "optimizer": "adamw", "learning_rate": 0.01},
    ).plan  # fmt: skip


# --- the faults ---


def wrong_loss_scale(patch: pytest.MonkeyPatch) -> None:
    """Divide the loss by the number of micro-batches once more."""
    right = paddle_stage.loss_scale
    patch.setattr(paddle_stage, "loss_scale", lambda plan, step, index: right(plan, step, index) / 2)


def missing_norm_reduction(patch: pytest.MonkeyPatch) -> None:
    """Sum no gradient over tp, though with sequence parallelism a rank's gradients of norms cover only its own
    tokens."""
    right = step_end.is_reduced
    patch.setattr(step_end, "is_reduced", lambda weight, axis: axis != "tp" and right(weight, axis))


class WrongSegment(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    """The rotary embedding, with a backward that turns on instead of back."""

    @staticmethod
    def forward(ctx, heads, cos, sin, turn: Callable[..., paddle.Tensor]):
        ctx.tables, ctx.turn = (cos, sin), turn
        return turn(heads, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        return ctx.turn(grad, *ctx.tables)


def rope_backward(patch: pytest.MonkeyPatch) -> None:
    """Let the rotary embedding of one block turn the wrong way backward."""
    turn, heads, at = functional.rotate, PaddleStage._grouped_heads, threading.local()

    def grouped_heads(stage, activation, name, split):
        at.name = name  # ranks are threads, and wait for each other inside
        return heads(stage, activation, name, split)

    def rotate(tensor, cos, sin):
        if at.name != f"{LAYER}.attn":
            return turn(tensor, cos, sin)
        return WrongSegment.apply(tensor, cos.clone(), sin.clone(), turn)

    patch.setattr(PaddleStage, "_grouped_heads", grouped_heads)
    patch.setattr(functional, "rotate", rotate)


def auxiliary_factor(patch: pytest.MonkeyPatch) -> None:
    """Let one router put in its losses twice."""
    enter = RouterBalance.enter

    def doubled(router: RouterBalance, logits: paddle.Tensor) -> paddle.Tensor:
        balance = router._balance
        weights = balance._weights
        if router._experts == f"{LAYER}.mlp":
            balance._weights = {name: 2 * weight for name, weight in weights.items()}
        try:
            return enter(router, logits)
        finally:
            balance._weights = weights

    patch.setattr(RouterBalance, "enter", doubled)


def swapped_experts(patch: pytest.MonkeyPatch) -> None:
    """Exchange the tokens of experts 0 and 3 of one block, which are on different ranks."""
    visit = PaddleExperts._visit

    def elsewhere(experts: PaddleExperts, tokens, chosen, counts):
        if experts._name == f"{LAYER}.mlp":
            chosen, counts = chosen.copy(), counts.copy()
            first, other = chosen == 0, chosen == 3
            chosen[first], chosen[other] = 3, 0
            counts[[0, 3]] = counts[[3, 0]]
        return visit(experts, tokens, chosen, counts)

    patch.setattr(PaddleExperts, "_visit", elsewhere)


def double_tied_reduction(patch: pytest.MonkeyPatch) -> None:
    """Sum the tied weight's gradient once more over the ranks that hold it.

    In a V that is one rank, which has the stages of embedding and head: it
    sums over ep for both of them.
    """
    reduce = StepEnd.reduce

    def twice(end: StepEnd, op: Op) -> None:
        reduce(end, op)
        plan, axis = end._plan, str(op.axis)
        holds = any(weight.name == "embed.weight" for weight in plan.weights_of(op.stage, end._coords["pp"]))
        num_holders = len(plan.shared_weights.places(op.stage, "embed.weight")) if holds else 0
        if num_holders and axis == ("pp" if num_holders > 1 else "ep"):
            gradient = end._stages[op.stage].parameters["embed.weight"].grad
            gradient.set_value(end._children.reduce_over(axis, gradient, "sum", "embed.weight"))

    patch.setattr(StepEnd, "reduce", twice)


def twice_the_weight_of_modules(patch: pytest.MonkeyPatch) -> None:
    """Train on twice the losses of modules of multi-token prediction."""
    right = common_stage.training_loss
    patch.setattr(common_stage, "training_loss", lambda plan, losses: 2 * right(plan, losses) - losses[0])


@dataclass(frozen=True)
class Planted:
    """A fault, and the expected report: the first tensor that differs, and the family of the cause."""

    words: str
    plant: Callable[[pytest.MonkeyPatch], None]
    tensor: dict[str, str]
    family: str


FAULTS = {
    "scale": Planted(
        "the losses divided by the number of micro-batches once too often", wrong_loss_scale,
        {"layer": "head", "direction": "forward", "side": "output"}, "scale",
    ),
    "norms": Planted(
        "no sum of norm gradients over `tp`, under sequence parallelism", missing_norm_reduction,
        {"layer": "norm", "parameter": "norm.weight"}, "missing reduction",
    ),
    "rope": Planted(
        f"a rotary embedding in `{LAYER}` whose backward turns the wrong way", rope_backward,
        {"layer": LAYER, "direction": "backward", "side": "output"}, "computation",
    ),
    "auxiliary": Planted(
        f"twice the factor of the losses of the router in `{LAYER}`", auxiliary_factor,
        {"layer": LAYER, "direction": "backward", "side": "output"}, "computation",
    ),
    "modules": Planted(
        "twice the weight of the module's loss", twice_the_weight_of_modules,
        {"layer": "mtp.0", "direction": "backward", "side": "input"}, "scale",
    ),
    "experts": Planted(
        f"ids of experts 0 and 3, of two ranks, swapped in `{LAYER}`", swapped_experts,
        {"layer": LAYER, "direction": "forward", "side": "output"}, "computation",
    ),
    "tied": Planted(
        "the tied weight's gradient summed once more", double_tied_reduction,
        {"layer": "embed", "parameter": "embed.weight"}, "scale",
    ),
}  # fmt: skip


# --- running them ---


def located(plan, reference: ReferenceRun, directory: Path, fault: Planted | None) -> tuple[int, str, dict]:
    """Train with the fault, align the run with its reference: exit status, printed output, and the same as JSON."""
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault.plant(patch)
        record(plan, reference, directory)
    sides = directory / "run", directory / "reference"
    printed = invoke("state", "align", *sides)
    return printed.exit_code, printed.stdout, json.loads(invoke("state", "align", *sides, "--format", "json").stdout)


def main(file: Path) -> None:
    """Write the output of ``align`` for each fault under each schedule."""
    start_paddle()
    found = {}
    for schedule in SCHEDULES:
        plan = plan_under(schedule)
        reference = reference_run(plan)
        for name, fault in FAULTS.items():
            with tempfile.TemporaryDirectory() as directory:
                status, printed, _ = located(plan, reference, Path(directory), fault)
            found[f"{schedule}/{name}"] = {"planted": fault.words, "status": status, "printed": printed}
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
