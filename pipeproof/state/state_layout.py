"""The shards of a plan's state on each rank, and the rank that writes each one: from the plan alone.

If several ranks hold the same shard, the first one writes it. A rank's number grows with each of its coordinates, so
the first one is at 0 on every axis along which the shard is the same. No search is needed, and the work is proportional
to the number of shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from pipeproof.comm.op_graph import LoweredPlan, index_of
from pipeproof.stages.describe.gradient_facts import bias_name, moves_biases, routers
from pipeproof.stages.describe.layer import Parameter, loss_dtype
from pipeproof.stages.describe.stage_memory import num_shards, shard_range, shards_weights
from pipeproof.state.regions import whole_region
from pipeproof.state.state_index import Shard, Sharding, TensorEntry

MOMENTS = {"sgd": (), "adamw": ("moment1", "moment2")}
"""States of each optimizer that have the shape of a weight."""
COUNTERS: dict[str, dict[str, tuple[str, ...]]] = {
    "sgd": {"paddle": (), "torch": ()},
    "adamw": {"paddle": ("beta1_power", "beta2_power"), "torch": ("step",)},
}
"""Scalar states of each weight, by optimizer and framework."""
INITIAL_COUNTERS = {"beta1_power": 0.9, "beta2_power": 0.999, "step": 0.0}
"""Initial values of the frameworks' counters.

Paddle's are the powers of the betas for the next step, the same in all runs.
"""


@dataclass(frozen=True, slots=True)
class RankShard:
    """One shard of the state on one rank.

    ``weight`` and ``slot`` are its key on the rank: a weight itself (no slot), an optimizer state of it (the slot's
    name), or the bias of the router ``weight`` (slot ``bias``).
    ``writer`` is the rank that writes it.
    """

    weight: str
    slot: str
    tensor: TensorEntry
    shard: Shard
    writer: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the values on the rank.

        A counter is a scalar, even if a framework gives it a dim.
        """
        return self.shard.shape


def moment_name(weight: str, slot: str) -> str:
    """Return the name of an optimizer state of a weight."""
    return f"optimizer/{slot}/{weight}"


def file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"rank{rank}.safetensors"


def shards_of_rank(plan: LoweredPlan, rank: int) -> Iterator[RankShard]:
    """Yield the shards of the state on a rank, in the order of its stages."""
    return _shards(_state_tensors(plan, plan.mesh.coords(rank)["pp"]), plan, rank)


def files_of(plan: LoweredPlan) -> dict[str, tuple[Shard, ...]]:
    """Return the shards that each file holds, in the order of ``shards_of_rank``; some ranks write no shard."""
    files: dict[str, list[Shard]] = {file_name(rank): [] for rank in range(plan.mesh.num_ranks)}
    by_layout: dict[tuple[object, ...], list[tuple[int, Shard]]] = {}
    for pp in range(plan.mesh.size("pp")):
        first = plan.mesh.rank({**dict.fromkeys(plan.mesh.axes, 0), "pp": pp})
        for state_tensor in _state_tensors(plan, pp):
            if state_tensor.first_pp != pp:
                continue
            tensor, weight = state_tensor.tensor, state_tensor.parameter
            key = tensor.kind, tensor.shape, weight and weight.shape, tuple((tensor.cut or {}).items())
            if key not in by_layout:  # layers have the same: computed once, counted from the first rank
                by_layout[key] = [(rank - first, written.shard) for rank, written in _written(plan, state_tensor)]
            for beyond, shard in by_layout[key]:
                files[file_name(first + beyond)].append(shard.model_copy(update={"tensor": state_tensor.name}))
    return {name: tuple(shards) for name, shards in files.items()}


def _written(plan: LoweredPlan, state_tensor: _StateTensor) -> Iterator[tuple[int, RankShard]]:
    """Yield the shards of a tensor, each with its writer."""
    counts = [
        range(size if axis in (state_tensor.tensor.cut or ()) else 1)
        for axis, size in zip(plan.mesh.axes, plan.mesh.sizes, strict=True)
    ]
    for coordinates in product(*counts):
        rank = plan.mesh.rank({**dict(zip(plan.mesh.axes, coordinates, strict=True)), "pp": state_tensor.first_pp})
        for shard_of_rank in _shards([state_tensor], plan, rank):
            yield rank, shard_of_rank


