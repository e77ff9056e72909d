"""Tensors of a convention: the role of each, and the regions of pipeproof's tensors that it is made of.

Roles: ``embed``, ``positions``, ``norm``, ``head``; in a block ``attn_norm``, ``q``, ``k`` and ``v``, or ``qkv``, or
``qkv_by_kind`` (all queries, then all keys, then all values), ``q_head_norm`` and ``k_head_norm``, of latent attention
``q_whole`` or ``q_down``, ``q_norm`` and ``q_up``, ``kv_down``, ``kv_norm``, ``kv_up``; ``out``, ``mlp_norm`` or
``experts_norm``, ``gate`` and ``up`` or ``gate_up``, ``down``, also for experts (``expert_gate``) and shared experts
(``shared_gate``), ``router``; in a module of multi-token prediction ``hidden_norm``, ``embed_norm``, ``proj``, and the
copies ``module_embed``, ``module_norm``, ``module_head``; of one that reads all streams ``hidden_proj`` and
``embed_proj``. The bias of a weight has its role with ``_bias``.

A matrix is viewed as pipeproof multiplies with it, [in, out]; an expert of a tensor [experts, in, out] is a matrix,
too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from pydantic import JsonValue

from pipeproof.diagnostics.problems import grouped
from pipeproof.specs.model import ModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.gradient_facts import bias_name, moves_biases, routers
from pipeproof.stages.describe.layer import loss_dtype
from pipeproof.state.names.convention import BIAS, Convention
from pipeproof.state.regions import NO_DIM, Region, whole_region
from pipeproof.state.state_index import TensorEntry
from pipeproof.state.tensor_map import RegionCopy, TensorMap


@dataclass(frozen=True, slots=True)
class View:
    """A region of the tensor ``source``; ``dims`` are the visible dims, the others have one element."""

    source: str
    region: Region
    dims: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the visible dims."""
        return tuple(self.region.extents[dim] for dim in self.dims)

    def sliced(self, dim: int, start: int, stop: int) -> View:
        """Return the view from ``start`` to ``stop`` of a visible dim."""
        position = self.dims[dim]
        offsets, extents = list(self.region.offsets), list(self.region.extents)
        offsets[position], extents[position] = offsets[position] + start, stop - start
        return View(self.source, Region(tuple(offsets), tuple(extents)), self.dims)


def whole_view(source: str, shape: Sequence[int]) -> View:
    """Return the view of a whole vector or matrix."""
    return View(source, whole_region(shape), tuple(range(len(shape))))


def is_table(source: str) -> bool:
    """Return True for a matrix with a row for each token or position in all tools.

    A head that is tied to one has its rows.
    """
    return source.startswith("embed.") or source.endswith(".positions.weight")


def expert_of(source: str, shape: Sequence[int], expert: int) -> View:
    """Return the matrix of one expert of [experts, in, out]."""
    return View(source, Region((expert, 0, 0), (1, *shape[1:])), (1, 2))


def concatenated(views: Sequence[View], along: int, dtype: str, *, transposed: bool) -> TensorMap:
    """Return the map of a tensor that is a concatenation of views along ``along``, or its transpose."""
    dims = views[0].dims
    seen = tuple(reversed(dims)) if transposed else dims
    axis = seen.index(dims[along])
    before, after = (0,) * axis, (0,) * (len(seen) - axis - 1)
    permutation = None if seen == tuple(range(len(views[0].region.extents))) else seen
    position, copies = 0, []
    for view in views:  # of latent attention there are thousands, of one column each
        extents = tuple([view.region.extents[dim] for dim in seen])
        copies.append(RegionCopy(Region((*before, position, *after), extents), view.source, view.region, permutation))
        position += extents[axis]
    shape = (*copies[0].region.extents[:axis], position, *copies[0].region.extents[axis + 1 :])
    return TensorMap(dtype, shape, tuple(copies))


def as_row(vector: TensorMap) -> TensorMap:
    """Return the map of a vector as a matrix with one row."""
    (copy,) = vector.copies
    region = Region((0, *copy.region.offsets), (1, *copy.region.extents))
    return replace(vector, shape=region.extents, copies=(replace(copy, region=region, permutation=(NO_DIM, 0)),))


Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ConventionTensor:
    """One tensor of a convention: its role, pipeproof's layer, and the views that are concatenated along ``along``.

    ``copy_of`` is the role of the tensor that it duplicates.
    """

    role: str
    block: str
    views: tuple[View, ...]
    along: int = 0
    expert: int | None = None
    copy_of: str | None = None


