"""The tensors that a convention makes of a model's weights: the role of each, and of which boxes it is put together.

Roles: ``embed``, ``norm``, ``head``; in a block ``attn_norm``, ``q``, ``k`` and
``v`` or ``qkv``, of latent attention ``q_whole`` or ``q_down``, ``q_norm`` and
``q_up``, ``kv_down``, ``kv_norm``, ``kv_up``; ``out``, ``mlp_norm`` or
``experts_norm``, ``gate`` and ``up`` or ``gate_up``, ``down``, the same of an
expert (``expert_gate``) and of shared ones (``shared_gate``), ``router``,
``router_bias``; in a module of multi-token prediction ``hidden_norm``,
``embed_norm``, ``proj``, and the copies ``module_embed``, ``module_norm``,
``module_head``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeproof.specs.model import ModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.balance import bias_name, moves_biases, routers
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layers import loss_dtype
from pipeproof.state.boxes import Box
from pipeproof.state.index import TensorEntry
from pipeproof.state.names.tables import Convention
from pipeproof.state.names.views import View, expert_of, view_of

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a convention: its role, pipeproof's layer, and what stands in it along the dim ``along``.

    ``copy_of`` is the role of the tensor that it is a copy of.
    """

    role: str
    block: str
    views: tuple[View, ...]
    along: int = 0
    expert: int | None = None
    copy_of: str | None = None


def weights_of(model: ModelSpec, dtype: str) -> dict[str, TensorEntry]:
    """Pipeproof's own whole tensors: weights in ``dtype``, and biases of routers, in the order of the layers."""
    plan = PlanSpec.model_validate(
        {
            "pipeproof": 1,
            "model": model,
            "topology": {},
            "schedule": {"kind": "gpipe", "num_micro_batches": 1, "micro_batch_size": 1},
        }
    )
    layers = describe_gpt(plan)
    found = {
        weight.name: TensorEntry(kind="weight", dtype=dtype, shape=weight.shape)
        for layer in layers
        for weight in layer.parameters
    }
    if moves_biases(plan):
        assert model.moe is not None
        entry = TensorEntry(kind="expert_bias", dtype=loss_dtype(dtype) or dtype, shape=(model.moe.num_experts,))
        found |= {bias_name(name): entry for name in routers(layers)}
    return found


def parts_of(model: ModelSpec, shapes: Shapes, convention: Convention, ffn_shards: Mapping[str, int]) -> list[Part]:
    """All tensors that the convention makes of the model's; copies come last.

    A fused gate and up that is cut over tensor-parallel ranks has the gate and up
    of each rank in turn; ``ffn_shards`` says of how many, by the convention's
    name, where it is not one.
    """
    return list(_Describer(model, shapes, convention, ffn_shards).parts())