def whole_state(plan: LoweredPlan) -> dict[str, TensorEntry]:
    """Return the tensors of the plan's state by name."""
    return {
        state_tensor.name: state_tensor.tensor
        for pp in range(plan.mesh.size("pp"))
        for state_tensor in _state_tensors(plan, pp)
    }


@dataclass(frozen=True, slots=True)
class _StateTensor:
    """A tensor that all ranks of one pipeline rank index hold, whole or sharded.

    ``parameter`` is the weight that it is or belongs to. ``first_pp`` is the first pipeline rank index that holds it.
    """

    weight: str
    slot: str
    name: str
    tensor: TensorEntry
    parameter: Parameter | None
    first_pp: int


def _state_tensors(plan: LoweredPlan, pp: int) -> Iterator[_StateTensor]:
    """Yield the tensors of one pipeline rank index, in order."""
    seen: set[str] = set()
    for stage, holders in enumerate(plan.holders):
        if pp not in holders:
            continue
        for parameter in plan.weights_of(stage, pp):
            if parameter.name not in seen:
                seen.add(parameter.name)
                yield from _tensors_of_weight(plan, parameter, min(plan.shared_weights.places(stage, parameter.name)))
        for name in routers(plan.layers_of(stage)) if moves_biases(plan.spec) else ():
            yield _StateTensor(name, "bias", bias_name(name), _bias(plan), None, holders[0])


def _tensors_of_weight(plan: LoweredPlan, parameter: Parameter, first_pp: int) -> Iterator[_StateTensor]:
    run, name = plan.spec.run, parameter.name
    dims = {"tp": parameter.tp.dim, "ep": parameter.ep.dim}
    cut: Sharding = {axis: dim for axis, dim in dims.items() if dim is not None and plan.mesh.size(axis) > 1}
    flat: Sharding = {**cut, "dp": "flat"}
    cut_of_weight = flat if shards_weights(plan.spec) else cut
    whole = TensorEntry(kind="weight", dtype=run.weight_dtype, shape=parameter.shape, cut=cut_of_weight)
    yield _StateTensor(name, "", name, whole, parameter, first_pp)
    cut_of_moment = flat if num_shards(plan.spec) > 1 else cut
    moment = whole.model_copy(update={"kind": "moment", "weight": name, "cut": cut_of_moment})
    for slot in MOMENTS[run.optimizer]:
        yield _StateTensor(name, slot, moment_name(name, slot), moment, parameter, first_pp)
    dtype = "float32" if run.backend == "torch" else run.weight_dtype
    counter = TensorEntry(kind="counter", dtype=dtype, shape=(), weight=name, cut={})
    for slot in COUNTERS[run.optimizer][run.backend]:
        yield _StateTensor(name, slot, moment_name(name, slot), counter, parameter, first_pp)


def _bias(plan: LoweredPlan) -> TensorEntry:
    run, moe = plan.spec.run, plan.spec.model.moe
    assert moe is not None
    return TensorEntry(kind="expert_bias", dtype=loss_dtype(run.dtype) or run.dtype, shape=(moe.num_experts,), cut={})


def _shards(tensors: Iterable[_StateTensor], plan: LoweredPlan, rank: int) -> Iterator[RankShard]:
    coords, shares = plan.mesh.coords(rank), num_shards(plan.spec)
    for state_tensor in tensors:
        tensor, flat = state_tensor.tensor, None
        offsets, extents = whole_region(tensor.shape)
        if state_tensor.parameter is not None:
            region = index_of(plan, state_tensor.parameter, rank)
            if tensor.kind != "counter":
                offsets, extents = tuple(start for start, _ in region), tuple(stop - start for start, stop in region)
            if shares > 1 and (state_tensor.slot or shards_weights(plan.spec)):
                share = shard_range(prod(stop - start for start, stop in region), shares, coords["dp"])
                if share[0] == share[1]:
                    continue  # the last shares of a small weight are empty, and have no state
                flat = share if tensor.kind != "counter" else None
        shard = Shard(tensor=state_tensor.name, offsets=offsets, extents=extents, flat=flat)
        yield RankShard(state_tensor.weight, state_tensor.slot, tensor, shard, _writer(plan, state_tensor, coords))


def _writer(plan: LoweredPlan, state_tensor: _StateTensor, coords: Mapping[str, int]) -> int:
    same = {axis: coords[axis] if axis in (state_tensor.tensor.cut or ()) else 0 for axis in plan.mesh.axes}
    return plan.mesh.rank({**same, "pp": state_tensor.first_pp})
