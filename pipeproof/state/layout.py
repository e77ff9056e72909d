"""Which parts of which tensors a rank has of a plan's state, and which rank writes each: from the plan alone.

Of ranks that hold the same part the first one writes it. A rank's number grows
with each of its coordinates, so the first one is at 0 on every axis along which
the part is the same: nobody is searched for, and the work is that of the pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from pipeproof.comm.held import index_of
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.stages.describe.balance import bias_name, moves_biases, routers
from pipeproof.stages.describe.layers import Buffer, Parameter, loss_dtype
from pipeproof.stages.describe.shares import num_shares, share_range
from pipeproof.state.boxes import whole_box
from pipeproof.state.index import Cut, Shard, TensorEntry

MOMENTS = {"sgd": (), "adamw": ("moment1", "moment2")}
"""By optimizer, what it keeps of the shape of a weight."""
COUNTERS: dict[str, dict[str, tuple[str, ...]]] = {
    "sgd": {"paddle": (), "torch": ()},
    "adamw": {"paddle": ("beta1_power", "beta2_power"), "torch": ("step",)},
}
"""By optimizer and framework, what it keeps beside: of each weight a number."""
COUNTERS_AT_FIRST = {"beta1_power": 0.9, "beta2_power": 0.999, "step": 0.0}
"""What the frameworks' counters begin with: Paddle's are the powers for the step to come, of the betas of all runs."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One part of the state on one rank.

    ``weight`` and ``slot`` say where it is there: a weight itself (no slot), what the optimizer keeps of it (the
    slot's name), the bias of the router ``weight`` (slot ``bias``), or the buffer ``weight`` of an own layer (no
    slot). ``writer`` is the rank that writes it.
    """

    weight: str
    slot: str
    tensor: TensorEntry
    shard: Shard
    writer: int

    @property
    def shape(self) -> tuple[int, ...]:
        """What the rank has.

        A counter is a number, whatever dims a framework gives it; a buffer has the replicas as a dim before its own,
        where there are several.
        """
        return self.shard.shape


def moment_name(weight: str, slot: str) -> str:
    """The name of what the optimizer keeps of a weight."""
    return f"optimizer/{slot}/{weight}"


def file_name(rank: int) -> str:
    """The file that a rank writes."""
    return f"rank{rank}.safetensors"


def pieces_of(plan: LoweredPlan, rank: int) -> Iterator[Piece]:
    """What a rank has of the state, in the order of its stages."""
    return _pieces(_kinds(plan, plan.mesh.coords(rank)["pp"]), plan, rank)


def files_of(plan: LoweredPlan) -> dict[str, tuple[Shard, ...]]:
    """By file what its rank writes, in the order of ``pieces_of``; some ranks write nothing into theirs."""
    files: dict[str, list[Shard]] = {file_name(rank): [] for rank in range(plan.mesh.num_ranks)}
    alike: dict[tuple[object, ...], list[tuple[int, Shard]]] = {}
    for pp in range(plan.mesh.size("pp")):
        first = plan.mesh.rank({**dict.fromkeys(plan.mesh.axes, 0), "pp": pp})
        for kind in _kinds(plan, pp):
            if kind.first_pp != pp:
                continue
            cut = tuple((kind.tensor.cut or {}).items())
            key = kind.tensor.kind, kind.tensor.shape, kind.parameter and kind.parameter.shape, cut
            if key not in alike:  # layers have the same ones: worked out once, and counted from the stage's first rank
                alike[key] = [(rank - first, piece.shard) for rank, piece in _written(plan, kind)]
            for beyond, shard in alike[key]:
                files[file_name(first + beyond)].append(shard.model_copy(update={"tensor": kind.name}))
    return {name: tuple(shards) for name, shards in files.items()}


def _written(plan: LoweredPlan, kind: _Kind) -> Iterator[tuple[int, Piece]]:
    """The parts of a tensor, each with its writer."""
    counts = [
        range(size if axis in (kind.tensor.cut or ()) else 1)
        for axis, size in zip(plan.mesh.axes, plan.mesh.sizes, strict=True)
    ]
    for place in product(*counts):
        rank = plan.mesh.rank({**dict(zip(plan.mesh.axes, place, strict=True)), "pp": kind.first_pp})
        for piece in _pieces([kind], plan, rank):
            yield rank, piece


def whole_state(plan: LoweredPlan) -> dict[str, TensorEntry]:
    """The tensors of the plan's state by name."""
    return {kind.name: kind.tensor for pp in range(plan.mesh.size("pp")) for kind in _kinds(plan, pp)}


@dataclass(frozen=True, slots=True)
class _Kind:
    """A tensor that all ranks at one place of the pipeline have, whole or cut.

    ``parameter`` is the weight that it is, or of which it is. ``first_pp`` is the first pipeline rank that holds it.
    """

    weight: str
    slot: str
    name: str
    tensor: TensorEntry
    parameter: Parameter | None
    first_pp: int


