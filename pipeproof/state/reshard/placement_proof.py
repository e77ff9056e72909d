"""Proof that each rank of a plan saves what it computes with: layers on their stages, shards as the rank holds them."""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.comm.lowered_plan import LoweredPlan
from pipeproof.comm.weight_ranges import index_of
from pipeproof.diagnostics.finding import Finding
from pipeproof.stages.describe.balance import bias_name, moves_biases, routers
from pipeproof.stages.describe.layer import Parameter
from pipeproof.state.checkpoint import HeldShard
from pipeproof.state.region_text import and_more, range_text
from pipeproof.state.regions import Region
from pipeproof.state.reshard.reshard_codes import TENSOR_MISMATCH
from pipeproof.state.reshard.shard_layout import ShardLayout
from pipeproof.verify.layouts.index_maps import OTHER_INDICES


def check_placement(layout: ShardLayout) -> Iterator[Finding]:
    """PP213 for a tensor that is not where its layer is, PP211 for a shard that is not the rank's own.

    A layout without a plan has no findings.
    """
    plan = layout.plan
    if plan is None:
        return
    weights = {weight.name for layer in plan.layers for weight in layer.parameters}
    missing = sorted(weights - layout.tensors.keys())
    if missing:
        message = f"no rank of {layout.name} has `{missing[0]}`{and_more(len(missing) - 1, 'tensor')}"
        yield TENSOR_MISMATCH.finding(message, help="put every layer on a stage")
    unused, shifted = _misplaced(layout, plan)
    if unused:
        name, held = unused[0]
        message = f"{held.where} of {layout.name} holds `{name}`, and computes with no layer that has it"
        message += and_more(len(unused) - 1, "shard")
        yield TENSOR_MISMATCH.finding(message, help="hold a tensor where its layer's stage is")
    if shifted:
        name, held, own_region = shifted[0]
        shape = layout.tensors[name].shape
        held_range = range_text(Region(held.shard.offsets, held.shard.extents), shape)
        message = f"{held.where} of {layout.name} computes with `{name}` {range_text(own_region, shape)}, "
        message += f"and its shard is listed as {held_range}{and_more(len(shifted) - 1, 'shard')}"
        fix = "a rank's shard begins at its own index among the ranks that shard the tensor"
        yield OTHER_INDICES.finding(message, help=fix)


def _misplaced(
    layout: ShardLayout, plan: LoweredPlan
) -> tuple[list[tuple[str, HeldShard]], list[tuple[str, HeldShard, Region]]]:
    """Return shards that their rank does not use, and shards that differ from the rank's own."""
    used = [_used_by(plan, pp) for pp in range(plan.mesh.size("pp"))]
    coords = [plan.mesh.coords(rank) for rank in range(plan.mesh.num_ranks)]
    own_of: dict[tuple[str, int, int], Region] = {}
    unused, shifted = list[tuple[str, HeldShard]](), list[tuple[str, HeldShard, Region]]()
    for name, shards in layout.shards.items():
        tensor = layout.tensors[name]
        weight = tensor.weight or name
        for held in shards:
            if held.rank is None:
                continue
            coordinates = coords[held.rank]
            if weight not in used[coordinates["pp"]]:
                unused.append((name, held))
                continue
            parameter = used[coordinates["pp"]][weight]
            if tensor.kind == "buffer" and tensor.cut and held.shard.offsets[0] != coordinates["dp"]:
                shifted.append((name, held, _replica_region(tensor.shape, coordinates["dp"])))
            if parameter is None or tensor.kind == "counter":
                continue
            key = weight, coordinates["tp"], coordinates["ep"]
            own_region = own_of.get(key) or own_of.setdefault(key, _own_region(plan, parameter, held.rank))
            if (held.shard.offsets, held.shard.extents) != own_region:
                shifted.append((name, held, own_region))
    return unused, shifted


def _used_by(plan: LoweredPlan, pp: int) -> dict[str, Parameter | None]:
    """Return the tensors that one pipeline rank index computes with, by name; biases and buffers have no parameter."""
    layers = [layer for stage, holders in enumerate(plan.holders) if pp in holders for layer in plan.layers_of(stage)]
    used: dict[str, Parameter | None] = {
        weight.name: weight for layer in layers for weight in (*layer.parameters, *layer.borrowed)
    }
    if moves_biases(plan.spec):
        used |= dict.fromkeys(map(bias_name, routers(layers)))
    return used | {buffer.name: None for layer in layers for buffer in layer.buffers}


def _replica_region(shape: tuple[int, ...], replica: int) -> Region:
    """Return the region of a buffer that belongs to one data-parallel replica."""
    return Region((replica, *(0 for _ in shape[1:])), (1, *shape[1:]))


def _own_region(plan: LoweredPlan, parameter: Parameter, rank: int) -> Region:
    index = index_of(plan, parameter, rank)
    return Region(tuple(start for start, _ in index), tuple(stop - start for start, stop in index))
