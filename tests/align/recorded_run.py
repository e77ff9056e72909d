"""Records of a tensor-parallel run with sequence parallelism in this process, with a fault planted where asked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import paddle
from paddle.autograd import PyLayer

from pipeproof.comm.accumulation_order import sum_orders
from pipeproof.exec.compare.compare_gradients import compare_routers
from pipeproof.exec.compare.run_record import RankStep, Recorder, ReferenceStep
from pipeproof.exec.rank.job_files import RecordOptions
from pipeproof.stages.common import experts as routers
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.describe.model_family import describe_boundary
from pipeproof.stages.paddle import functional
from pipeproof.stages.paddle import stage as paddle_stage
from pipeproof.stages.reference.ordered import Orders, run_ordered
from tests.plans import subject
from tests.stages.staged_run import StagedRun

MODEL = {"num_layers": 2, "num_heads": 4, "vocab_size": 16}
STEPS = 2


class RecordedRun:
    """The stage on two ranks; ``reduce`` says whether gradients of norms are reduced over them.

    ``model`` has further keys of the model.
    """

    def __init__(self, *, reduce: bool = True, **model: object) -> None:
        self.plan = subject(
            topology={"pp": 1, "tp": 2, "sequence_parallel": True},
            model={**MODEL, **model},
            schedule={"num_micro_batches": 2},
            run={"steps": STEPS},
        ).plan
        self.run = StagedRun(self.plan.spec)
        self.watches = [LayerWatch() for _ in self.run.stages]
        for (stage,), watch in zip(self.run.stages, self.watches, strict=True):
            stage.forward = partial(stage.forward, watch=watch)
        self._reduce = reduce

    def swap_heads(self, layer: str) -> None:
        """Give each rank the other's heads of one layer, their rows of the output product included."""
        for name in (f"{layer}.attn.qkv.weight", f"{layer}.attn.out.weight"):
            first, second = (stage.parameters[name] for (stage,) in self.run.stages)
            values = first.clone(), second.clone()
            first.set_value(values[1])
            second.set_value(values[0])

    def swap_experts(self, layer: str) -> None:
        """Let the router's choice of a layer's expert 0 lead to expert 1, and the other way round."""
        for (stage,) in self.run.stages:
            for name, weight in stage.parameters.items():
                if name.startswith(f"{layer}.mlp.experts."):
                    weight.set_value(weight[[1, 0, *range(2, weight.shape[0])]])

    def record(self, directory, *, layers: bool = True, values: bool = True) -> None:
        """Train, and write both records."""
        recorder = Recorder(RecordOptions(directory, layers, values), self.plan, "d" * 64)
        spec, orders = self.plan.spec, sum_orders(self.plan)
        watch = LayerWatch(join_dim=describe_boundary(spec).tp.dim)
        references = run_ordered(spec, Orders(orders.loss, orders.by_parameter(self.plan)), watch)
        for step, reference in zip(range(spec.run.steps), references, strict=True):
            loss = self._train(step)
            ranks = [
                RankStep(
                    {name: weight.grad.numpy().copy() for name, weight in stage.parameters.items()},
                    seen.take() if layers else {},
                )
                for (stage,), seen in zip(self.run.stages, self.watches, strict=True)
            ]
            of_reference = watch.take() if layers else {}
            of_ranks = [stage.balance.values() for (stage,) in self.run.stages]
            routers = compare_routers(self.plan, of_ranks, reference.routers, reference.routers)
            recorder.put(step, loss, ranks, ReferenceStep(reference.loss, reference.gradients, of_reference), routers)
            for optimizer in self.run.optimizers:
                optimizer.step()

    def _train(self, step: int):
        for optimizer in self.run.optimizers:
            optimizer.zero_grad()
        total = None
        for index in range(self.plan.spec.schedule.num_micro_batches):
            loss, _ = self.run.world.run(partial(self._micro_batch, step, index))
            total = loss if total is None else total + loss
        for parameter in self.run.parameters:
            if parameter.partial_over and self._reduce:
                grads = [stage.parameters[parameter.name].grad for (stage,) in self.run.stages]
                whole = grads[0] + grads[1]
                for grad in grads:
                    grad.set_value(whole)
        return total

    def _micro_batch(self, step: int, index: int, rank: int):
        return self.run._micro_batch(rank, step, index)


class WrongSegment(PyLayer):  # type: ignore[misc]  # Paddle ships no types
    """The rotary embedding, with a backward that turns on instead of back."""

    @staticmethod
    def forward(ctx, heads, cos, sin, turn: Callable[..., paddle.Tensor]):
        ctx.tables, ctx.turn = (cos, sin), turn
        return turn(heads, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        return ctx.turn(grad, *ctx.tables)


def plant_wrong_rope_backward(monkeypatch) -> None:
    """Let the stage's rotary embedding have a wrong gradient; its forward stays right."""
    right = functional.rotate
    monkeypatch.setattr(
        functional, "rotate", lambda heads, cos, sin: WrongSegment.apply(heads, cos.clone(), sin.clone(), right)
    )


def plant_wrong_auxiliary_factor(monkeypatch) -> None:
    """Let the routers of the stage put in each of their losses twice."""
    right = routers.loss_weights
    monkeypatch.setattr(routers, "loss_weights", lambda plan: {name: 2 * w for name, w in right(plan).items()})


def plant_double_auxiliary(monkeypatch) -> None:
    """Let every rank put the losses of routers in, though all of them route the same tokens."""
    right = paddle_stage.PaddleBalance
    monkeypatch.setattr(
        paddle_stage, "PaddleBalance", lambda plan, layers, *, adds_losses: right(plan, layers, adds_losses=True)
    )


def plant_wrong_loss_scale(monkeypatch) -> None:
    """Divide the loss by the number of micro-batches once more."""
    right = paddle_stage.loss_scale
    monkeypatch.setattr(paddle_stage, "loss_scale", lambda plan, step, index: right(plan, step, index) / 2)
