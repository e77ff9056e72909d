"""The whole GPT of a plan on PyTorch, as one model with whole weights and plain autograd.

Shape letters: S sequence, B rows, H hidden, K heads of keys and values, G query heads of each, D head size, V words.
Activations are [S, B, H] or [B, S, H], as the plan says; lanes of multi-token prediction are more rows of one product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.ahead import ahead
from pipeproof.stages.describe.lanes import embeds_again, num_modules
from pipeproof.stages.describe.order import layer_order
from pipeproof.stages.describe.synthetic import Batch
from pipeproof.stages.describe.watch import Side
from pipeproof.stages.reference import torch_streams as streams
from pipeproof.stages.reference.torch_chance import TorchChance
from pipeproof.stages.reference.torch_routers import TorchRouters, without_biases
from pipeproof.stages.reference.torch_weights import WholeWeights, copies

Tensor: TypeAlias = torch.Tensor
Array: TypeAlias = npt.NDArray[Any]
Look: TypeAlias = Callable[[str, Side, Tensor], None]
"""Is told what a layer takes or gives."""


def look_away(layer: str, side: Side, tensor: Tensor) -> None:
    """Where nobody looks."""


class TorchUncutModel:
    """The GPT of the plan with whole weights, on the run's device; weights are rounded to the run's type at first."""

    def __init__(self, plan: PlanSpec, weights: Mapping[str, Array]) -> None:
        self.plan = plan
        self.device = torch.device("cuda" if plan.run.device == "gpu" else "cpu")
        self.dtype: torch.dtype = getattr(torch, plan.run.dtype)
        self.loss_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        main_dtype: torch.dtype = getattr(torch, plan.run.weight_dtype)
        self.weights = WholeWeights(without_biases(weights), self.dtype, main_dtype, self.device)
        self.chance = TorchChance(plan)
        self.routers = TorchRouters(plan, weights, self.device)
        self.sequence_first = plan.model.activation_order == "sbh"
        self.rows_dim = 1 if self.sequence_first else 0
        size = plan.model.rotary_size
        exponents = np.arange(size // 2, dtype=np.float64) * 2 / size
        angles = np.arange(plan.model.seq_length)[:, None] * 10000.0 ** -exponents[None, :]  # [S, D / 2]
        self.cos = torch.tensor(np.cos(angles), device=self.device).to(self.dtype)
        self.sin = torch.tensor(np.sin(angles), device=self.device).to(self.dtype)

    def losses(self, batch: Batch, look: Look = look_away) -> list[Tensor]:
        """The cross-entropy summed over the micro-batch's counted tokens, a scalar: the main one, and those of modules.

        Module j reads the token j + 1 positions ahead of each, and predicts the one after that.
        """
        model = self.plan.model
        lanes = [ahead(batch, distance) for distance in range(1 + num_modules(model))]
        x, others = self.embedded(lanes)
        look("embed", "output", x)
        names, (num_head, num_tail) = layer_order(model), model.num_empty
        x = self.ends(names[1 : 1 + num_head], x, 1, look)
        for i in range(model.num_layers):
            look(f"layer.{i}", "input", x)
            x = self.block(x, f"layer.{i}", i)
            look(f"layer.{i}", "output", x)
        xs = [x]
        for number, lane in enumerate(lanes[1:]):
            taken, xs[-1] = copies(xs[-1], 2)  # two readers: a look sees what each gives back
            look(f"mtp.{number}", "input", taken)
            embedding = others[number] if others else self.looked_up([lane], f"mtp.{number}")
            xs.append(self.module(taken, embedding, number))
            look(f"mtp.{number}", "output", xs[-1])
        joined = self.ends(names[-2 - num_tail : -1], torch.cat(xs, self.rows_dim) if xs[1:] else x, len(xs), look)
        joined = self.shown("head", "input", joined, len(xs), look)
        product = self.weights.tied_product if model.tied_embedding else self.weights.product
        logits = product(joined, "head" if model.tied_embedding else "head.weight").to(self.loss_dtype)
        return [
            F.cross_entropy(
                own.reshape(-1, model.vocab_size), self.ordered(lane.labels).reshape(-1), reduction="sum"
            )  # the labels that do not count are PyTorch's own
            for own, lane in zip(logits.chunk(len(xs), self.rows_dim), lanes, strict=True)
        ]

    def embedded(self, lanes: Sequence[Batch]) -> tuple[Tensor, list[Tensor]]:
        """What the first layer reads, and what modules do where the embedding is looked up for all at once."""
        at_once = [lanes[0]] if embeds_again(self.plan.model) else lanes
        x, *others = self.looked_up(at_once, "embed").chunk(len(at_once), self.rows_dim)
        return self.chance.tokens(x, "embedding", "embed"), others

    def looked_up(self, lanes: Sequence[Batch], layer: str) -> Tensor:
        """Rows of the embedding for some lanes."""
        return self.weights.rows(torch.cat([self.ordered(lane.tokens) for lane in lanes], self.rows_dim), layer)

    def ordered(self, words: npt.NDArray[np.int64]) -> Tensor:
        """Tokens or labels [B, S] in the order of the activations."""
        return torch.tensor(words.T if self.sequence_first else words, device=self.device)

    def shown(self, name: str, side: Side, joined: Tensor, num_lanes: int, look: Look) -> Tensor:
        """What it is given; the main lane of it has been looked at."""
        lanes = joined.chunk(num_lanes, self.rows_dim)
        look(name, side, lanes[0])
        return torch.cat(lanes, self.rows_dim) if num_lanes > 1 else lanes[0]

    def ends(self, names: Sequence[str], x: Tensor, num_lanes: int, look: Look) -> Tensor:
        """What stands around the blocks, of all lanes: the last norm, and layers that do nothing."""
        for name in names:
            x = self.shown(name, "input", x, num_lanes, look)
            if name == "norm":
                x = self.norm(x, "norm.weight")
            x = self.shown(name, "output", x, num_lanes, look)
        return x

    def module(self, hidden: Tensor, embedding: Tensor, number: int) -> Tensor:
        """Multi-token prediction: both normed, joined, and a block as the last one is."""
        name = f"mtp.{number}"
        embedding = self.chance.tokens(embedding, "embedding", f"{name}.embed")
        both = self.norm(hidden, f"{name}.hidden_norm.weight"), self.norm(embedding, f"{name}.embed_norm.weight")
        x = self.weights.product(torch.cat(both, -1), f"{name}.proj.weight")
        return self.block(x, name, self.plan.model.num_layers - 1)

    def block(self, x: Tensor, name: str, number: int) -> Tensor:
        """Attention and MLP, or experts as block ``number`` has, each with its norm before and its residual around."""
        spec = self.plan.model.hyper_connections
        attention = self.attention if self.plan.model.mla is None else self.latent_attention
        mlp = self.experts if self.plan.model.has_experts(number) else self.mlp
        if spec is not None and number == 0:
            x = streams.widened(x, spec)
        for at, compute in ((f"{name}.attn", attention), (f"{name}.mlp", mlp)):
            if spec is None:
                made = compute(self.norm(x, f"{at}_norm.weight"), at)
                x = x + self.chance.tokens(made, "hidden", at)
            else:
                taken, behind = streams.read(x, self.weights, at, spec)
                x = behind(self.chance.tokens(compute(self.norm(taken, f"{at}_norm.weight"), at), "hidden", at))
        return streams.summed(x, spec) if spec is not None and number == self.plan.model.num_layers - 1 else x

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMSNorm over the last dim, with the weight of that name."""
        # A node of its own, so that x feeds this norm once: inside, the norm may read what it is given several times,
        # and with the residual the gradient of three would depend on the order in which autograd adds them.
        x = x.view_as(x)
        return F.rms_norm(x, x.shape[-1:], self.weights.value(name), 1e-6)

    def attention(self, x: Tensor, name: str) -> Tensor:
        """Causal rotary attention over all heads; the queries of a group see one head of keys and values."""
        num_kv_heads, size = self.plan.model.kv_heads, self.plan.model.size_of_head
        qkv = self.weights.product(x, f"{name}.qkv.weight").reshape(*x.shape[:2], num_kv_heads, -1, size)
        qkv = qkv.permute(1, 2, 3, 0, 4) if self.sequence_first else qkv.permute(0, 2, 3, 1, 4)  # [B, K, G + 2, S, D]
        q, k, v = self.rotary(qkv[:, :, :-2]), self.rotary(qkv[:, :, -2]), qkv[:, :, -1]
        return self.weights.product(self.mixed(q, k, v, name), f"{name}.out.weight")

    def latent_attention(self, x: Tensor, name: str) -> Tensor:
        """Causal attention whose queries, keys and values come from compressed vectors."""
        mla = self.plan.model.mla
        assert mla is not None
        nope, rope = mla.nope_head_size, mla.rope_head_size
        to_heads = (1, 2, 0, 3) if self.sequence_first else (0, 2, 1, 3)
        down = self.weights.product(x, f"{name}.kv_down.weight")
        latent = self.norm(down[..., : mla.kv_rank], f"{name}.kv_norm.weight")
        if mla.q_rank is None:
            q = self.weights.product(x, f"{name}.q.weight")
        else:
            q = self.norm(self.weights.product(x, f"{name}.q_down.weight"), f"{name}.q_norm.weight")
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
        # PyTorch may take halves of one column for images in channels last, and joins them to heads that lie so in
        # memory; of those, attention is computed by another kernel, with other bits.
        q, k = q.contiguous(), k.contiguous()
        if self.chance.drops_probabilities():
            scores = torch.matmul(q, k.unsqueeze(2).mT) * q.shape[-1] ** -0.5
            is_later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=self.device).triu(1)
            weights = torch.softmax(torch.masked_fill(scores, is_later, -torch.inf), -1)
            y = torch.matmul(self.chance.probabilities(weights, name), v.unsqueeze(2))
        else:
            y = F.scaled_dot_product_attention(q.flatten(1, 2), k, v, is_causal=True, enable_gqa=q.shape[2] > 1)
            y = y.unflatten(1, q.shape[1:3])
        return y.permute((3, 0, 1, 2, 4) if self.sequence_first else (0, 3, 1, 2, 4)).flatten(2)

    def rotary(self, heads: Tensor) -> Tensor:
        """Turn each pair (i, i + D/2) of a head by its position's angle."""
        a, b = heads.chunk(2, -1)
        cos, sin = self.cos[: heads.shape[-2]], self.sin[: heads.shape[-2]]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def experts(self, x: Tensor, name: str) -> Tensor:
        """Routed experts, and shared ones where there are; an expert's rows are its tokens in their order."""
        moe = self.plan.model.moe
        assert moe is not None
        for_router, for_experts, *for_shared = copies(x, 3 if moe.num_shared_experts else 2)
        logits = self.weights.product(for_router, f"{name}.router.weight")
        chosen, gains = self.routers.route(logits, name, sequence_dim=0 if self.sequence_first else 1)
        visitors = for_experts.reshape(-1, x.shape[-1]).repeat_interleave(moe.top_k, 0)
        order = torch.sort(chosen.flatten(), stable=True).indices
        sizes = torch.bincount(chosen.flatten(), minlength=moe.num_experts).tolist()
        made = self.of_experts(_Moved.apply(visitors, order), sizes, name)
        back = _Moved.apply(made, torch.argsort(order)).reshape(*chosen.shape, -1)
        y = (back * gains.unsqueeze(-1)).sum(1).reshape(x.shape)
        return y + self.mlp(for_shared[0], f"{name}.shared") if for_shared else y

    def of_experts(self, rows: Tensor, sizes: Sequence[int], name: str) -> Tensor:
        """Rows expert by expert, through each one's MLP."""
        gate, up = (
            self.weights.expert_products(rows, f"{name}.experts.{part}.weight", sizes) for part in ("gate", "up")
        )
        return self.weights.expert_products(self.gated(gate, up), f"{name}.experts.down.weight", sizes)

    def mlp(self, x: Tensor, name: str) -> Tensor:
        """SwiGLU."""
        gate, up = (self.weights.product(x, f"{name}.{part}.weight") for part in ("gate", "up"))
        return self.weights.product(self.gated(gate, up), f"{name}.down.weight")

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        """SwiGLU's function, or with a limit that of gpt-oss: both are clamped, and the gradient is zero beyond it."""
        limit = self.plan.model.swiglu_limit
        if limit is None:
            return F.silu(gate) * up
        gate = torch.where(gate <= limit, gate, limit)
        up = torch.where(up <= limit, torch.where(up >= -limit, up, -limit), limit)
        return gate * torch.sigmoid(gate * 1.702) * (up + 1.0)


class _Moved(torch.autograd.Function):  # type: ignore[misc]  # checked where PyTorch need not be
    """Rows in another order. Their gradients only move back: autograd's own way would add them to zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (order,) = ctx.saved_tensors
        return gradient[torch.argsort(order)], None
