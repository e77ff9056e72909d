"""Which parts of which tensors a rank has of a plan's state, and which rank writes each: from the plan alone.

Of ranks that hold the same part the first one writes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from pipeproof.comm.held import index_of
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.stages.describe.balance import bias_name, moves_biases, routers
from pipeproof.stages.describe.layers import Parameter, loss_dtype
from pipeproof.stages.describe.shares import num_shares, share_range
from pipeproof.state.index import Shard, TensorEntry

MOMENTS = {"sgd": (), "adamw": ("moment1", "moment2")}
"""By optimizer, what it keeps of the shape of a weight."""
COUNTERS: dict[str, dict[str, tuple[str, ...]]] = {
    "sgd": {"paddle": (), "torch": ()},
    "adamw": {"paddle": ("beta1_power", "beta2_power"), "torch": ("step",)},
}
"""By optimizer and framework, what it keeps beside: of each weight a number."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One part of the state on one rank.

    ``weight`` and ``slot`` say where it is there: a weight itself (no slot), what the optimizer keeps of it (the
    slot's name), or the bias of the router ``weight`` (slot ``bias``). ``writer`` is the rank that writes it.
    """

    weight: str
    slot: str
    tensor: TensorEntry
    shard: Shard
    writer: int

    @property
    def shape(self) -> tuple[int, ...]:
        """What the rank has; a counter is a number, whatever dims a framework gives it."""
        return self.shard.shape


def moment_name(weight: str, slot: str) -> str:
    """The name of what the optimizer keeps of a weight."""
    return f"optimizer/{slot}/{weight}"


def pieces_of(plan: LoweredPlan, rank: int) -> Iterator[Piece]:
    """What a rank has of the state, in the order of its stages. The plan is one of a GPT."""
    seen: set[str] = set()
    for stage in plan.stages_of_rank(rank):
        for parameter in plan.weights_of(stage, plan.mesh.coords(rank)["pp"]):
            if parameter.name not in seen:
                seen.add(parameter.name)
                yield from _of_weight(plan, stage, parameter, rank)
        if moves_biases(plan.spec):
            for name in routers(plan.layers_of(stage)):
                yield _of_bias(plan, stage, name)


def whole_state(plan: LoweredPlan) -> dict[str, TensorEntry]:
    """The tensors of the plan's state by name."""
    pieces = (piece for rank in range(plan.mesh.num_ranks) for piece in pieces_of(plan, rank))
    return {piece.shard.tensor: piece.tensor for piece in pieces}


def _of_weight(plan: LoweredPlan, stage: int, parameter: Parameter, rank: int) -> Iterator[Piece]:
    run, name = plan.spec.run, parameter.name
    box = index_of(plan, parameter, rank)
    offsets, extents = tuple(start for start, _ in box), tuple(stop - start for start, stop in box)
    all_holders = plan.ranks_of_weight(stage, name)
    holders = [other for other in all_holders if index_of(plan, parameter, other) == box]
    whole = TensorEntry(kind="weight", dtype=run.weight_dtype, shape=parameter.shape)
    yield Piece(name, "", whole, Shard(tensor=name, offsets=offsets, extents=extents), holders[0])
    shares, place, flat = num_shares(plan.spec), plan.mesh.coords(rank)["dp"], None
    if shares > 1:
        flat = share_range(prod(extents), shares, place)
        holders = [other for other in holders if plan.mesh.coords(other)["dp"] == place]
        if flat[0] == flat[1]:  # the last shares of a small weight are empty, and have no state
            return
    for slot in MOMENTS[run.optimizer]:
        entry = whole.model_copy(update={"kind": "moment", "weight": name})
        shard = Shard(tensor=moment_name(name, slot), offsets=offsets, extents=extents, flat=flat)
        yield Piece(name, slot, entry, shard, holders[0])
    for slot in COUNTERS[run.optimizer][run.backend]:
        dtype = "float32" if run.backend == "torch" else run.weight_dtype
        entry = TensorEntry(kind="counter", dtype=dtype, shape=(), weight=name)
        yield Piece(name, slot, entry, Shard(tensor=moment_name(name, slot), offsets=(), extents=()), all_holders[0])


def _of_bias(plan: LoweredPlan, stage: int, experts: str) -> Piece:
    run, moe = plan.spec.run, plan.spec.model.moe
    assert moe is not None
    name, shape = bias_name(experts), (moe.num_experts,)
    dtype = loss_dtype(run.dtype) or run.dtype
    entry = TensorEntry(kind="expert_bias", dtype=dtype, shape=shape)
    shard = Shard(tensor=name, offsets=(0,), extents=shape)
    return Piece(experts, "bias", entry, shard, plan.ranks_of_stage(stage)[0])
