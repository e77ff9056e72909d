"""Checks that a plan can resume from a state on disk, before anything is loaded.

Weights start from the seed, and every draw is keyed by its purpose. So a step is the same mathematics on any topology
if all keys are equal that values depend on. The micro-batches of a step are counted over all data ranks: dp 2 with 4
each equals dp 4 with 2 each. If a step has other micro-batches, training continues, with a note.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from pydantic import JsonValue

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.finding import Finding
from pipeproof.state.byte_ranges import require_whole
from pipeproof.state.read_state import SavedState
from pipeproof.state.regions import Region, intersect
from pipeproof.state.reshard.shard_layout import bad_shardings, layout_of_files
from pipeproof.state.state_codes import DATA_CHANGES, StateError
from pipeproof.state.state_index import INDEX_FILE, DataPosition, StateIndex, TensorEntry
from pipeproof.state.state_layout import shards_of_rank, whole_state
from pipeproof.state.write_state import values_of

_HASHED_AT_ONCE = 4
_CHANGED = "the index was changed, or another release of pipeproof wrote it: name another state"
_OTHER_WEIGHTS = (
    "give `model` and `run` of the plan the sizes and type of these weights, or reshard the checkpoint for the "
    "plan: `pipeproof state reshard CHECKPOINT --to PLAN --weights-only -o DIR`"
)


def require_resumable(state: SavedState, plan: LoweredPlan, digest: str) -> str | None:
    """Refuse a state that the plan cannot resume from, or that is not whole, before anything is loaded.

    The topology that it was saved on does not matter. ``digest`` is the plan's. Return the first difference of the
    data, if a step gets other micro-batches.

    Raises:
        StateError: Another framework or other values saved it; it is at or after the last step; a file is missing, cut
            short or changed; a tensor is missing, unexpected, or differs from the plan; or an element is stored nowhere
            or in several places.
    """
    index, run = state.index, plan.spec.run
    changed = require_same_training(index, plan, digest)
    if index.steps_done >= run.steps:
        raise StateError(
            f"{state.directory} is the state after step {index.steps_done - 1}, and the plan has {run.steps} steps",
            f"give run.steps more than {index.steps_done}",
        )
    _require_tensors(state, plan)
    _require_shards(state, plan)
    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:  # hashing lets other threads run
        list(pool.map(lambda file: require_whole(state.directory / file.name, file, index.tensors), index.files))
    return changed


def _require_tensors(state: SavedState, plan: LoweredPlan) -> None:
    """Require the plan's tensors, each as in the plan, and no others."""
    expected, stored, weights_only = whole_state(plan), state.index.tensors, state.index.is_weights_only
    faults = [
        f"{_needs(plan, name)}, {_entry_text(entry)}; it is {mismatch}"
        for name, entry in expected.items()
        if (mismatch := _mismatch(entry, stored.get(name), weights_only=weights_only)) is not None
    ]
    faults += [
        f"it has {name}, {_entry_text(entry)}, and the plan has no tensor of that name"
        for name, entry in stored.items()
        if name not in expected
    ]
    if faults:
        rest_text = f"; {len(faults) - 1} more tensors are not as the plan has them" if len(faults) > 1 else ""
        message = f"{state.directory / INDEX_FILE}: {faults[0]}{rest_text}"
        raise StateError(message, _OTHER_WEIGHTS if weights_only else _CHANGED)


def _mismatch(expected: TensorEntry, stored: TensorEntry | None, *, weights_only: bool) -> str | None:
    """Return how the stored tensor differs from the plan's.

    None if it does not. Only weights must exist in a state of weights alone.
    """
    if stored is None:
        return None if weights_only and expected.kind != "weight" else "missing"
    return None if expected.is_same(stored) else f"stored as {_entry_text(stored)}"


def _require_shards(state: SavedState, plan: LoweredPlan) -> None:
    held_files = {file.name: file.shards for file in state.index.files}
    layout = layout_of_files(str(state.directory), state.index.tensors, held_files, {})
    for (name, *_), fault in bad_shardings(layout):
        shards, shape = layout.shards.get(name, ()), layout.tensors[name].shape
        files = sorted({shards[number].where for number in fault.holders})
        if fault.num_holders == 1:
            region_part = f"{list(fault.region.extents)} from {list(fault.region.offsets)} on"
            message = f"{files[0]} must have {region_part} of {name}, whose shape is {list(shape)}"
        elif fault.num_holders:
            message = f"{_needs(plan, name, fault.region)}; {' and '.join(files)} have that region, "
            message += f"{fault.num_holders} times in all"
        else:
            message = f"{_needs(plan, name, fault.region)}; no file has that region"
        raise StateError(f"{state.directory / INDEX_FILE}: {message}", _CHANGED)


