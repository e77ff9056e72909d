"""The single-process reference: one uncut model, plain autograd, micro-batch by micro-batch.

It knows nothing of stages, ranks or communication and shares no code with what
it judges; from the description it takes the parameters' names and shapes.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values, G query heads of each, D head size,
V vocabulary.
Activations are [S, B, H] or [B, S, H], as the plan says; S and B decide in
which order sums run, so the reference follows the plan there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.synthetic import Batch, initial_weight, loss_scale, micro_batch
from pipeproof.stages.describe.watch import LayerWatch, Side
from pipeproof.stages.reference.clip import clip_factor
from pipeproof.stages.reference.mixture import mixture, route
from pipeproof.stages.reference.pieces import Copies
from pipeproof.stages.reference.result import StepResult

Tensor: TypeAlias = paddle.Tensor
Look: TypeAlias = Callable[[str, Side, Tensor], None]
"""Is told what a layer takes or gives."""


def run_uncut(plan: PlanSpec, watch: LayerWatch | None = None) -> Iterator[StepResult]:
    """Train the whole model for the plan's steps, yielding after each; lazy.

    All micro-batches of all data-parallel ranks run one after another in their
    order. Gradient buffers begin as +0.0; the loss adds up in the run's dtype.
    ``watch`` is shown what crosses the borders between layers.
    """
    model = UncutModel(plan, _initial_weights(plan))
    optimizer = _optimizer(plan, list(model.weights.values()))
    for step in range(plan.run.steps):
        result = _gradients(model, step, watch)
        optimizer.step()
        yield result


def uncut_step(plan: PlanSpec, weights: Mapping[str, npt.NDArray[Any]], step: int) -> StepResult:
    """One step's loss and gradients from given whole weights, without an update.

    From the weights that another order of sums has led to, this shows what the
    order does to one step: what it does to many is up to the optimizer.
    """
    return _gradients(UncutModel(plan, weights), step, None)


def _gradients(model: UncutModel, step: int, watch: LayerWatch | None) -> StepResult:
    for weight in model.weights.values():
        weight.grad = paddle.zeros_like(weight)
    losses = []
    topology = model.plan.topology
    for index in range(topology.dp * topology.ep * model.plan.schedule.num_micro_batches):
        batch = micro_batch(model.plan, step, index)
        look = _look_away if watch is None else partial(_show, watch, index)
        loss = model.loss(batch, look) * loss_scale(model.plan, step, index)
        if watch is not None:
            watch.see_loss("head", index, 0, loss)
        loss.backward()
        losses.append(loss.numpy()[()])
    total = losses[0]
    for later in losses[1:]:
        total = total + later
    run = model.plan.run
    if run.clip_norm is not None:
        parts = {name: [[weight.grad]] for name, weight in model.weights.items()}
        factor = paddle.to_tensor(clip_factor(run.clip_norm, run.dtype, parts))
        for weight in model.weights.values():
            weight.grad = weight.grad * factor
    gradients = {name: weight.grad.numpy().copy() for name, weight in model.weights.items()}
    weights = {name: weight.numpy().copy() for name, weight in model.weights.items()}
    return StepResult(step, total, gradients, weights)


def _look_away(layer: str, side: Side, tensor: Tensor) -> None:
    pass


def _show(watch: LayerWatch, index: int, layer: str, side: Side, tensor: Tensor) -> None:
    watch.see(layer, side, index, 0, [tensor])


def _initial_weights(plan: PlanSpec) -> dict[str, npt.NDArray[Any]]:
    parameters = [p for layer in describe_gpt(plan) for p in layer.parameters]
    return {p.name: initial_weight(p, plan.run.seed, plan.run.dtype) for p in parameters}


class UncutModel:
    """The GPT of the plan with whole weights."""

    def __init__(self, plan: PlanSpec, weights: Mapping[str, npt.NDArray[Any]]) -> None:
        self.plan = plan
        self.weights: dict[str, Tensor] = {
            name: paddle.to_tensor(weight, stop_gradient=False) for name, weight in weights.items()
        }
        self.sequence_first = plan.model.activation_order == "sbh"
        self.head_size = plan.model.rotary_size
        positions = np.arange(plan.model.seq_length, dtype=np.float64)
        exponents = np.arange(self.head_size // 2, dtype=np.float64) * 2 / self.head_size
        angles = positions[:, None] * 10000.0 ** -exponents[None, :]  # [S, D / 2]
        self.cos = paddle.to_tensor(np.cos(angles), dtype=plan.run.dtype)
        self.sin = paddle.to_tensor(np.sin(angles), dtype=plan.run.dtype)

    def loss(self, batch: Batch, look: Look = _look_away) -> Tensor:
        """The cross-entropy summed over the micro-batch's counted tokens, a scalar."""
        tokens, labels = batch.tokens, batch.labels
        if self.sequence_first:
            tokens, labels = tokens.T, labels.T
        x = F.embedding(paddle.to_tensor(np.ascontiguousarray(tokens)), self.weights["embed.weight"])
        look("embed", "output", x)
        for i in range(self.plan.model.num_layers):
            look(f"layer.{i}", "input", x)
            attention = self.attention if self.plan.model.mla is None else self.latent_attention
            x = x + attention(self.norm(x, f"layer.{i}.attn_norm.weight"), f"layer.{i}.attn")
            mlp = self.experts if self.plan.model.has_experts(i) else self.mlp
            x = x + mlp(self.norm(x, f"layer.{i}.mlp_norm.weight"), f"layer.{i}.mlp")
            look(f"layer.{i}", "output", x)
        look("norm", "input", x)
        x = self.norm(x, "norm.weight")
        look("norm", "output", x)
        look("head", "input", x)
        if self.plan.model.tied_embedding:
            logits = paddle.matmul(x, self.weights["embed.weight"], transpose_y=True)
        else:
            logits = paddle.matmul(x, self.weights["head.weight"])
        losses = F.cross_entropy(
            logits.reshape([-1, self.plan.model.vocab_size]),
            paddle.to_tensor(np.ascontiguousarray(labels)).reshape([-1]),
            ignore_index=-100,
            reduction="none",
        )
        return losses.sum()

    def norm(self, x: Tensor, weight: str) -> Tensor:
        """RMSNorm over the last dim."""
        # A copy, so that x feeds two operations and not three: the gradient of
        # three would depend on the order in which autograd happens to add them.
        x = paddle.assign(x)
        return x * paddle.rsqrt(paddle.square(x).mean(axis=-1, keepdim=True) + 1e-6) * self.weights[weight]

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
        weights = F.softmax(scores, axis=-1).reshape([rows, num_kv_heads, -1, length])
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
        mixed = paddle.matmul(F.softmax(scores + paddle.to_tensor(mask, dtype=scores.dtype), axis=-1), v)
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
        routing = route(paddle.matmul(for_router, self.weights[f"{name}.router.weight"]), moe)
        weights = [self.weights[f"{name}.experts.{part}.weight"] for part in ("gate", "up", "down")]
        y = mixture([for_experts], [routing], weights)[0]
        return y + self.mlp(for_shared[0], f"{name}.shared") if for_shared else y

    def mlp(self, x: Tensor, name: str) -> Tensor:
        """SwiGLU."""
        gate = paddle.matmul(x, self.weights[f"{name}.gate.weight"])
        up = paddle.matmul(x, self.weights[f"{name}.up.weight"])
        return paddle.matmul(F.silu(gate) * up, self.weights[f"{name}.down.weight"])


def _optimizer(plan: PlanSpec, weights: list[Tensor]) -> paddle.optimizer.Optimizer:
    """Paddle's SGD, or its AdamW with betas 0.9 and 0.999, epsilon 1e-8 and decay 0.01 of every weight."""
    if plan.run.optimizer == "sgd":
        return paddle.optimizer.SGD(plan.run.learning_rate, parameters=weights)
    return paddle.optimizer.AdamW(
        plan.run.learning_rate, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01, parameters=weights
    )
