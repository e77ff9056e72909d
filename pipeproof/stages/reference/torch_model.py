"""The whole GPT of a plan on PyTorch: one model with whole weights, its routers and plain autograd.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values, G query heads of each, D head size, n residual
streams, V vocabulary. Activations are [S, B, H] or [B, S, H], as in the plan. MTP streams are more rows of one product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from pipeproof.specs.compressed_attention import SPARSE
from pipeproof.specs.model import HyperConnectionsSpec, MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.layer import layer_order
from pipeproof.stages.describe.layer_records import Side
from pipeproof.stages.describe.mtp_streams import embeds_again, num_modules, shifted_batch
from pipeproof.stages.describe.synthetic import Batch, dropout_gain, hash_tables
from pipeproof.stages.reference.shared_math import (
    Array,
    AttentionTables,
    Choice,
    Dropout,
    RouterSteps,
    rotary_angles,
    stream_factors,
    stream_mixing,
    without_biases,
)
from pipeproof.stages.reference.torch_compressed_attention import CompressedReference
from pipeproof.stages.reference.torch_reference_weights import WholeWeights, copies


class TorchRouters(RouterSteps[torch.Tensor]):
    """The routers on PyTorch; their biases, losses and visits are on the run's device."""

    def __init__(self, plan: PlanSpec, state: Mapping[str, Array], device: torch.device) -> None:
        self._device = device
        super().__init__(plan, state)

    def _placed(self, numbers: Array) -> Tensor:
        return torch.tensor(numbers, device=self._device)

    def _read(self, values: Tensor) -> Array:
        return np.array(values.cpu().numpy())

    def route(self, logits: Tensor, name: str, sequence_dim: int, fixed: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The experts of each token, as they are added, and their weights: two of [N, k], from outputs [.., E].

        Each sequence split of the plan has its own losses. Experts that are ``fixed``, [N, k], have none.
        """
        moe = self._plan.model.moe
        assert moe is not None
        if self._weights and fixed is None:
            logits, for_losses = copies(logits, 2)
            for split, part in enumerate(for_losses.chunk(self._plan.schedule.num_sequence_splits, dim=sequence_dim)):
                self._add_losses(part.flatten(0, -2), name, split, moe)
        scores = _scores(logits.flatten(0, -2), moe)
        ranked = scores.detach() + self.biases[name] if name in self.biases else scores.detach()
        experts = _largest(ranked, moe.top_k) if fixed is None else fixed
        if name in self.visits:
            self.visits[name] += torch.bincount(experts.flatten(), minlength=moe.num_experts)
        gains = torch.gather(scores, 1, experts)
        gains = gains / gains.sum(-1, keepdim=True) if moe.normalize else gains
        if moe.combine == "expert":
            experts, places = torch.sort(experts, dim=1, stable=True)
            gains = torch.gather(gains, 1, places)
        return experts, gains * moe.routed_scale if moe.routed_scale != 1.0 else gains

    def _add_losses(self, logits: Tensor, name: str, split: int, moe: MoeSpec) -> None:
        if logits.dtype in (torch.bfloat16, torch.float16):
            logits = logits.float()
        for loss, weight in self._weights.items():
            value = (_balance(logits, moe) if loss == "aux" else _z(logits)) * weight
            self._add_root(loss, name, split, value, value.detach())


def _scores(logits: Tensor, moe: MoeSpec) -> Tensor:
    if moe.score == "softmax":
        return torch.softmax(logits, -1)
    return torch.sigmoid(logits) if moe.score == "sigmoid" else torch.sqrt(F.softplus(logits))


def _largest(ranked: Tensor, number: int) -> Tensor:
    """The indices [N, k] of the largest entries of [N, E]. Ties go to the lower index."""
    return torch.sort(ranked, dim=-1, descending=True, stable=True).indices[:, :number]


def _balance(logits: Tensor, moe: MoeSpec) -> Tensor:
    scores = _scores(logits, moe)
    visits = torch.bincount(_largest(scores.detach(), moe.top_k).flatten(), minlength=moe.num_experts)
    over_mean = visits.to(scores.dtype) * (moe.num_experts / (len(scores) * moe.top_k))
    shares = scores if moe.score == "softmax" else scores / scores.sum(-1, keepdim=True)
    return (shares.mean(0) * over_mean).sum()


def _z(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, -1).square().mean()


Tensor: TypeAlias = torch.Tensor
LayerHook: TypeAlias = Callable[[str, Side, Tensor], None]
"""Called with the input and the output of each layer."""


def no_hook(layer: str, side: Side, tensor: Tensor) -> None:
    """Do nothing."""


class TorchUnpartitionedModel:
    """The GPT of the plan with whole weights, on the run's device. Weights are first rounded to the run's type."""

    def __init__(self, plan: PlanSpec, weights: Mapping[str, Array]) -> None:
        self.plan = plan
        self.device = torch.device("cuda" if plan.run.device == "gpu" else "cpu")
        self.dtype: torch.dtype = getattr(torch, plan.run.dtype)
        self.loss_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        main_dtype: torch.dtype = getattr(torch, plan.run.weight_dtype)
        self.weights = WholeWeights(without_biases(weights), self.dtype, main_dtype, self.device)
        self.dropout_rng = TorchDropoutRng(plan)
        self.routers = TorchRouters(plan, weights, self.device)
        self.sequence_first = plan.gpt.activation_order == "sbh"
        self.rows_dim = 1 if self.sequence_first else 0
        self.token_ids = torch.empty(0, dtype=torch.int64)
        angles = rotary_angles(plan)
        self.cos = torch.tensor(np.cos(angles), device=self.device).to(self.dtype)
        self.sin = torch.tensor(np.sin(angles), device=self.device).to(self.dtype)

    @cached_property
    def _tables(self) -> dict[str, Tensor]:
        """The experts of each token id, [V, k], where a table chooses."""
        return {name: torch.tensor(table, device=self.device) for name, table in hash_tables(self.plan).items()}

    def losses(self, batch: Batch, hook: LayerHook = no_hook) -> list[Tensor]:
        """The cross-entropy summed over the counted tokens, a scalar: the main loss, and the losses of MTP modules.

        At each position module j reads the token j + 1 positions ahead and predicts the next one.
        """
        model = self.plan.gpt
        batches = [shifted_batch(batch, distance) for distance in range(1 + num_modules(model))]
        self.token_ids = self.ordered(batch.tokens)
        x, others = self.embedded(batches)
        hook("embed", "output", x)
        names, (num_head, _) = layer_order(model), model.num_empty
        x = self.ends(names[1 : 1 + num_head], x, 1, hook)
        for i in range(model.num_layers):
            hook(f"layer.{i}", "input", x)
            x = self.block(x, f"layer.{i}", i)
            hook(f"layer.{i}", "output", x)
        after = [n for n in names[1 + num_head + model.num_layers : -1] if not n.startswith("mtp.")]
        reads = None if model.mtp is None else model.mtp.reads
        xs = [self.ends(after, x, 1, hook) if reads == "after_norm" else x]
        for number, mtp_batch in enumerate(batches[1:]):
            taken, xs[-1] = copies(xs[-1], 2)  # two readers: a hook sees both gradients
            hook(f"mtp.{number}", "input", taken)
            embedding = others[number] if others else self.lookup([mtp_batch], f"mtp.{number}")
            xs.append(self.module(taken, embedding, number))
            hook(f"mtp.{number}", "output", xs[-1])
        if reads == "streams" and model.hyper_connections is not None:
            main = gated_sum(xs[0], self.weights, "mtp.0.main", model.hyper_connections)
            xs[0] = self.ends(after, main, 1, hook)
        joined = torch.cat(xs, self.rows_dim) if xs[1:] else xs[0]
        joined = self.ends(after, joined, len(xs), hook) if reads in (None, "before_norm") else joined
        joined = self.with_hook("head", "input", joined, len(xs), hook)
        product = self.weights.tied_product if model.tied_embedding else self.weights.product
        logits = product(joined, "head" if model.tied_embedding else "head.weight").to(self.loss_dtype)
        return [
            F.cross_entropy(
                own.reshape(-1, model.vocab_size), self.ordered(mtp_batch.labels).reshape(-1), reduction="sum"
            )  # the labels that do not count are PyTorch's own
            for own, mtp_batch in zip(logits.chunk(len(xs), self.rows_dim), batches, strict=True)
        ]

    def embedded(self, batches: Sequence[Batch]) -> tuple[Tensor, list[Tensor]]:
        """The input of the first layer, and the embedded tokens of modules if one lookup serves all."""
        at_once = [batches[0]] if embeds_again(self.plan.gpt) else batches
        x, *others = self.lookup(at_once, "embed").chunk(len(at_once), self.rows_dim)
        if self.plan.gpt.positions == "learned":
            length = x.shape[1 - self.rows_dim]
            x = x + self.weights.value("embed.positions.weight")[:length].unsqueeze(self.rows_dim)
        return self.dropout_rng.tokens(x, "embedding", "embed"), others

    def lookup(self, batches: Sequence[Batch], layer: str) -> Tensor:
        """Rows of the embedding for several MTP streams."""
        return self.weights.rows(
            torch.cat([self.ordered(mtp_batch.tokens) for mtp_batch in batches], self.rows_dim), layer
        )

    def ordered(self, token_ids: npt.NDArray[np.int64]) -> Tensor:
        """Tokens or labels [B, S] with the dims in the order of the activations."""
        return torch.tensor(token_ids.T if self.sequence_first else token_ids, device=self.device)

    def with_hook(self, name: str, side: Side, joined: Tensor, num_streams: int, hook: LayerHook) -> Tensor:
        """Call the hook with the main stream of ``joined``, and return ``joined``."""
        streams = joined.chunk(num_streams, self.rows_dim)
        hook(name, side, streams[0])
        return torch.cat(streams, self.rows_dim) if num_streams > 1 else streams[0]

    def ends(self, names: Sequence[str], x: Tensor, num_streams: int, hook: LayerHook) -> Tensor:
        """The layers before and after the blocks, for all streams: the final norm, and empty layers."""
        for name in names:
            x = self.with_hook(name, "input", x, num_streams, hook)
            if name == "norm":
                x = self.norm(x, "norm")
            x = self.with_hook(name, "output", x, num_streams, hook)
        return x

    def module(self, hidden: Tensor, embedding: Tensor, number: int) -> Tensor:
        """MTP module: both inputs are normed and joined; then a block like the last one."""
        name = f"mtp.{number}"
        embedding = self.dropout_rng.tokens(embedding, "embedding", f"{name}.embed")
        normed = self.norm(embedding, f"{name}.embed_norm")
        if self.plan.gpt.modules_read_streams:
            streams = self.norm(hidden.unflatten(-1, (-1, normed.shape[-1])), f"{name}.hidden_norm")
            of_streams = self.weights.product(streams, f"{name}.hidden_proj.weight")
            embedded = self.weights.product(normed, f"{name}.embed_proj.weight")
            x = (of_streams + embedded.unsqueeze(-2)).flatten(-2)
        else:
            both = self.norm(hidden, f"{name}.hidden_norm"), normed
            x = self.weights.product(torch.cat(both, -1), f"{name}.proj.weight")
        x = self.block(x, name, self.plan.gpt.num_layers - 1)
        return self.norm(x, f"{name}.norm") if f"{name}.norm.weight" in self.weights.main else x

    def block(self, x: Tensor, name: str, number: int) -> Tensor:
        """Attention and MLP (or experts), each with its norm and residual, as in block ``number``."""
        spec = self.plan.gpt.hyper_connections
        in_module, reads_streams = name.startswith("mtp."), self.plan.gpt.modules_read_streams
        attention = self.attention_of(-1 if in_module else number)
        mlp = self.experts if self.plan.gpt.has_experts(number) else self.mlp
        if spec is not None and (not reads_streams if in_module else number == 0):
            x = widened(x, spec)
        for sub_layer, compute in ((f"{name}.attn", attention), (f"{name}.mlp", mlp)):
            if spec is None:
                output = compute(self.norm(x, f"{sub_layer}_norm"), sub_layer)
                x = x + self.dropout_rng.tokens(output, "hidden", sub_layer)
            else:
                sub_layer_input, update = read(x, self.weights, sub_layer, spec)
                output = compute(self.norm(sub_layer_input, f"{sub_layer}_norm"), sub_layer)
                x = update(self.dropout_rng.tokens(output, "hidden", sub_layer))
        is_last = number == self.plan.gpt.num_layers - 1 and not reads_streams
        if spec is None or not (is_last or in_module):
            return x
        return summed(x, spec) if spec.contraction == "sum" else gated_sum(x, self.weights, f"{name}.out", spec)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """The norm over the last dim, with the weights of that name."""
        # A separate node: x then feeds this norm once. The norm may read its input several times, and autograd does not
        # guarantee the order in which it adds three gradients.
        x, weight = x.view_as(x), self.weights.value(f"{name}.weight")
        if self.plan.gpt.norm == "layer":
            return F.layer_norm(x, x.shape[-1:], weight, self.weights.value(f"{name}.bias"), 1e-6)
        return F.rms_norm(x, x.shape[-1:], weight, 1e-6)

    def attention_of(self, number: int) -> Callable[[Tensor, str], Tensor]:
        """The attention of block ``number``."""
        model, kind = self.plan.gpt, self.plan.gpt.attention_type(number)
        if model.compressed_attention is None or kind is None:
            return self.attention if model.mla is None else self.latent_attention
        tables, is_sparse = AttentionTables(model.compressed_attention, kind), kind == SPARSE
        return CompressedReference(tables, self.weights, model.size_of_head, self.sequence_first, is_sparse).output

    def attention(self, x: Tensor, name: str) -> Tensor:
        """Causal attention over all heads; the queries of a group see one head of keys and values."""
        num_kv_heads, size = self.plan.gpt.kv_heads, self.plan.gpt.size_of_head
        qkv = self.weights.linear(x, f"{name}.qkv").reshape(*x.shape[:2], num_kv_heads, -1, size)
        if self.plan.gpt.qk_norm:  # heads are rows: with more dims, their layout is the order of the gradient's sum
            q, k, v = qkv.split([qkv.shape[3] - 2, 1, 1], 3)
            q = self.norm(q.reshape(-1, size), f"{name}.q_head_norm").reshape(q.shape)
            k = self.norm(k.reshape(-1, size), f"{name}.k_head_norm").reshape(k.shape)
            qkv = torch.cat([q, k, v], 3)
        qkv = qkv.permute(1, 2, 3, 0, 4) if self.sequence_first else qkv.permute(0, 2, 3, 1, 4)  # [B, K, G + 2, S, D]
        q, k, v = self.rotary(qkv[:, :, :-2]), self.rotary(qkv[:, :, -2]), qkv[:, :, -1]
        return self.weights.linear(self.mixed(q, k, v, name), f"{name}.out")

    def latent_attention(self, x: Tensor, name: str) -> Tensor:
        """Causal attention whose queries, keys and values come from compressed vectors."""
        mla = self.plan.gpt.mla
        assert mla is not None
        nope, rope = mla.nope_head_size, mla.rope_head_size
        to_heads = (1, 2, 0, 3) if self.sequence_first else (0, 2, 1, 3)
        down = self.weights.product(x, f"{name}.kv_down.weight")
        latent = self.norm(down[..., : mla.kv_rank], f"{name}.kv_norm")
        if mla.q_rank is None:
            q = self.weights.product(x, f"{name}.q.weight")
        else:
            q = self.norm(self.weights.product(x, f"{name}.q_down.weight"), f"{name}.q_norm")
            q = self.weights.product(q, f"{name}.q_up.weight")
        kv = self.weights.product(latent, f"{name}.kv_up.weight")
        q = q.reshape(*x.shape[:2], -1, nope + rope).permute(to_heads)
        kv = kv.reshape(*x.shape[:2], -1, nope + mla.value_head_size).permute(to_heads)
        shared = down[..., mla.kv_rank :].transpose(0, 1) if self.sequence_first else down[..., mla.kv_rank :]
        shared = self.rotary(shared).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        q = torch.cat([q[..., :nope], self.rotary(q[..., nope:])], -1)
        k = torch.cat([kv[..., :nope], shared], -1)
        mixed = self.mixed(q.unsqueeze(2), k, kv[..., nope:], name)
        return self.weights.product(mixed, f"{name}.out.weight")

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, name: str) -> Tensor:
        """Softmax attention of [B, K, G, S, D] over [B, K, S, D] and values, in the order of activations [.., H]."""
        # PyTorch may mistake halves of one column for images in channels-last format and join them to heads with that
        # memory layout. Attention of such heads runs in another kernel, with other bits.
        q, k = q.contiguous(), k.contiguous()
        if self.dropout_rng.drops_probabilities():
            scores = torch.matmul(q.contiguous(), k.contiguous().unsqueeze(2).mT) * q.shape[-1] ** -0.5
            is_later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=self.device).triu(1)
            weights = torch.softmax(torch.masked_fill(scores, is_later, -torch.inf), -1)
            y = torch.matmul(self.dropout_rng.probabilities(weights, name), v.contiguous().unsqueeze(2))
        else:
            y = F.scaled_dot_product_attention(q.flatten(1, 2), k, v, is_causal=True, enable_gqa=q.shape[2] > 1)
            y = y.unflatten(1, q.shape[1:3])
        return y.permute((3, 0, 1, 2, 4) if self.sequence_first else (0, 3, 1, 2, 4)).flatten(2)

    def rotary(self, heads: Tensor) -> Tensor:
        """Rotate each pair (i, i + D/2) of a head by the angle of its position, unless positions are learned."""
        if self.plan.gpt.positions == "learned":
            return heads
        a, b = heads.chunk(2, -1)
        cos, sin = self.cos[: heads.shape[-2]], self.sin[: heads.shape[-2]]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def experts(self, x: Tensor, name: str) -> Tensor:
        """Routed experts, and shared experts if the model has them. An expert's rows are its tokens in order."""
        moe = self.plan.model.moe
        assert moe is not None
        for_router, for_experts, *for_shared = copies(x, 3 if moe.num_shared_experts else 2)
        router, fixed = f"{name}.router.weight", None
        if f"{name}.hash_router.weight" in self.weights.main:
            router, fixed = f"{name}.hash_router.weight", self._tables[name][self.token_ids.flatten()]
        logits = self.weights.product(for_router, router, moe.router_dtype)
        chosen, gains = self.routers.route(logits, name, 0 if self.sequence_first else 1, fixed)
        tokens, in_order = for_experts.reshape(-1, x.shape[-1]), moe.combine == "expert"
        visitors = (
            torch.stack(copies(tokens.to(_wide(tokens)), moe.top_k), 1).flatten(0, 1).to(tokens.dtype)
            if in_order
            else tokens.repeat_interleave(moe.top_k, 0)
        )
        order = torch.sort(chosen.flatten(), stable=True).indices
        sizes = torch.bincount(chosen.flatten(), minlength=moe.num_experts).tolist()
        output = self.expert_mlps(_PermuteRows.apply(visitors, order), sizes, name)
        back = _PermuteRows.apply(output, torch.argsort(order)).reshape(*chosen.shape, -1)
        y = _sum_of_visits(back, gains) if in_order else (back * gains.unsqueeze(-1)).sum(1)
        y = y.to(x.dtype).reshape(x.shape)
        return y + self.mlp(for_shared[0], f"{name}.shared") if for_shared else y

    def expert_mlps(self, rows: Tensor, sizes: Sequence[int], name: str) -> Tensor:
        """The MLP of each expert for its group of rows."""
        gate, up = (
            self.weights.expert_products(rows, f"{name}.experts.{part}.weight", sizes) for part in ("gate", "up")
        )
        return self.weights.expert_products(self.gated(gate, up), f"{name}.experts.down.weight", sizes)

    def mlp(self, x: Tensor, name: str) -> Tensor:
        """SwiGLU or GELU."""
        if self.plan.gpt.mlp == "swiglu":
            gate, up = (self.weights.linear(x, f"{name}.{part}") for part in ("gate", "up"))
            return self.weights.linear(self.gated(gate, up), f"{name}.down")
        approximate = "tanh" if self.plan.gpt.mlp == "gelu_tanh" else "none"
        return self.weights.linear(
            F.gelu(self.weights.linear(x, f"{name}.up"), approximate=approximate), f"{name}.down"
        )

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """SwiGLU; with a limit both factors are clamped, with zero gradient beyond the limit."""
        limit = self.plan.gpt.swiglu_limit
        if limit is None:
            return F.silu(gate) * up
        gate = torch.where(gate <= limit, gate, limit)
        up = torch.where(up <= limit, torch.where(up >= -limit, up, -limit), limit)
        if self.plan.gpt.swiglu_formula == "silu":
            return F.silu(gate) * up
        return gate * torch.sigmoid(gate * 1.702) * (up + 1.0)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype


def _sum_of_visits(outputs: Tensor, gains: Tensor) -> Tensor:
    """The weighted sum [N, H] of [N, k, H], one after another; 16-bit types in float32."""
    wide = _wide(outputs)
    total = outputs[:, 0].to(wide) * gains[:, :1].to(wide)
    for visit in range(1, outputs.shape[1]):
        total = total + outputs[:, visit].to(wide) * gains[:, visit : visit + 1].to(wide)
    return total.to(outputs.dtype)


class _PermuteRows(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    """A permutation of rows. Gradients only move back; autograd's own backward would add them to zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (order,) = ctx.saved_tensors
        return gradient[torch.argsort(order)], None


class TorchDropoutRng(Dropout):
    """Dropout on PyTorch."""

    def _gains(self, mask: Choice, rate: float, like: Tensor) -> Tensor:
        return torch.tensor(mask, dtype=like.dtype, device=like.device) * dropout_gain(rate)


StreamUpdate: TypeAlias = Callable[[Tensor], Tensor]
"""Compute the residual after a sub-layer from the sub-layer's output."""


def widened(x: Tensor, spec: HyperConnectionsSpec) -> Tensor:
    """Copy the activation into streams, for the first block. Their gradients are added in order."""
    return torch.cat(copies(x, spec.streams), -1)


def summed(x: Tensor, spec: HyperConnectionsSpec) -> Tensor:
    """Add the streams in order, for the output of the last block."""
    parts = torch.chunk(x, spec.streams, -1)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def read(x: Tensor, weights: WholeWeights, sub_layer: str, spec: HyperConnectionsSpec) -> tuple[Tensor, StreamUpdate]:
    """The input of ``sub_layer`` from its streams (arXiv:2512.24880), and the function that updates the streams.

    The streams of a token are consecutive in the last dim, n H. Their readers' gradients are added in this order: the
    gates, the sub-layer, the mixture.
    """
    n = spec.streams
    for_gates, for_layer, for_mixture = copies(x, 3)
    parts = [n, n, n * n]
    normed = F.rms_norm(for_gates, for_gates.shape[-1:], eps=1e-6)
    scale = weights.value(f"{sub_layer}_streams.scale")
    factors = torch.cat([scale[index].expand(size) for index, size in enumerate(parts)])
    numbers = weights.product(normed, f"{sub_layer}_streams.weight") * factors + weights.value(
        f"{sub_layer}_streams.bias"
    )
    pre, post, mix = torch.split(numbers, parts, -1)
    each = (*x.shape[:-1], n, x.shape[-1] // n)
    mixture = torch.matmul(
        stream_mixing(mix.to(_wide(mix)).reshape(*x.shape[:-1], n, n), spec).to(x.dtype), for_mixture.reshape(each)
    )
    taken = torch.matmul(stream_factors(pre, spec).unsqueeze(-2), for_layer.reshape(each)).squeeze(-2)

    def update(output: Tensor) -> Tensor:
        written = (torch.sigmoid(post) * 2.0).unsqueeze(-1) * output.unsqueeze(-2)
        return mixture.reshape(x.shape) + written.reshape(x.shape)

    return taken, update


def gated_sum(x: Tensor, weights: WholeWeights, name: str, spec: HyperConnectionsSpec) -> Tensor:
    """Add the streams with learned factors, for the output of the last block."""
    for_gates, for_sum = copies(x, 2)
    normed = F.rms_norm(for_gates, for_gates.shape[-1:], eps=1e-6)
    # One factor for all columns, as many times as there are columns: the order of the gradient's sum is theirs.
    factors = weights.value(f"{name}_streams.scale").expand(spec.streams)
    numbers = weights.product(normed, f"{name}_streams.weight") * factors + weights.value(f"{name}_streams.bias")
    each = (*x.shape[:-1], spec.streams, x.shape[-1] // spec.streams)
    return torch.matmul(stream_factors(numbers, spec).unsqueeze(-2), for_sum.reshape(each)).squeeze(-2)