def _needs(plan: LoweredPlan, name: str, region: Region | None = None) -> str:
    """Return the first rank that holds a tensor, or that region of it, and the region that it needs."""
    for rank in range(plan.mesh.num_ranks):
        for shard_of_rank in shards_of_rank(plan, rank):
            if shard_of_rank.shard.tensor == name:
                for _, region_of_rank in shard_of_rank.shard.regions():
                    overlap = region_of_rank if region is None else intersect(region_of_rank, region)
                    if overlap is not None:
                        region_part = f"{list(overlap.extents)} from {list(overlap.offsets)} on"
                        return f"rank {rank} needs {region_part} of {name}"
    raise AssertionError(f"no rank has {name}, which is of the plan's whole state")


def _entry_text(entry: TensorEntry) -> str:
    return f"{entry.kind}, {entry.dtype} {list(entry.shape)}"


_Values = Mapping[str, JsonValue]
_SHOWN = 3
_SPLITS = "schedule.num_sequence_splits"
_NUM = "schedule.num_micro_batches"
_SIZE = "schedule.micro_batch_size"
_LAST = "schedule.last_micro_batch_size"
_LENGTHS = "schedule.seq_lengths"
_TABLES = "model.moe.hash_tables.sha256"
_TOPOLOGY_KEYS = (
    "memory.shard_optimizer", "model.empty_layers", "model.final_norm", "model.mtp.magic_send", _SPLITS, _NUM, _SIZE,
    _LAST, _LENGTHS, "model.moe.hash_tables.path",
)  # fmt: skip
"""Keys that determine which rank computes what, and in which order."""
_TRAINING_KEYS = (
    "model.activation_order", "model.dropout", "model.moe.aux_loss", "model.moe.expert_bias_rate", "model.moe.z_loss",
    "model.mtp.loss_weight", "model.seq_length",
)  # fmt: skip
"""Keys that determine how a model is trained, but not the meaning of its weights."""


_OPTIONAL_LAYER_KEYS = re.compile(r"model\.layers\..+\.kind")
"""Keys that a plan may omit for its custom layers; compared only if both sides have them."""


class _KeyDifference(NamedTuple):
    key: str
    was: str
    now: str


def require_same_training(index: StateIndex, plan: LoweredPlan, digest: str | None = None) -> str | None:
    """Refuse a state whose training the plan does not continue; return the first difference of the data, if any.

    For weights alone the model must be the same, as far as both sides describe it. A state with ``digest``, the plan's
    digest, has the same micro-batches.

    Raises:
        StateError: Another framework saved it, whose optimizer has other states, or some keys differ.
    """
    backend = plan.spec.run.backend
    if index.is_weights_only:
        _require_none(_model_differences(index.values, values_of(plan.spec)), "these weights belong to another model")
        return None
    if index.framework != backend:
        raise StateError(
            f"the state was saved by {index.framework}, and the plan runs on {backend}: the bits of their optimizers' "
            "states differ",
            f"use `backend: {index.framework}`, or take the weights alone: `pipeproof state reshard STATE --to PLAN "
            "--weights-only -o DIR`",
        )
    differences = _value_differences(index.values, values_of(plan.spec))
    _require_none(differences, "the state was saved by a run of another plan")
    return None if index.digest == digest else _data_difference(index, plan)


def data_note(difference: str, index: StateIndex | None) -> Finding:
    """Return the note on steps with other micro-batches after the state of ``index``; None: after any state."""
    where = "after the state's last step"
    if index is not None:
        done = data_done(index)
        tokens = "" if done.tokens is None else f" ({done.tokens:,} tokens)"
        where = f"of step {done.steps}, after {done.sequences:,} sequences{tokens}"
    return DATA_CHANGES.finding(
        f"{difference}: the state is loaded bit for bit, but the losses, gradients, weights and moments of later steps "
        f"differ from a run of the plan that saved it; the data resumes with the first micro-batch {where}",
        help="to continue with the same steps, keep dp * ep * num_micro_batches and the size of each micro-batch",
    )


def data_done(index: StateIndex) -> DataPosition:
    """Return the data that the training of a state has used."""
    before = index.data_before or DataPosition(steps=0, sequences=0, tokens=0)
    values, steps = index.values, index.steps_done - before.steps
    num = values[_NUM]
    assert isinstance(num, int), "checked before the data is compared"
    replicas = steps * index.mesh.get("dp", 1) * index.mesh.get("ep", 1)
    sizes = [_micro_batch_size(values, number, num) for number in range(num)]
    tokens = None
    if before.tokens is not None and all(size.length is not None for size in sizes):
        tokens = before.tokens + replicas * sum(size.rows * (size.length or 0) for size in sizes)
    sequences = before.sequences + replicas * sum(size.rows for size in sizes)
    return DataPosition(steps=index.steps_done, sequences=sequences, tokens=tokens)