class _Describer:
    def __init__(self, model: ModelSpec, shapes: Shapes, convention: Convention, ffn_shards: Mapping[str, int]) -> None:
        self.model, self.shapes, self.convention, self.ffn_shards = model, shapes, convention, ffn_shards
        self._boxes: dict[tuple[object, ...], list[Box]] = {}

    def parts(self) -> Iterator[Part]:
        model = self.model
        yield Part("embed", "", (self._table("embed"),))
        for number in range(model.num_layers):
            yield from self._block(f"layer.{number}", has_experts=model.has_experts(number))
        modules = [f"mtp.{number}" for number in range(0 if model.mtp is None else model.mtp.num_modules)]
        for name in modules:
            own = {f"{norm}_norm": f"{name}.{norm}_norm.weight" for norm in ("hidden", "embed")}
            yield from self._as_it_is(name, own)
            # Most others have what is embedded first, and then what comes from before.
            proj = self._view(f"{name}.proj.weight")
            hidden, embedded = (proj.cut(0, at * model.hidden_size, (at + 1) * model.hidden_size) for at in (0, 1))
            both = (hidden, embedded) if self.convention.hidden_first else (embedded, hidden)
            yield Part("proj", name, both, along=0)
            yield from self._block(name, has_experts=model.has_experts(model.num_layers - 1))
        yield from self._as_it_is("", {"norm": "norm.weight"})
        if not model.tied_embedding:
            yield Part("head", "", (self._table("head"),))
        elif self.convention.has_tied_head:
            yield Part("head", "", (self._table("embed"),), copy_of="embed")
        head = "embed" if model.tied_embedding else "head"
        for name in modules:
            for role, of in (("module_embed", "embed"), ("module_norm", "norm"), ("module_head", head)):
                if role in self.convention.module:
                    yield Part(role, name, (self._table(of),), copy_of=of)

    def _view(self, name: str) -> View:
        return view_of(name, self.shapes[name])

    def _table(self, end: str) -> View:
        """The embedding, the last norm or the head, without the padding of the vocabulary where theirs has none."""
        view = self._view(f"{end}.weight")
        if end == "norm" or self.convention.padded:
            return view
        return view.cut(0 if end == "embed" else 1, 0, self.model.num_token_ids)

    def _as_it_is(self, block: str, names: Mapping[str, str]) -> Iterator[Part]:
        for role, name in names.items():
            yield Part(role, block, (self._view(name),))

    def _block(self, name: str, *, has_experts: bool) -> Iterator[Part]:
        yield from self._as_it_is(name, {"attn_norm": f"{name}.attn_norm.weight"})
        yield from self._attention(name) if self.model.mla is None else self._latent_attention(name)
        norm = "experts_norm" if has_experts else "mlp_norm"
        yield from self._as_it_is(name, {norm: f"{name}.mlp_norm.weight", "out": f"{name}.attn.out.weight"})
        if not has_experts:
            yield from self._swiglu(name, "", f"{name}.mlp")
            return
        moe = self.model.moe
        assert moe is not None
        yield from self._as_it_is(name, {"router": f"{name}.mlp.router.weight"})
        if moe.expert_bias_rate is not None:
            yield from self._as_it_is(name, {"router_bias": bias_name(f"{name}.mlp")})
        for expert in range(moe.num_experts):
            yield from self._swiglu(name, "expert_", f"{name}.mlp.experts", expert)
        if moe.num_shared_experts:
            yield from self._swiglu(name, "shared_", f"{name}.mlp.shared")

    def _attention(self, name: str) -> Iterator[Part]:
        """The fused weight has for each head of keys and values its queries, then its key and its value."""
        fused, model = self._view(f"{name}.attn.qkv.weight"), self.model
        if "qkv" in self.convention.block:
            yield Part("qkv", name, (fused,), along=1)
            return
        size = model.size_of_head
        queries = model.num_heads // model.kv_heads * size
        group = queries + 2 * size
        for role, start, width in (("q", 0, queries), ("k", queries, size), ("v", queries + size, size)):
            begins = [number * group + start for number in range(model.kv_heads)]
            yield Part(role, name, tuple(fused.cut(1, begin, begin + width) for begin in begins), along=1)

    def _latent_attention(self, name: str) -> Iterator[Part]:
        mla, heads, at = self.model.mla, self.model.num_heads, f"{name}.attn"
        assert mla is not None
        head = [("as it is", mla.nope_head_size), ("turned", mla.rope_head_size)]
        if mla.q_rank is None:
            yield Part("q_whole", name, self._interleaved(f"{at}.q.weight", head * heads), along=1)
        else:
            yield from self._as_it_is(name, {"q_down": f"{at}.q_down.weight", "q_norm": f"{at}.q_norm.weight"})
            yield Part("q_up", name, self._interleaved(f"{at}.q_up.weight", head * heads), along=1)
        down = [("as it is", mla.kv_rank), ("turned", mla.rope_head_size)]
        yield Part("kv_down", name, self._interleaved(f"{at}.kv_down.weight", down), along=1)
        yield from self._as_it_is(name, {"kv_norm": f"{at}.kv_norm.weight", "kv_up": f"{at}.kv_up.weight"})

    def _interleaved(self, name: str, pieces: Sequence[tuple[str, int]]) -> tuple[View, ...]:
        """Columns of a weight; those that rotary positions turn in pairs that stand side by side.

        Here the pair i of R turned elements is (i, i + R/2), in all models with latent attention elsewhere it is
        (2 i, 2 i + 1): DeepSeek's, and with it Megatron-Core's, which reads it so.
        """
        view, at = self._view(name), 0
        key = view.shape, tuple(pieces)
        if key not in self._boxes:
            found = self._boxes[key] = []
            for kind, width in pieces:
                if kind == "turned":
                    half = width // 2
                    columns = (at + first + second for first in range(half) for second in (0, half))
                    found += [view.cut(1, column, column + 1).box for column in columns]
                else:
                    found.append(view.cut(1, at, at + width).box)
                at += width
        return tuple([View(name, box, view.dims) for box in self._boxes[key]])

    def _swiglu(self, block: str, role: str, name: str, expert: int | None = None) -> Iterator[Part]:
        gate, up, down = (
            self._view(f"{name}.{part}.weight")
            if expert is None
            else expert_of(f"{name}.{part}.weight", self.shapes[f"{name}.{part}.weight"], expert)
            for part in ("gate", "up", "down")
        )
        fused = f"{role}gate_up"
        if fused in self.convention.block:
            theirs = self.convention.name_of(fused, block, self.model.num_layers, expert)
            shards = self.ffn_shards.get(theirs, 1) if fused in self.convention.fused_by_rank else 1
            width = gate.shape[1] // shards
            cuts = [(shard * width, (shard + 1) * width) for shard in range(shards)]
            yield Part(fused, block, tuple(one.cut(1, *cut) for cut in cuts for one in (gate, up)), 1, expert)
        else:
            yield Part(f"{role}gate", block, (gate,), expert=expert)
            yield Part(f"{role}up", block, (up,), expert=expert)
        yield Part(f"{role}down", block, (down,), expert=expert)
