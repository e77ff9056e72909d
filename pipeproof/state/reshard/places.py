"""Whether what each rank of a plan saves is what it computes with: layers on their stages, cuts as they are held."""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.comm.held import index_of
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.specs.finding import Finding, Severity
from pipeproof.stages.describe.balance import bias_name, moves_biases, routers
from pipeproof.stages.describe.layers import Parameter
from pipeproof.state.boxes import Box
from pipeproof.state.reshard.codes import OTHER_TENSORS
from pipeproof.state.reshard.sides import HeldPart, Side
from pipeproof.state.reshard.words import and_more, box_words
from pipeproof.verify.layouts.maps import OTHER_INDICES


def places(side: Side) -> Iterator[Finding]:
    """PP213 for a tensor that is not where its layer is, PP211 for a part that a rank computes with as another one.

    Nothing of a side that is not of a plan.
    """
    plan = side.plan
    if plan is None:
        return
    weights = {weight.name for layer in plan.layers for weight in layer.parameters}
    missing = sorted(weights - side.tensors.keys())
    if missing:
        message = f"no rank of {side.name} has `{missing[0]}`{and_more(len(missing) - 1, 'tensor')}"
        yield Finding(OTHER_TENSORS.code, Severity.ERROR, message, help="put every layer on a stage")
    stray, shifted = _misplaced(side, plan)
    if stray:
        name, part = stray[0]
        message = f"{part.where} of {side.name} holds `{name}`, and computes with no layer that has it"
        message += and_more(len(stray) - 1, "part")
        yield Finding(OTHER_TENSORS.code, Severity.ERROR, message, help="a tensor is held where its layer's stage is")
    if shifted:
        name, part, own = shifted[0]
        shape = side.tensors[name].shape
        held = box_words(Box(part.shard.offsets, part.shard.extents), shape)
        message = (
            f"{part.where} of {side.name} computes with `{name}` {box_words(own, shape)}, and its part is said to "
        )
        message += f"be {held}{and_more(len(shifted) - 1, 'part')}"
        mend = "a rank's part begins at its own place among the ranks that cut the tensor"
        yield Finding(OTHER_INDICES.code, Severity.ERROR, message, help=mend)


def _misplaced(side: Side, plan: LoweredPlan) -> tuple[list[tuple[str, HeldPart]], list[tuple[str, HeldPart, Box]]]:
    """Parts of tensors that their rank has no use for, and parts that are not the rank's own."""
    used = [_used_at(plan, pp) for pp in range(plan.mesh.size("pp"))]
    coords = [plan.mesh.coords(rank) for rank in range(plan.mesh.num_ranks)]
    own_of: dict[tuple[str, int, int], Box] = {}
    stray, shifted = list[tuple[str, HeldPart]](), list[tuple[str, HeldPart, Box]]()
    for name, parts in side.parts.items():
        tensor = side.tensors[name]
        weight = tensor.weight or name
        for part in parts:
            if part.rank is None:
                continue
            at = coords[part.rank]
            if weight not in used[at["pp"]]:
                stray.append((name, part))
                continue
            parameter = used[at["pp"]][weight]
            if tensor.kind == "buffer" and tensor.cut and part.shard.offsets[0] != at["dp"]:
                shifted.append((name, part, _of_replica(tensor.shape, at["dp"])))
            if parameter is None or tensor.kind == "counter":
                continue
            key = weight, at["tp"], at["ep"]
            own = own_of.get(key) or own_of.setdefault(key, _own(plan, parameter, part.rank))
            if (part.shard.offsets, part.shard.extents) != own:
                shifted.append((name, part, own))
    return stray, shifted


def _used_at(plan: LoweredPlan, pp: int) -> dict[str, Parameter | None]:
    """What the ranks at one place of the pipeline compute with, by name; biases and buffers are no parameters."""
    layers = [layer for stage, holders in enumerate(plan.holders) if pp in holders for layer in plan.layers_of(stage)]
    used: dict[str, Parameter | None] = {
        weight.name: weight for layer in layers for weight in (*layer.parameters, *layer.borrowed)
    }
    if moves_biases(plan.spec):
        used |= dict.fromkeys(map(bias_name, routers(layers)))
    return used | {buffer.name: None for layer in layers for buffer in layer.buffers}


def _of_replica(shape: tuple[int, ...], replica: int) -> Box:
    """What one data-parallel replica has of a buffer."""
    return Box((replica, *(0 for _ in shape[1:])), (1, *shape[1:]))


def _own(plan: LoweredPlan, parameter: Parameter, rank: int) -> Box:
    index = index_of(plan, parameter, rank)
    return Box(tuple(start for start, _ in index), tuple(stop - start for start, stop in index))