def plan_with(model: ModelSpec, **run: JsonValue) -> PlanSpec:
    """Return a plan of one rank with a model, and with ``run`` in its section of that name."""
    schedule = {"kind": "gpipe", "num_micro_batches": 1, "micro_batch_size": 1}
    return PlanSpec.model_validate({"pipeproof": 1, "model": model, "topology": {}, "schedule": schedule, "run": run})


def weights_of(model: ModelSpec, dtype: str) -> dict[str, TensorEntry]:
    """Return pipeproof's own whole tensors: weights in ``dtype``, and biases of routers, in the order of the layers."""
    plan = plan_with(model)
    layers = describe_gpt(plan)
    entries = {
        weight.name: TensorEntry(kind="weight", dtype=dtype, shape=weight.shape)
        for layer in layers
        for weight in layer.parameters
    }
    if moves_biases(plan):
        assert model.moe is not None
        entry = TensorEntry(kind="expert_bias", dtype=loss_dtype(dtype) or dtype, shape=(model.moe.num_experts,))
        entries |= {bias_name(name): entry for name in routers(layers)}
    return entries


def convention_tensors(
    model: ModelSpec, shapes: Shapes, convention: Convention, ffn_shards: Mapping[str, int]
) -> list[ConventionTensor]:
    """Return all tensors of a convention for a model; copies come last.

    A fused gate and up that is sharded over tensor-parallel ranks has gate and up of each rank, one rank after the
    other; ``ffn_shards`` is the number of these ranks by the convention's name, where it is not one.
    """
    tensors = _Describer(model, shapes, convention, ffn_shards).tensors()
    return [each for tensor in tensors for each in (tensor, *_bias_of(tensor, shapes))]


def _bias_of(tensor: ConventionTensor, shapes: Shapes) -> Iterator[ConventionTensor]:
    """Yield the bias of a weight, if it has one: made of the same columns in the same order."""
    names = [f"{view.source.removesuffix('weight')}bias" for view in tensor.views]
    if names[0] in shapes:
        columns = (Region(view.region.offsets[-1:], view.region.extents[-1:]) for view in tensor.views)
        views = tuple(View(name, region, (0,)) for name, region in zip(names, columns, strict=True))
        copy_of = None if tensor.copy_of is None else tensor.copy_of + BIAS
        yield ConventionTensor(tensor.role + BIAS, tensor.block, views, copy_of=copy_of)


