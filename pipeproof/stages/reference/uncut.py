"""The single-process reference: one uncut model, plain autograd, micro-batch by micro-batch.

It knows nothing of stages, ranks or communication and shares no code with what
it judges; from the description it takes the parameters' names and shapes.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values, G query heads of each, D head size,
V vocabulary.
Activations are [S, B, H] or [B, S, H], as the plan says; S and B decide in
which order sums run, so the reference follows the plan there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.ahead import ahead
from pipeproof.stages.describe.lanes import num_modules
from pipeproof.stages.describe.order import layer_order
from pipeproof.stages.describe.synthetic import Batch, loss_scale, micro_batch
from pipeproof.stages.describe.watch import LayerWatch, Side
from pipeproof.stages.reference import streams
from pipeproof.stages.reference.balance import Routers, without_biases
from pipeproof.stages.reference.chance import Chance
from pipeproof.stages.reference.clip import clip_factor
from pipeproof.stages.reference.gated import gated
from pipeproof.stages.reference.lanes import for_lanes, together, trained_on
from pipeproof.stages.reference.mixture import mixture
from pipeproof.stages.reference.optimizer import go_on, optimizer_of
from pipeproof.stages.reference.own_uncut import own_uncut_step, run_own_uncut
from pipeproof.stages.reference.pieces import Copies
from pipeproof.stages.reference.result import StepResult
from pipeproof.stages.reference.rounded import rounded
from pipeproof.stages.reference.start import Start, beginning

Tensor: TypeAlias = paddle.Tensor
Look: TypeAlias = Callable[[str, Side, Tensor], None]
"""Is told what a layer takes or gives."""


def run_uncut(plan: PlanSpec, watch: LayerWatch | None = None, start: Start | None = None) -> Iterator[StepResult]:
    """Train the whole model for the plan's steps, from ``start`` on where it is given, yielding after each; lazy.

    All micro-batches of all data-parallel ranks run one after another in their
    order. Gradient buffers begin as +0.0; the loss adds up in the run's dtype.
    ``watch`` is shown what crosses the borders between layers.
    """
    if plan.own_layers is not None:
        yield from run_own_uncut(plan, watch, start)
        return
    start = start or beginning(plan)
    model = UncutModel(plan, start.weights)
    optimizer = optimizer_of(plan.run, list(model.main.values()))
    go_on(
        optimizer,
        {name: [weight] for name, weight in model.main.items()},
        {key: [array] for key, array in start.kept.items()},
    )
    for step in range(start.step, plan.run.steps):
        result = _gradients(model, step, watch)
        optimizer.step()
        yield result


def uncut_step(plan: PlanSpec, weights: Mapping[str, npt.NDArray[Any]], step: int) -> StepResult:
    """One step's loss and gradients from given whole weights, without an update.

    From the weights that another order of sums has led to, this shows what the
    order does to one step: what it does to many is up to the optimizer.
    """
    if plan.own_layers is not None:
        return own_uncut_step(plan, weights, step)
    return _gradients(UncutModel(plan, weights), step, None)


def _gradients(model: UncutModel, step: int, watch: LayerWatch | None) -> StepResult:
    for weight in model.main.values():
        weight.grad = paddle.zeros_like(weight)
    losses, biases = [], model.routers.begin_step()
    topology = model.plan.topology
    for index in range(topology.dp * topology.ep * model.plan.schedule.num_micro_batches):
        batch = micro_batch(model.plan, step, index)
        model.chance.turn_to(step, index)
        model.routers.turn_to(index)
        look = _look_away if watch is None else partial(_show, watch, index)
        loss = together(model.losses(batch, look)) * loss_scale(model.plan, step, index)
        if watch is not None:
            watch.see_loss("head", index, 0, loss)
        paddle.autograd.backward([trained_on(model.plan, loss), *model.routers.take_roots()])
        losses.append(loss.numpy()[()])
    total = losses[0]
    for later in losses[1:]:
        total = total + later
    run = model.plan.run
    if run.clip_norm is not None:
        parts = {name: [[weight.grad]] for name, weight in model.main.items()}
        factor = paddle.to_tensor(clip_factor(run.clip_norm, run.weight_dtype, parts))
        for weight in model.main.values():
            weight.grad = weight.grad * factor
    gradients = {name: weight.grad.numpy().copy() for name, weight in model.main.items()}
    weights = {name: weight.numpy().copy() for name, weight in model.main.items()}
    return StepResult(step, total, gradients, weights | biases, model.routers.end_step())


def _look_away(layer: str, side: Side, tensor: Tensor) -> None:
    pass


def _show(watch: LayerWatch, index: int, layer: str, side: Side, tensor: Tensor) -> None:
    watch.see(layer, side, index, 0, [tensor])


class UncutModel:
    """The GPT of the plan with whole weights.

    ``main`` has those that the optimizer updates, ``weights`` those that the last loss was computed with.
    """

    def __init__(self, plan: PlanSpec, weights: Mapping[str, npt.NDArray[Any]]) -> None:
        self.plan = plan
        self.main: dict[str, Tensor] = {
            name: paddle.to_tensor(weight, stop_gradient=False) for name, weight in without_biases(weights).items()
        }
        self.weights = rounded(self.main, plan.run)
        self.chance = Chance(plan)
        self.routers = Routers(plan, weights)
        self.sequence_first = plan.model.activation_order == "sbh"
        self.head_size = plan.model.rotary_size
        positions = np.arange(plan.model.seq_length, dtype=np.float64)
        exponents = np.arange(self.head_size // 2, dtype=np.float64) * 2 / self.head_size
        angles = positions[:, None] * 10000.0 ** -exponents[None, :]  # [S, D / 2]
        self.cos = paddle.to_tensor(np.cos(angles), dtype=plan.run.dtype)
        self.sin = paddle.to_tensor(np.sin(angles), dtype=plan.run.dtype)

    def losses(self, batch: Batch, look: Look = _look_away) -> list[Tensor]:
        """The cross-entropy summed over the micro-batch's counted tokens, a scalar: the main one, and those of modules.

        Module j reads the token j + 1 positions ahead of each, and predicts the one after that.
        """
        self.weights = rounded(self.main, self.plan.run)
        lanes = [ahead(batch, distance) for distance in range(1 + num_modules(self.plan.model))]
        tables = for_lanes(self.weights["embed.weight"], len(lanes))
        embedded = [F.embedding(self.ordered(lane.tokens), own) for lane, own in zip(lanes, tables, strict=True)]
        x, *others = embedded
        x = self.chance.tokens(x, "embedding", "embed")
        look("embed", "output", x)
        names = layer_order(self.plan.model)
        num_head, num_tail = self.plan.model.num_empty
        (x,) = self.ends(names[1 : 1 + num_head], [x], look)
        for i in range(self.plan.model.num_layers):
            look(f"layer.{i}", "input", x)
            x = self.block(x, f"layer.{i}", i)
            look(f"layer.{i}", "output", x)
        xs = [x]
        for number, embedding in enumerate(others):
            taken, xs[-1] = xs[-1].clone(), xs[-1].clone()  # two readers: a look sees what each gives back
            look(f"mtp.{number}", "input", taken)
            xs.append(self.module(taken, embedding, f"mtp.{number}"))
            look(f"mtp.{number}", "output", xs[-1])
        xs = self.ends(names[-2 - num_tail : -1], xs, look)
        look("head", "input", xs[0])
        tied = self.plan.model.tied_embedding
        heads = for_lanes(self.weights["embed.weight" if tied else "head.weight"], len(xs))
        return [
            self.cross_entropy(paddle.matmul(x, own, transpose_y=tied), lane.labels)
            for x, own, lane in zip(xs, heads, lanes, strict=True)
        ]

    def cross_entropy(self, logits: Tensor, labels: npt.NDArray[np.int64]) -> Tensor:
        """Summed over the counted tokens."""
        losses = F.cross_entropy(
            logits.reshape([-1, self.plan.model.vocab_size]),
            self.ordered(labels).reshape([-1]),
            ignore_index=-100,
            reduction="none",
        )
        return losses.sum()

    def ordered(self, words: npt.NDArray[np.int64]) -> Tensor:
        """Tokens or labels [B, S] in the order of the activations."""
        return paddle.to_tensor(np.ascontiguousarray(words.T if self.sequence_first else words))

    def ends(self, names: Sequence[str], xs: list[Tensor], look: Look) -> list[Tensor]:
        """What stands around the blocks: the last norm, and layers that do nothing."""
        for name in names:
            look(name, "input", xs[0])
            if name == "norm":
                weights = for_lanes(self.weights["norm.weight"], len(xs))
                xs = [self.normed(x, own) for x, own in zip(xs, weights, strict=True)]
            look(name, "output", xs[0])
        return xs

    def module(self, hidden: Tensor, embedding: Tensor, name: str) -> Tensor:
        """Multi-token prediction: both normed, joined, and a block as the last one is."""
        embedding = self.chance.tokens(embedding, "embedding", f"{name}.embed")
        both = self.norm(hidden, f"{name}.hidden_norm.weight"), self.norm(embedding, f"{name}.embed_norm.weight")
        x = paddle.matmul(paddle.concat(both, axis=-1), self.weights[f"{name}.proj.weight"])
        return self.block(x, name, self.plan.model.num_layers - 1)

    def block(self, x: Tensor, name: str, number: int) -> Tensor:
        """Attention and MLP, or experts as block ``number`` has, each with its norm before and its residual around."""
        spec = self.plan.model.hyper_connections
        attention = self.attention if self.plan.model.mla is None else self.latent_attention
        mlp = self.experts if self.plan.model.has_experts(number) else self.mlp
        if spec is not None and number == 0:
            x = streams.widened(x, spec)
        for at, compute in ((f"{name}.attn", attention), (f"{name}.mlp", mlp)):
            taken, behind = self.residual(x, at)
            y = compute(self.norm(taken, f"{at}_norm.weight"), at)
            x = behind(self.chance.tokens(y, "hidden", at))
        return streams.summed(x, spec) if spec is not None and number == self.plan.model.num_layers - 1 else x

    def residual(self, x: Tensor, at: str) -> tuple[Tensor, streams.Behind]:
        """What a sub-layer takes, and what stands behind it: the sum, or all streams."""
        spec = self.plan.model.hyper_connections
        if spec is None:
            return x, lambda y: x + y
        return streams.read(x, [self.weights[f"{at}_streams.{end}"] for end in streams.WEIGHTS], spec)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last dim, with the weight of that name."""
        return self.normed(x, self.weights[name])

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm over the last dim."""
        # A copy, so that x feeds two operations and not three: the gradient of
        # three would depend on the order in which autograd happens to add them.
        x = paddle.assign(x)
        return x * paddle.rsqrt(paddle.square(x).mean(axis=-1, keepdim=True) + 1e-6) * weight

    def attention(self, x: Tensor, name: str) -> Tensor:
        """Causal rotary attention over all heads; the queries of a group see one head of keys and values."""
        num_kv_heads, size = self.plan.model.kv_heads, self.plan.model.size_of_head
        width = self.plan.model.num_heads // num_kv_heads * size  # of a group's queries
        qkv = paddle.matmul(x, self.weights[f"{name}.qkv.weight"])
        qkv = qkv.reshape([*x.shape[:2], num_kv_heads, width + 2 * size])
        to_heads = [1, 2, 0, 3] if self.sequence_first else [0, 2, 1, 3]
        q, k, v = qkv.transpose(to_heads).split([width, size, size], axis=-1)  # k, v [B, K, S, D], q [B, K, S, G * D]
        rows, _, length, _ = k.shape
        groups = q.reshape([rows, num_kv_heads, length, -1, size]).transpose([0, 1, 3, 2, 4])  # [B, K, G, S, D]
        q = self.rotary(groups).reshape([rows, num_kv_heads, -1, size])  # one product for all queries of a head of keys
        scores = paddle.matmul(q, self.rotary(k), transpose_y=True) * size**-0.5
        mask = np.where(np.tri(length, dtype=bool), 0.0, -np.inf)
        scores = scores.reshape([rows, num_kv_heads, -1, length, length]) + paddle.to_tensor(mask, dtype=scores.dtype)
        weights = self.chance.probabilities(F.softmax(scores, axis=-1), name).reshape([rows, num_kv_heads, -1, length])
        mixed = paddle.matmul(weights, v).reshape(groups.shape)
        mixed = mixed.transpose([3, 0, 1, 2, 4] if self.sequence_first else [0, 3, 1, 2, 4])
        return paddle.matmul(mixed.reshape([*x.shape[:2], -1]), self.weights[f"{name}.out.weight"])

    def latent_attention(self, x: Tensor, name: str) -> Tensor:
        """Causal attention whose queries, keys and values come from compressed vectors."""
        mla = self.plan.model.mla
        assert mla is not None
        nope, rope, value_size = mla.nope_head_size, mla.rope_head_size, mla.value_head_size
        to_heads = [1, 2, 0, 3] if self.sequence_first else [0, 2, 1, 3]
        if mla.q_rank is None:
            q = paddle.matmul(x, self.weights[f"{name}.q.weight"])
        else:
            q = self.norm(paddle.matmul(x, self.weights[f"{name}.q_down.weight"]), f"{name}.q_norm.weight")
            q = paddle.matmul(q, self.weights[f"{name}.q_up.weight"])
        latent, shared = paddle.matmul(x, self.weights[f"{name}.kv_down.weight"]).split([mla.kv_rank, rope], axis=-1)
        kv = paddle.matmul(self.norm(latent, f"{name}.kv_norm.weight"), self.weights[f"{name}.kv_up.weight"])
        q_nope, q_rope = q.reshape([*q.shape[:2], -1, nope + rope]).transpose(to_heads).split([nope, rope], axis=-1)
        k_nope, v = kv.reshape([*kv.shape[:2], -1, nope + value_size]).transpose(to_heads).split([nope, value_size], -1)
        shared = self.rotary(shared.transpose([1, 0, 2]) if self.sequence_first else shared)  # [B, S, R]
        q = paddle.concat([q_nope, self.rotary(q_rope)], axis=-1)
        k = paddle.concat([k_nope, paddle.stack(list(Copies.apply(shared, q.shape[1])), axis=1)], axis=-1)
        scores = paddle.matmul(q, k, transpose_y=True) * (nope + rope) ** -0.5
        mask = np.where(np.tri(q.shape[2], dtype=bool), 0.0, -np.inf)
        weights = F.softmax(scores + paddle.to_tensor(mask, dtype=scores.dtype), axis=-1)
        mixed = paddle.matmul(self.chance.probabilities(weights, name), v)
        mixed = mixed.transpose([2, 0, 1, 3] if self.sequence_first else [0, 2, 1, 3])
        return paddle.matmul(mixed.reshape([*x.shape[:2], -1]), self.weights[f"{name}.out.weight"])

    def rotary(self, heads: Tensor) -> Tensor:
        """Turn each pair (i, i + D/2) of a head by its position's angle."""
        a, b = heads.split(2, axis=-1)
        cos, sin = self.cos[: heads.shape[-2]], self.sin[: heads.shape[-2]]
        return paddle.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def experts(self, x: Tensor, name: str) -> Tensor:
        """Routed experts, and shared ones where there are."""
        moe = self.plan.model.moe
        assert moe is not None
        for_router, for_experts, *for_shared = Copies.apply(x, 3 if moe.num_shared_experts else 2)
        logits = paddle.matmul(for_router, self.weights[f"{name}.router.weight"])
        routing = self.routers.route(logits, name, sequence_dim=0 if self.sequence_first else 1)
        weights = [self.weights[f"{name}.experts.{part}.weight"] for part in ("gate", "up", "down")]
        y = mixture([for_experts], [routing], weights, self.plan.model.swiglu_limit)[0]
        return y + self.mlp(for_shared[0], f"{name}.shared") if for_shared else y

    def mlp(self, x: Tensor, name: str) -> Tensor:
        """SwiGLU."""
        gate = paddle.matmul(x, self.weights[f"{name}.gate.weight"])
        up = paddle.matmul(x, self.weights[f"{name}.up.weight"])
        return paddle.matmul(gated(gate, up, self.plan.model.swiglu_limit), self.weights[f"{name}.down.weight"])