def _kinds(plan: LoweredPlan, pp: int) -> Iterator[_Kind]:
    """What ranks at one place of the pipeline have, in their order."""
    seen: set[str] = set()
    for stage, holders in enumerate(plan.holders):
        if pp not in holders:
            continue
        for parameter in plan.weights_of(stage, pp):
            if parameter.name not in seen:
                seen.add(parameter.name)
                yield from _kinds_of_weight(plan, parameter, min(plan.shared_weights.places(stage, parameter.name)))
        for name in routers(plan.layers_of(stage)) if moves_biases(plan.spec) else ():
            yield _Kind(name, "bias", bias_name(name), _bias(plan), None, holders[0])
        for layer in plan.layers_of(stage):
            for buffer in layer.buffers:
                yield _Kind(buffer.name, "", buffer.name, _buffer(plan, buffer), None, holders[0])


def _kinds_of_weight(plan: LoweredPlan, parameter: Parameter, first_pp: int) -> Iterator[_Kind]:
    run, name = plan.spec.run, parameter.name
    dims = {"tp": parameter.tp.dim, "ep": parameter.ep.dim}
    cut: Cut = {axis: dim for axis, dim in dims.items() if dim is not None and plan.mesh.size(axis) > 1}
    whole = TensorEntry(kind="weight", dtype=run.weight_dtype, shape=parameter.shape, cut=cut)
    yield _Kind(name, "", name, whole, parameter, first_pp)
    cut_of_moment: Cut = {**cut, "dp": "flat"} if num_shares(plan.spec) > 1 else cut
    moment = whole.model_copy(update={"kind": "moment", "weight": name, "cut": cut_of_moment})
    for slot in MOMENTS[run.optimizer]:
        yield _Kind(name, slot, moment_name(name, slot), moment, parameter, first_pp)
    dtype = "float32" if run.backend == "torch" else run.weight_dtype
    counter = TensorEntry(kind="counter", dtype=dtype, shape=(), weight=name, cut={})
    for slot in COUNTERS[run.optimizer][run.backend]:
        yield _Kind(name, slot, moment_name(name, slot), counter, parameter, first_pp)


def _bias(plan: LoweredPlan) -> TensorEntry:
    run, moe = plan.spec.run, plan.spec.model.moe
    assert moe is not None
    return TensorEntry(kind="expert_bias", dtype=loss_dtype(run.dtype) or run.dtype, shape=(moe.num_experts,), cut={})


def _buffer(plan: LoweredPlan, buffer: Buffer) -> TensorEntry:
    """Each replica's own; one alone has it as the layer does."""
    replicas = plan.mesh.size("dp")
    if replicas == 1:
        return TensorEntry(kind="buffer", dtype=buffer.dtype, shape=buffer.shape, cut={})
    return TensorEntry(kind="buffer", dtype=buffer.dtype, shape=(replicas, *buffer.shape), cut={"dp": 0})


def buffer_of_copies(plan: LoweredPlan) -> str | None:
    """The first buffer of a stage that stands on several pipeline ranks: each changes it by other micro-batches."""
    return next(
        (
            buffer.name
            for stage, holders in enumerate(plan.holders)
            if len(holders) > 1
            for layer in plan.layers_of(stage)
            for buffer in layer.buffers
        ),
        None,
    )


def words_of_copies(buffer: str, schedule: str) -> tuple[str, str]:
    """What is wrong with such a buffer, and what can be done."""
    message = f"{schedule} has copies of the stage of `{buffer}`, and each changes it by its own micro-batches"
    return f"{message}: no state has both", "use a schedule with one copy of each stage, such as 1f1b or interleaved"


def _pieces(kinds: Iterable[_Kind], plan: LoweredPlan, rank: int) -> Iterator[Piece]:
    coords, shares = plan.mesh.coords(rank), num_shares(plan.spec)
    for kind in kinds:
        tensor, flat = kind.tensor, None
        offsets, extents = whole_box(tensor.shape)
        if tensor.kind == "buffer" and tensor.cut:
            offsets, extents = (coords["dp"], *offsets[1:]), (1, *extents[1:])
        if kind.parameter is not None:
            box = index_of(plan, kind.parameter, rank)
            if tensor.kind != "counter":
                offsets, extents = tuple(start for start, _ in box), tuple(stop - start for start, stop in box)
            if shares > 1 and kind.slot:
                share = share_range(prod(stop - start for start, stop in box), shares, coords["dp"])
                if share[0] == share[1]:
                    continue  # the last shares of a small weight are empty, and have no state
                flat = share if tensor.kind == "moment" else None
        shard = Shard(tensor=kind.name, offsets=offsets, extents=extents, flat=flat)
        yield Piece(kind.weight, kind.slot, tensor, shard, _writer(plan, kind, coords))


def _writer(plan: LoweredPlan, kind: _Kind, coords: Mapping[str, int]) -> int:
    """The first rank that holds the same part."""
    same = {axis: coords[axis] if axis in (kind.tensor.cut or ()) else 0 for axis in plan.mesh.axes}
    return plan.mesh.rank({**same, "pp": kind.first_pp})
