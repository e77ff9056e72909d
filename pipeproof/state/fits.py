"""Whether a state on disk is what a plan can go on from: looked at wholly before anything is loaded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.state.boxes import Box, meet
from pipeproof.state.codes import StateError
from pipeproof.state.files import require_whole
from pipeproof.state.index import INDEX_FILE, TensorEntry
from pipeproof.state.layout import pieces_of, whole_state
from pipeproof.state.load import SavedState
from pipeproof.state.parts import shards_of
from pipeproof.state.reshard.tiling import cut_fault
from pipeproof.state.training import require_same_training

_HASHED_AT_ONCE = 4
_CHANGED = "the index was changed, or another release of pipeproof wrote it: name another state"
_OTHER_WEIGHTS = (
    "give `model` and `run` of the plan the sizes, parts and type of these weights, or make the state anew for the "
    "plan: `pipeproof reshard CHECKPOINT --to PLAN --weights-only -o DIR`"
)


def require_fits(state: SavedState, plan: LoweredPlan, digest: str) -> None:
    """Refuse a state that training by the plan does not go on from, or that is not whole, before anything is loaded.

    The topology that it was saved on does not matter. ``digest`` is the plan's.

    Raises:
        StateError: it was saved by another framework or with other values, it is behind the last step already, a file
            is missing, cut short or changed, a tensor is missing, too many, or not as the plan has it, or an element
            that a rank needs stands nowhere or in several places.
    """
    index, run = state.index, plan.spec.run
    require_same_training(index, plan, digest)
    if index.steps_done >= run.steps:
        raise StateError(
            f"{state.directory} is the state after step {index.steps_done - 1}, and the plan has {run.steps} steps",
            f"give run.steps more than {index.steps_done}",
        )
    _require_tensors(state, plan)
    _require_parts(state, plan)
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:  # hashing lets other threads run
        list(pool.map(lambda file: require_whole(state.directory, file, index.tensors), index.files))


def _require_tensors(state: SavedState, plan: LoweredPlan) -> None:
    """The state has the plan's tensors, each as the plan has it, and no others."""
    wanted, found, weights_only = whole_state(plan), state.index.tensors, state.index.is_weights_only
    faults = [
        f"{_needs(plan, name)}, {_shown(one)}; it is {there}"
        for name, one in wanted.items()
        if (there := _there(one, found.get(name), weights_only=weights_only)) is not None
    ]
    faults += [
        f"it has {name}, {_shown(one)}, and the plan has no tensor of that name"
        for name, one in found.items()
        if name not in wanted
    ]
    if faults:
        more = f"; {len(faults) - 1} more tensors are not as the plan has them" if len(faults) > 1 else ""
        raise StateError(
            f"{state.directory / INDEX_FILE}: {faults[0]}{more}", _OTHER_WEIGHTS if weights_only else _CHANGED
        )


def _there(wanted: TensorEntry, found: TensorEntry | None, *, weights_only: bool) -> str | None:
    """What is there in place of a tensor; None where that is right. Beside weights there need be nothing at first."""
    if found is None:
        return None if weights_only and wanted.kind != "weight" else "not there"
    return None if wanted.is_same(found) else f"there as {_shown(found)}"


def _require_parts(state: SavedState, plan: LoweredPlan) -> None:
    """Every element of every tensor stands in one part."""
    held = shards_of(state.index)
    for name, tensor in state.index.tensors.items():
        parts = held.get(name, [])
        fault = cut_fault(tensor.shape, [shard for shard, _ in parts])
        if fault is None:
            continue
        files = sorted({parts[number][1].name for number in fault.holders})
        if fault.times == 1:
            where = f"{list(fault.box.extents)} from {list(fault.box.offsets)} on"
            what = f"{files[0]} is to have {where} of {name}, whose shape is {list(tensor.shape)}"
        elif fault.times:
            what = f"{_needs(plan, name, fault.box)}; {' and '.join(files)} have that part, {fault.times} times in all"
        else:
            what = f"{_needs(plan, name, fault.box)}; no file has that part"
        raise StateError(f"{state.directory / INDEX_FILE}: {what}", _CHANGED)


def _needs(plan: LoweredPlan, name: str, box: Box | None = None) -> str:
    """The first rank that has a tensor, or that box of it, and what it needs of it."""
    for rank in range(plan.mesh.num_ranks):
        for piece in pieces_of(plan, rank):
            if piece.shard.tensor == name:
                for _, own in piece.shard.boxes():
                    common = own if box is None else meet(own, box)
                    if common is not None:
                        where = f"{list(common.extents)} from {list(common.offsets)} on"
                        return f"rank {rank} needs {where} of {name}"
    raise AssertionError(f"no rank has {name}, which is of the plan's whole state")


def _shown(one: TensorEntry) -> str:
    return f"{one.kind}, {one.dtype} {list(one.shape)}"