def _require_none(differences: list[_KeyDifference], message: str) -> None:
    if not differences:
        return
    shown = ", ".join(f"{entry.key} was {entry.was} and is {entry.now}" for entry in differences[:_SHOWN])
    rest_text = f", and {len(differences) - _SHOWN} more keys" if len(differences) > _SHOWN else ""
    fix = "resume with the values that it was saved with, or start a new run"
    raise StateError(f"{message}: {shown}{rest_text}", fix)


def _value_differences(saved: _Values, expected: _Values) -> list[_KeyDifference]:
    """Compare all keys that values depend on.

    The number of sequence splits matters only for the load-balancing loss.
    """
    splits_matter = bool(expected.get("model.moe.aux_loss"))
    keys = (key for key in sorted(saved.keys() | expected) if not _is_in(key, _TOPOLOGY_KEYS))
    return _differing(saved, expected, [*keys, *([_SPLITS] if splits_matter else [])])


def _model_differences(saved: _Values, expected: _Values) -> list[_KeyDifference]:
    """Compare the meaning of weights; weights of other origin lack some keys, or all.

    If a table that is drawn from the seed chooses experts, their meaning depends on the seed.
    """
    shared = sorted(key for key in saved.keys() & expected if key.startswith("model."))
    if expected.get("model.moe.hash_layers") and "model.moe.hash_layers" in saved:
        tables = saved.get(_TABLES), expected.get(_TABLES)
        shared += [_TABLES] if any(tables) else ["run.seed"] if "run.seed" in saved else []
    return _differing(saved, expected, [key for key in shared if not _is_in(key, _TOPOLOGY_KEYS + _TRAINING_KEYS)])


def _data_difference(index: StateIndex, plan: LoweredPlan) -> str | None:
    """Compare the micro-batches of a step: their number over all data ranks, and the size of each."""
    saved, expected = index.values, values_of(plan.spec)
    was, now = saved.get(_NUM), plan.spec.schedule.num_micro_batches
    if not isinstance(was, int) or was < 1:
        _require_none([_KeyDifference(_NUM, _value_text(saved, _NUM), str(now))], "the state does not record its data")
        return None
    total = index.mesh.get("dp", 1) * index.mesh.get("ep", 1) * was
    total_now = plan.mesh.size("dp") * plan.mesh.size("ep") * now
    if total != total_now:
        return f"dp * ep * {_NUM} was {total} and is {total_now}"
    for number in range(total):
        sizes = _micro_batch_size(saved, number, was), _micro_batch_size(expected, number, now)
        if sizes[0] != sizes[1]:
            return f"micro-batch {number} of a step was {sizes[0].text} and is {sizes[1].text}"
    return None


class _MicroBatchSize(NamedTuple):
    """Sequences of a micro-batch, and their length; None if the plan does not give it."""

    rows: int
    length: int | None

    @property
    def text(self) -> str:
        return f"{self.rows} rows" if self.length is None else f"{self.rows} x {self.length} tokens"


def _micro_batch_size(values: _Values, number: int, num_micro_batches: int) -> _MicroBatchSize:
    index, lengths = number % num_micro_batches, values.get(_LENGTHS)
    last = values.get(_LAST) if index == num_micro_batches - 1 else None
    length = lengths[index] if isinstance(lengths, list) and index < len(lengths) else None
    rows = values.get(_SIZE) if last is None else last
    length = values.get("model.seq_length") if length is None else length
    return _MicroBatchSize(rows if isinstance(rows, int) else 1, length if isinstance(length, int) else None)


def _differing(saved: _Values, expected: _Values, keys: list[str]) -> list[_KeyDifference]:
    """Compare keys; a missing key counts as not given, because later releases have more keys."""
    return [
        _KeyDifference(key, _value_text(saved, key), _value_text(expected, key))
        for key in keys
        if saved.get(key) != expected.get(key)
        and not (_OPTIONAL_LAYER_KEYS.fullmatch(key) and None in (saved.get(key), expected.get(key)))
    ]


def _value_text(values: _Values, key: str) -> str:
    return json.dumps(values[key]) if key in values else "missing"


def _is_in(key: str, keys: tuple[str, ...]) -> bool:
    """Return True if a key is one of ``keys``, or inside one of them."""
    return any(key == entry or key.startswith(f"{entry}.") for entry in keys)
