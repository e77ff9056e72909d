"""Whether training by a plan goes on where a state was saved, on whatever topology that was: the same values, or not.

Weights start from the seed, and every draw is keyed by what it is for, so that
a step is the same mathematics wherever the keys agree on which values depend.
Its micro-batches are counted over all data ranks: dp 2 with 4 each are those of
dp 4 with 2 each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pydantic import JsonValue

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.state.codes import StateError
from pipeproof.state.index import StateIndex
from pipeproof.state.save import values_of

_Values = Mapping[str, JsonValue]
_SHOWN = 3
_SPLITS = "schedule.num_sequence_splits"
_NUM = "schedule.num_micro_batches"
_LAST = "schedule.last_micro_batch_size"
_LENGTHS = "schedule.seq_lengths"
_OF_THE_TOPOLOGY = (
    "memory.shard_optimizer", "model.empty_layers", "model.final_norm", "model.mtp.magic_send", _SPLITS, _NUM, _LAST,
    _LENGTHS,
)  # fmt: skip
"""Keys that say who computes what, and in which order."""
_OF_TRAINING = (
    "model.activation_order", "model.dropout", "model.moe.aux_loss", "model.moe.expert_bias_rate", "model.moe.z_loss",
    "model.mtp.loss_weight", "model.seq_length",
)  # fmt: skip
"""Keys that say how a model is trained, and not what its weights mean."""


_SAID_OF_LAYERS = re.compile(r"model\.layers\..+\.kind")
"""What a plan need not say of its own layers; it matters where both do."""


class _Difference(NamedTuple):
    key: str
    was: str
    is_now: str


def require_same_training(index: StateIndex, plan: LoweredPlan, digest: str | None = None) -> None:
    """Refuse a state that training by the plan does not go on from.

    Of weights alone the model must be the same one, as far as they say. With ``digest``, that of the plan, the
    micro-batches of a state that has it are known to be the same.

    Raises:
        StateError: another framework saved it, whose optimizer keeps other numbers, or some keys differ.
    """
    backend = plan.spec.run.backend
    _require_same_replicas(index, plan)
    if index.is_weights_only:
        _require_none(_of_model(index.values, values_of(plan.spec)), "these weights are of another model")
        return
    if index.framework != backend:
        raise StateError(
            f"the state was saved by {index.framework}, and the plan runs on {backend}: the bits of their optimizers' "
            "states differ",
            f"use `backend: {index.framework}`, or take the weights alone: `pipeproof reshard STATE --to PLAN "
            "--weights-only -o DIR`",
        )
    differ = [*_of_values(index.values, values_of(plan.spec))]
    if index.digest != digest:
        differ += _of_data(index, plan)
    _require_none(differ, "the state was saved by a run of another plan")


def _require_same_replicas(index: StateIndex, plan: LoweredPlan) -> None:
    """What each data-parallel replica has made of its buffers is of no use to more of them, or to fewer."""
    was, is_now = index.mesh.get("dp", 1), plan.mesh.size("dp")
    names = [buffer.name for layer in plan.layers for buffer in layer.buffers]
    if was == is_now or not names:
        return
    more = f" (and {len(names) - 1} more buffers)" if len(names) > 1 else ""
    raise StateError(
        f"each data-parallel replica has a `{names[0]}` of its own{more}, which it alone changes; the state was saved "
        f"with topology.dp {was}, and the plan has {is_now}",
        f"give topology.dp {was}, with any pp and schedule; of layers that change no buffers dp may change, too",
    )


def _require_none(differ: list[_Difference], what: str) -> None:
    if not differ:
        return
    shown = ", ".join(f"{one.key} was {one.was} and is {one.is_now}" for one in differ[:_SHOWN])
    more = f", and {len(differ) - _SHOWN} more keys" if len(differ) > _SHOWN else ""
    raise StateError(f"{what}: {shown}{more}", "go on with the values that it was saved with, or start anew")


def _of_values(saved: _Values, wanted: _Values) -> list[_Difference]:
    """All keys on which values depend; how even loads are is looked at piece by piece of a sequence."""
    pieces_count = bool(wanted.get("model.moe.aux_loss"))
    keys = (key for key in sorted(saved.keys() | wanted) if not _is_of(key, _OF_THE_TOPOLOGY))
    return _differing(saved, wanted, [*keys, *([_SPLITS] if pieces_count else [])])


def _of_model(saved: _Values, wanted: _Values) -> list[_Difference]:
    """What weights mean; those of other origin say nothing of some keys, or of any."""
    shared = sorted(key for key in saved.keys() & wanted if key.startswith("model."))
    return _differing(saved, wanted, [key for key in shared if not _is_of(key, _OF_THE_TOPOLOGY + _OF_TRAINING)])


def _of_data(index: StateIndex, plan: LoweredPlan) -> Iterator[_Difference]:
    """The micro-batches of a step: how many over all data ranks, and how large each."""
    saved, wanted = index.values, values_of(plan.spec)
    was, is_now = saved.get(_NUM), plan.spec.schedule.num_micro_batches
    if not isinstance(was, int) or was < 1:
        yield _Difference(_NUM, _shown(saved, _NUM), str(is_now))
        return
    total = index.mesh.get("dp", 1) * index.mesh.get("ep", 1) * was
    total_now = plan.mesh.size("dp") * plan.mesh.size("ep") * is_now
    if total != total_now:
        yield _Difference(f"dp * ep * {_NUM}", str(total), str(total_now))
        return
    for number in range(total):
        of_saved, of_now = _size_of(saved, number, was), _size_of(wanted, number, is_now)
        if of_saved != of_now:
            yield _Difference(f"micro-batch {number} of a step", of_saved, of_now)
            return


def _size_of(values: _Values, number: int, num_micro_batches: int) -> str:
    """A micro-batch's sequences and their length, where they are not those of all."""
    place, lengths = number % num_micro_batches, values.get(_LENGTHS)
    last = values.get(_LAST) if place == num_micro_batches - 1 else None
    length = lengths[place] if isinstance(lengths, list) and place < len(lengths) else None
    rows = values.get("schedule.micro_batch_size") if last is None else last
    length = values.get("model.seq_length") if length is None else length
    return f"{rows} rows" if length is None else f"{rows} x {length} tokens"


def _differing(saved: _Values, wanted: _Values, keys: list[str]) -> list[_Difference]:
    """A key that is not there is none that was given: later releases have more of them."""
    return [
        _Difference(key, _shown(saved, key), _shown(wanted, key))
        for key in keys
        if saved.get(key) != wanted.get(key)
        and not (_SAID_OF_LAYERS.fullmatch(key) and None in (saved.get(key), wanted.get(key)))
    ]


def _shown(values: _Values, key: str) -> str:
    return json.dumps(values[key]) if key in values else "not there"


def _is_of(key: str, keys: tuple[str, ...]) -> bool:
    """Whether a key is one of those, or within one of them."""
    return any(key == one or key.startswith(f"{one}.") for one in keys)
