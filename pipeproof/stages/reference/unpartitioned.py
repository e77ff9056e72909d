"""The single-process reference: one unpartitioned model, plain autograd, micro-batch by micro-batch.

It has no stages, ranks or communication and shares no code with the stages that it checks. It takes the names and
shapes of parameters from the description.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values, G query heads of each, D head size, V
vocabulary. Activations are [S, B, H] or [B, S, H], as in the plan: the order of S and B changes the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import paddle
import paddle.nn.functional as F

from pipeproof.specs.compressed_attention import AttentionType
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.layer import layer_order
from pipeproof.stages.describe.layer_records import LayerWatch, Side
from pipeproof.stages.describe.mtp_streams import num_modules, shifted_batch
from pipeproof.stages.describe.synthetic import Batch, loss_scale, micro_batch
from pipeproof.stages.reference import streams
from pipeproof.stages.reference.compressed_attention import CompressedMath
from pipeproof.stages.reference.experts import Routers, in_router_type, mixture, without_biases
from pipeproof.stages.reference.layer_math import DropoutRng, LayerMath, linear
from pipeproof.stages.reference.optimizer import clip_factor, optimizer_of, restore_optimizer
from pipeproof.stages.reference.reference_state import InitialState, StepResult, initial_state
from pipeproof.stages.reference.sharded_tensors import Copies, rounded
from pipeproof.stages.reference.streams import copies_for_mtp_streams, stacked_losses, training_loss

Tensor: TypeAlias = paddle.Tensor
LayerHook: TypeAlias = Callable[[str, Side, Tensor], None]
"""Called with the input and the output of each layer."""


def run_unpartitioned(
    plan: PlanSpec, watch: LayerWatch | None = None, start: InitialState | None = None
) -> Iterator[StepResult]:
    """Train the whole model for the plan's steps, from ``start`` if given, and yield the result of each step.

    All micro-batches of all data-parallel ranks run one after another in their order. Gradient buffers begin as +0.0.
    The loss is added in the run's dtype. ``watch`` records the tensors between layers.
    """
    start = start or initial_state(plan)
    model = UnpartitionedModel(plan, start.weights)
    optimizer = optimizer_of(plan.run, list(model.main.values()))
    restore_optimizer(
        optimizer,
        {name: [weight] for name, weight in model.main.items()},
        {key: [array] for key, array in start.optimizer_state.items()},
    )
    for step in range(start.step, plan.run.steps):
        result = _gradients(model, step, watch)
        optimizer.step()
        yield result


def unpartitioned_step(plan: PlanSpec, weights: Mapping[str, npt.NDArray[Any]], step: int) -> StepResult:
    """Loss and gradients of one step from given whole weights, without an update.

    With the weights of a run with another order of sums, this shows the effect of the order on one step. The effect on
    several steps also depends on the optimizer.
    """
    return _gradients(UnpartitionedModel(plan, weights), step, None)


def _gradients(model: UnpartitionedModel, step: int, watch: LayerWatch | None) -> StepResult:
    for weight in model.main.values():
        weight.grad = paddle.zeros_like(weight)
    losses, biases = [], model.routers.begin_step()
    topology = model.plan.topology
    for index in range(topology.dp * topology.ep * model.plan.schedule.num_micro_batches):
        batch = micro_batch(model.plan, step, index)
        model.dropout_rng.select(step, index)
        model.routers.select(index)
        hook = _ignore if watch is None else partial(_show, watch, index)
        loss = stacked_losses(model.losses(batch, hook)) * loss_scale(model.plan, step, index)
        if watch is not None:
            watch.see_loss("head", index, 0, loss)
        paddle.autograd.backward([training_loss(model.plan, loss), *model.routers.take_roots()])
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


def _ignore(layer: str, side: Side, tensor: Tensor) -> None:
    pass


def _show(watch: LayerWatch, index: int, layer: str, side: Side, tensor: Tensor) -> None:
    watch.see(layer, side, index, 0, [tensor])


class UnpartitionedModel:
    """The GPT of the plan with whole weights.

    The optimizer updates ``main``. ``weights`` are the weights of the latest loss.
    """

    def __init__(self, plan: PlanSpec, weights: Mapping[str, npt.NDArray[Any]]) -> None:
        self.plan = plan
        self.main: dict[str, Tensor] = {
            name: paddle.to_tensor(weight, stop_gradient=False) for name, weight in without_biases(weights).items()
        }
        self.weights = rounded(self.main, plan.run)
        self.dropout_rng = DropoutRng(plan)
        self.routers = Routers(plan, weights)
        self.sequence_first = plan.gpt.activation_order == "sbh"
        self.math = LayerMath(plan)
        self.token_ids = np.empty(0, dtype=np.int64)

    def losses(self, batch: Batch, hook: LayerHook = _ignore) -> list[Tensor]:
        """The cross-entropy summed over the counted tokens, a scalar: the main loss, and those of MTP modules.

        At each position module j reads the token j + 1 positions ahead and predicts the next one.
        """
        self.weights = rounded(self.main, self.plan.run)
        batches = [shifted_batch(batch, distance) for distance in range(1 + num_modules(self.plan.gpt))]
        self.token_ids = batch.tokens.T if self.sequence_first else batch.tokens
        if self.plan.gpt.mtp is not None and self.plan.gpt.mtp.embedding == "own":
            layers = ["", *(f"mtp.{number}." for number in range(len(batches) - 1))]
            tables = [self.weights[f"{layer}embed.weight"] for layer in layers]
        else:
            tables = copies_for_mtp_streams(self.weights["embed.weight"], len(batches))
        x, *others = [F.embedding(self.ordered(x.tokens), table) for x, table in zip(batches, tables, strict=True)]
        x = self.math.placed(x, self.weights.__getitem__)
        x = self.dropout_rng.tokens(x, "embedding", "embed")
        hook("embed", "output", x)
        names = layer_order(self.plan.gpt)
        num_head, _ = self.plan.gpt.num_empty
        (x,) = self.ends(names[1 : 1 + num_head], [x], hook)
        for i in range(self.plan.gpt.num_layers):
            hook(f"layer.{i}", "input", x)
            x = self.block(x, f"layer.{i}", i)
            hook(f"layer.{i}", "output", x)
        after = [n for n in names[1 + num_head + self.plan.gpt.num_layers : -1] if not n.startswith("mtp.")]
        reads_normed = self.plan.gpt.mtp is not None and self.plan.gpt.mtp.reads == "after_norm"
        xs = self.ends(after, [x], hook) if reads_normed else [x]
        for number, embedding in enumerate(others):
            sub_layer_input, xs[-1] = xs[-1].clone(), xs[-1].clone()  # two readers: a hook sees both gradients
            hook(f"mtp.{number}", "input", sub_layer_input)
            xs.append(self.module(sub_layer_input, embedding, f"mtp.{number}"))
            hook(f"mtp.{number}", "output", xs[-1])
        xs = xs if reads_normed else self.ends(after, xs, hook)
        hook("head", "input", xs[0])
        tied = self.plan.gpt.tied_embedding
        heads = copies_for_mtp_streams(self.weights["embed.weight" if tied else "head.weight"], len(xs))
        return [
            self.cross_entropy(paddle.matmul(x, own, transpose_y=tied), mtp_batch.labels)
            for x, own, mtp_batch in zip(xs, heads, batches, strict=True)
        ]

    def cross_entropy(self, logits: Tensor, labels: npt.NDArray[np.int64]) -> Tensor:
        """Summed over the counted tokens."""
        losses = F.cross_entropy(
            logits.reshape([-1, self.plan.gpt.vocab_size]),
            self.ordered(labels).reshape([-1]),
            ignore_index=-100,
            reduction="none",
        )
        return losses.sum()

    def ordered(self, token_ids: npt.NDArray[np.int64]) -> Tensor:
        """Tokens or labels [B, S] with the dims in the order of the activations."""
        return paddle.to_tensor(np.ascontiguousarray(token_ids.T if self.sequence_first else token_ids))

    def ends(self, names: Sequence[str], xs: list[Tensor], hook: LayerHook) -> list[Tensor]:
        """The layers before and after the blocks: the final norm, and empty layers."""
        for name in names:
            hook(name, "input", xs[0])
            if name == "norm":
                names = self.math.norm_names("norm")
                weights = [copies_for_mtp_streams(self.weights[weight], len(xs)) for weight in names]
                xs = [self.math.normed(x, *own) for x, *own in zip(xs, *weights, strict=True)]
            hook(name, "output", xs[0])
        return xs

    def module(self, hidden: Tensor, embedding: Tensor, name: str) -> Tensor:
        """MTP module: both inputs are normed and joined; then a block like the last one."""
        embedding = self.dropout_rng.tokens(embedding, "embedding", f"{name}.embed")
        both = self.norm(hidden, f"{name}.hidden_norm"), self.norm(embedding, f"{name}.embed_norm")
        x = paddle.matmul(paddle.concat(both, axis=-1), self.weights[f"{name}.proj.weight"])
        x = self.block(x, name, self.plan.gpt.num_layers - 1)
        return self.norm(x, f"{name}.norm") if f"{name}.norm.weight" in self.weights else x

    def block(self, x: Tensor, name: str, number: int) -> Tensor:
        """Attention and MLP (or experts), each with its norm and residual, as in block ``number``."""
        spec = self.plan.gpt.hyper_connections
        attention = self.attention if self.plan.gpt.mla is None else self.latent_attention
        if (kind := self.plan.gpt.attention_type(number)) is not None:
            attention = partial(self.compressed_attention, kind=kind)
        mlp = self.experts if self.plan.gpt.has_experts(number) else self.mlp
        if spec is not None and streams.is_end(name, 0):
            x = streams.widened(x, spec)
        for sub_layer, compute in ((f"{name}.attn", attention), (f"{name}.mlp", mlp)):
            sub_layer_input, update = self.residual(x, sub_layer)
            y = compute(self.norm(sub_layer_input, f"{sub_layer}_norm"), sub_layer)
            x = update(self.dropout_rng.tokens(y, "hidden", sub_layer))
        if spec is None or not streams.is_end(name, self.plan.gpt.num_layers - 1):
            return x
        if spec.contraction == "sum":
            return streams.summed(x, spec)
        return streams.gated_sum(x, [self.weights[f"{name}.out_streams.{end}"] for end in streams.WEIGHTS], spec)

    def residual(self, x: Tensor, sub_layer: str) -> tuple[Tensor, streams.StreamUpdate]:
        """The input of a sub-layer, and the function that adds its output: the sum, or all streams."""
        spec = self.plan.gpt.hyper_connections
        if spec is None:
            return x, lambda y: x + y
        return streams.read(x, [self.weights[f"{sub_layer}_streams.{end}"] for end in streams.WEIGHTS], spec)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """The norm over the last dim, with the weights of that name."""
        return self.math.normed(x, *map(self.weights.__getitem__, self.math.norm_names(name)))

    def linear(self, x: Tensor, name: str) -> Tensor:
        """The product with the weight of that name."""
        return linear(x, self.weights, name)

    def attention(self, x: Tensor, name: str) -> Tensor:
        """Causal attention over all heads; the queries of a group see one head of keys and values."""
        qkv = self.linear(x, f"{name}.qkv")
        return self.mixed(*self.math.grouped_heads(qkv, name, self.weights.__getitem__), name)

    def latent_attention(self, x: Tensor, name: str) -> Tensor:
        """Causal attention whose queries, keys and values come from compressed vectors."""
        mla = self.plan.gpt.mla
        assert mla is not None
        if mla.q_rank is None:
            q = self.linear(x, f"{name}.q")
        else:
            q = self.linear(self.norm(self.linear(x, f"{name}.q_down"), f"{name}.q_norm"), f"{name}.q_up")
        latent, shared = self.linear(x, f"{name}.kv_down").split([mla.kv_rank, mla.rope_head_size], axis=-1)
        kv = self.linear(self.norm(latent, f"{name}.kv_norm"), f"{name}.kv_up")
        return self.mixed(*self.math.latent_heads(q, kv, shared), name)

    def compressed_attention(self, x: Tensor, name: str, kind: AttentionType) -> Tensor:
        """Attention to near keys, compressed entries and sinks."""
        math = CompressedMath(self.plan, kind)
        for_query, for_keys, *for_entries = Copies.apply(x, math.num_readers)
        low = self.norm(self.linear(for_query, f"{name}.q_down"), f"{name}.q_norm")
        own = self.norm(self.linear(for_keys, f"{name}.kv"), f"{name}.kv_norm")
        products = None
        if for_entries:
            for_kv, for_gate = for_entries
            parts = self.linear(for_kv, f"{name}.compressor.kv"), self.linear(for_gate, f"{name}.compressor.gate")
            products = paddle.concat(parts, axis=-1)

        def weight_of(part: str) -> Tensor:
            return self.weights[f"{name}.{part}"]

        chosen = math.chosen(x, low, weight_of)
        groups = math.compressed(self.linear(low, f"{name}.q_up"), own, products, weight_of, chosen)
        return self.linear(groups, f"{name}.out")

    def mixed(self, groups: Tensor, k: Tensor, v: Tensor, name: str) -> Tensor:
        """Softmax attention of [B, K, G, S, D] over [B, K, S, D] and [B, K, S, Z], and the output's product."""
        rows, num_kv_heads, _, length, size = groups.shape
        q = groups.reshape([rows, num_kv_heads, -1, size])  # one product for all queries of a head of keys
        scores = paddle.matmul(q, k, transpose_y=True) * size**-0.5
        mask = np.where(np.tri(length, dtype=bool), 0.0, -np.inf)
        scores = scores.reshape([rows, num_kv_heads, -1, length, length]) + paddle.to_tensor(mask, dtype=scores.dtype)
        weights = self.dropout_rng.probabilities(F.softmax(scores, axis=-1), name).reshape(
            [rows, num_kv_heads, -1, length]
        )
        y = paddle.matmul(weights, v).reshape([*groups.shape[:4], -1])
        y = y.transpose([3, 0, 1, 2, 4] if self.sequence_first else [0, 3, 1, 2, 4])
        return self.linear(y.reshape([*y.shape[:2], -1]), f"{name}.out")

    def experts(self, x: Tensor, name: str) -> Tensor:
        """Routed experts, and shared experts if the model has them."""
        moe = self.plan.model.moe
        assert moe is not None
        for_router, for_experts, *for_shared = Copies.apply(x, 3 if moe.num_shared_experts else 2)
        router, ids = f"{name}.router.weight", None
        if f"{name}.hash_router.weight" in self.weights:
            router, ids = f"{name}.hash_router.weight", self.token_ids
        logits = paddle.matmul(*(in_router_type(factor, moe) for factor in (for_router, self.weights[router])))
        routing = self.routers.route(logits, name, sequence_dim=0 if self.sequence_first else 1, token_ids=ids)
        weights = [self.weights[f"{name}.experts.{part}.weight"] for part in ("gate", "up", "down")]
        y = mixture([for_experts], [routing], weights, self.plan.gpt)[0]
        return y + self.mlp(for_shared[0], f"{name}.shared") if for_shared else y

    def mlp(self, x: Tensor, name: str) -> Tensor:
        """SwiGLU or GELU."""
        factors = [self.linear(x, f"{name}.{part}") for part in self.math.mlp_inputs]
        return self.linear(self.math.mlp_inner(*factors), f"{name}.down")