def _adjacent_pairs(view: View, size: int) -> Iterator[View]:
    """Yield the columns of heads of a size, with each rotary pair (i, i + size/2) in adjacent columns."""
    for start in range(0, view.shape[1], size):
        for first in range(start, start + size // 2):
            yield from (view.sliced(1, column, column + 1) for column in (first, first + size // 2))


class _Describer:
    def __init__(self, model: ModelSpec, shapes: Shapes, convention: Convention, ffn_shards: Mapping[str, int]) -> None:
        self.model, self.shapes, self.convention, self.ffn_shards = model, shapes, convention, ffn_shards
        prefixes = [name.removesuffix(".weight") for name in shapes if name.endswith(".weight")]
        self._weights_below = grouped((name.rpartition(".")[0] or name, f"{name}.weight") for name in prefixes)
        self._regions: dict[tuple[object, ...], list[Region]] = {}

    def tensors(self) -> Iterator[ConventionTensor]:
        model = self.model
        yield ConventionTensor("embed", "", (self._table("embed"),))
        yield from self._others("", "embed", {"embed.weight"})
        for number in range(model.num_layers):
            yield from self._block(f"layer.{number}", has_experts=model.has_experts(number))
        modules = [f"mtp.{number}" for number in range(0 if model.mtp is None else model.mtp.num_modules)]
        for name in modules:
            norms = {f"{norm}_norm": f"{name}.{norm}_norm.weight" for norm in ("hidden", "embed")}
            yield from self._as_it_is(name, norms)
            yield from self._projection(name)
            yield from self._block(name, has_experts=model.has_experts(model.num_layers - 1))
            yield from self._streams(name, "out_streams", f"{name}.out_streams")
        contraction = "mtp.0.main" if model.modules_read_streams else f"layer.{model.num_layers - 1}.out"
        yield from self._streams("", "out_streams", f"{contraction}_streams")
        yield from self._as_it_is("", {"norm": "norm.weight"})
        if not model.tied_embedding:
            yield ConventionTensor("head", "", (self._table("head"),))
        elif self.convention.has_tied_head:
            yield ConventionTensor("head", "", (self._table("embed"),), copy_of="embed")
        head = "embed" if model.tied_embedding else "head"
        for name in modules:
            for role, of in (("module_embed", "embed"), ("module_norm", "norm"), ("module_head", head)):
                if f"{name}.{of}.weight" in self.shapes:
                    yield ConventionTensor(role, name, (self._table(of, f"{name}."),))
                elif role in self.convention.module:
                    yield ConventionTensor(role, name, (self._table(of),), copy_of=of)

    def _projection(self, module: str) -> Iterator[ConventionTensor]:
        """Yield the weights of the hidden state and of the embedding."""
        if self.model.modules_read_streams:
            weights = {f"{part}_proj": f"{module}.{part}_proj.weight" for part in ("hidden", "embed")}
            yield from self._as_it_is(module, weights)
            return
        # Most others have the embedding first, and then the hidden state.
        proj, size = self._view(f"{module}.proj.weight"), self.model.hidden_size
        hidden, embedded = (proj.sliced(0, position * size, (position + 1) * size) for position in (0, 1))
        halves = (hidden, embedded) if self.convention.hidden_first else (embedded, hidden)
        yield ConventionTensor("proj", module, halves, along=0)

    def _view(self, name: str) -> View:
        return whole_view(name, self.shapes[name])

    def _table(self, end: str, module: str = "") -> View:
        """Return embedding, last norm or head, without the padding of the vocabulary if the convention has none."""
        view = self._view(f"{module}{end}.weight")
        if end == "norm" or self.convention.padded:
            return view
        return view.sliced(0 if end == "embed" else 1, 0, self.model.num_token_ids)

    def _as_it_is(self, block: str, names: Mapping[str, str]) -> Iterator[ConventionTensor]:
        for role, name in names.items():
            yield ConventionTensor(role, block, (self._view(name),))

    def _others(self, block: str, prefix: str, done: AbstractSet[str]) -> Iterator[ConventionTensor]:
        """Yield the other weights below a name as they are; the role is the end of the weight's name."""
        for weight in self._weights_below.get(prefix, ()):
            if weight not in done:
                yield from self._as_it_is(block, {weight.split(".")[-2]: weight})

    def _block(self, name: str, *, has_experts: bool) -> Iterator[ConventionTensor]:
        for sub_layer in ("attn", "mlp"):
            yield from self._streams(name, f"{sub_layer}_streams", f"{name}.{sub_layer}_streams")
        yield from self._as_it_is(name, {"attn_norm": f"{name}.attn_norm.weight"})
        attention = list(self._attention(name))
        yield from attention
        norm, out = "experts_norm" if has_experts else "mlp_norm", f"{name}.attn.out.weight"
        done = {out, *(view.source for each in attention for view in each.views)}
        yield from self._others(name, f"{name}.attn", done)
        yield from self._as_it_is(name, {norm: f"{name}.mlp_norm.weight", "out": out})
        if not has_experts:
            yield from self._mlp(name, "", f"{name}.mlp")
            return
        moe = self.model.moe
        assert moe is not None
        routers = (f"{name}.mlp.{router}.weight" for router in ("router", "hash_router"))
        yield from self._as_it_is(name, {"router": next(router for router in routers if router in self.shapes)})
        for expert in range(moe.num_experts):
            yield from self._mlp(name, "expert_", f"{name}.mlp.experts", expert)
        if moe.num_shared_experts:
            yield from self._mlp(name, "shared_", f"{name}.mlp.shared")

    def _streams(self, block: str, role: str, name: str) -> Iterator[ConventionTensor]:
        if f"{name}.weight" in self.shapes:
            yield from self._as_it_is(block, {role: f"{name}.weight", f"{role}_scale": f"{name}.scale"})

    def _attention(self, name: str) -> Iterator[ConventionTensor]:
        if self.model.compressed_attention is not None:
            yield from self._compressed_attention(name)
        elif self.model.mla is not None:
            yield from self._latent_attention(name)
        else:
            yield from self._whole_attention(name)

    def _compressed_attention(self, name: str) -> Iterator[ConventionTensor]:
        """Yield the products of groups of heads, one below the other, and the weights of compressed entries."""
        groups = f"{name}.attn.groups.weight"
        shape = self.shapes[groups]
        yield ConventionTensor("groups", name, tuple(expert_of(groups, shape, n) for n in range(shape[0])), along=1)
        for part in ("compressor", "indexer"):
            for weight in self._weights_below.get(f"{name}.attn.{part}", ()):
                yield from self._as_it_is(name, {f"{part}_{weight.split('.')[-2]}": weight})

    def _whole_attention(self, name: str) -> Iterator[ConventionTensor]:
        """Yield queries, keys and values.

        The fused weight has for each head of keys and values its queries, its key and its value.
        """
        fused, model = self._view(f"{name}.attn.qkv.weight"), self.model
        if "qkv" in self.convention.block:
            yield ConventionTensor("qkv", name, (fused,), along=1)
            return
        size = model.size_of_head
        queries = model.num_heads // model.kv_heads * size
        group = queries + 2 * size
        parts = {
            role: tuple(
                fused.sliced(1, number * group + start, number * group + start + width)
                for number in range(model.kv_heads)
            )
            for role, start, width in (("q", 0, queries), ("k", queries, size), ("v", queries + size, size))
        }
        if self.convention.rotary_pairs:
            parts |= {
                role: tuple(column for view in parts[role] for column in _adjacent_pairs(view, size))
                for role in ("q", "k")
            }
        if "qkv_by_kind" in self.convention.block:
            parts = {"qkv_by_kind": tuple(view for views in parts.values() for view in views)}
        for role, views in parts.items():
            yield ConventionTensor(role, name, views, along=1)

    def _latent_attention(self, name: str) -> Iterator[ConventionTensor]:
        mla, heads, position = self.model.mla, self.model.num_heads, f"{name}.attn"
        assert mla is not None
        head = [("as it is", mla.nope_head_size), ("turned", mla.rope_head_size)]
        if mla.q_rank is None:
            yield ConventionTensor("q_whole", name, self._interleaved(f"{position}.q.weight", head * heads), along=1)
        else:
            yield from self._as_it_is(
                name, {"q_down": f"{position}.q_down.weight", "q_norm": f"{position}.q_norm.weight"}
            )
            yield ConventionTensor("q_up", name, self._interleaved(f"{position}.q_up.weight", head * heads), along=1)
        down = [("as it is", mla.kv_rank), ("turned", mla.rope_head_size)]
        yield ConventionTensor("kv_down", name, self._interleaved(f"{position}.kv_down.weight", down), along=1)
        yield from self._as_it_is(name, {"kv_norm": f"{position}.kv_norm.weight", "kv_up": f"{position}.kv_up.weight"})

    def _interleaved(self, name: str, pieces: Sequence[tuple[str, int]]) -> tuple[View, ...]:
        """Return the columns of a weight, with the columns of rotary positions in adjacent pairs.

        Pair i of R rotated elements is (i, i + R/2) in this convention, and (2 i, 2 i + 1) in all other models with
        latent attention: DeepSeek's, and Megatron-Core's, which reads them.
        """
        view, position = self._view(name), 0
        key = view.shape, tuple(pieces)
        if key not in self._regions:
            entries = self._regions[key] = []
            for kind, width in pieces:
                piece = view.sliced(1, position, position + width)
                entries += [each.region for each in (_adjacent_pairs(piece, width) if kind == "turned" else [piece])]
                position += width
        return tuple([View(name, region, view.dims) for region in self._regions[key]])

    def _mlp(self, block: str, role: str, name: str, expert: int | None = None) -> Iterator[ConventionTensor]:
        parts = [part for part in ("gate", "up", "down") if f"{name}.{part}.weight" in self.shapes]

        def view_of(weight: str) -> View:
            return self._view(weight) if expert is None else expert_of(weight, self.shapes[weight], expert)

        views = {part: view_of(f"{name}.{part}.weight") for part in parts}
        fused = f"{role}gate_up"
        if "gate" in views and fused in self.convention.block:
            gate, up = views.pop("gate"), views.pop("up")
            fused_name = self.convention.name_of(fused, block, self.model.num_layers, expert)
            shards = self.ffn_shards.get(fused_name, 1) if fused in self.convention.fused_by_rank else 1
            width = gate.shape[1] // shards
            cuts = [(shard * width, (shard + 1) * width) for shard in range(shards)]
            yield ConventionTensor(
                fused, block, tuple(view.sliced(1, *bounds) for bounds in cuts for view in (gate, up)), 1, expert
            )
        for part, view in views.items():
            yield ConventionTensor(f"{role}{part}", block, (view,), expert=expert)
