"""Vocabularies that are padded to different sizes: rows of ids go over one to one, padding is left out and added.

Megatron-LM pads the vocabulary to a multiple of 128 times the number of
tensor-parallel ranks, so that a checkpoint of another number has other rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from pipeproof.specs.finding import Finding, PipeproofError, Severity
from pipeproof.specs.model import ModelSpec
from pipeproof.state.boxes import Box, whole_box
from pipeproof.state.index import TensorEntry
from pipeproof.state.mapping import Slab, StateMap, TensorMap, as_it_is
from pipeproof.state.reshard.codes import OTHER_SHAPES
from pipeproof.state.reshard.words import weight_name

DIM_OF_IDS = {"embed.weight": 0, "head.weight": 1}
"""Which dim of a weight, and of its moments, counts ids."""
_KEY = "model.unpadded_vocab_size"
_SIZE = "model.vocab_size"


def padded_map(source: Mapping[str, TensorEntry], values: Mapping[str, JsonValue], model: ModelSpec) -> StateMap:
    """Each tensor of a state as it is, but for those that count ids, which get the padding of ``model``.

    ``values`` are those of the source's index: a plan's keys, dotted. Padding
    of the source is left out; that of the target is zeros, of weights and of
    moments.

    Raises:
        PipeproofError: PP214, the vocabularies have other sizes, and nothing, or not the same, is said of how many
            ids there are.
    """
    sizes = values.get(_SIZE, model.vocab_size), model.vocab_size
    ids = values.get(_KEY), model.unpadded_vocab_size
    if sizes[0] != sizes[1] and (ids[0] is None or ids[0] != ids[1]):
        was, is_now = ("not given" if number is None else f"{number}" for number in ids)
        message = f"{_SIZE} was {sizes[0]} and is {sizes[1]}, and {_KEY} was {was} and is {is_now}"
        mend = f"where both have the same ids and only the padding differs, give {_KEY} in both plans"
        raise PipeproofError(Finding(OTHER_SHAPES.code, Severity.ERROR, message, help=mend))
    if sizes[0] == sizes[1]:
        return StateMap({name: as_it_is(name, entry.dtype, entry.shape) for name, entry in source.items()})
    tensors, dropped = dict[str, TensorMap](), dict[str, tuple[Box, ...]]()
    for name, entry in source.items():
        dim = None if entry.kind == "counter" else DIM_OF_IDS.get(weight_name(name) or "")
        if dim is None:
            tensors[name] = as_it_is(name, entry.dtype, entry.shape)
        else:
            tensors[name] = _padded(name, entry, dim, model)
            if entry.shape[dim] > model.num_token_ids:
                dropped[name] = (whole_box(entry.shape).between(dim, model.num_token_ids, entry.shape[dim]),)
    return StateMap(tensors, dropped=dropped)


def as_if_padded(values: Mapping[str, JsonValue], model: ModelSpec) -> dict[str, JsonValue]:
    """The values of a state whose ids are those of ``model``, as if its vocabulary had been padded to the same size."""
    same = values.get(_KEY) is not None and values[_KEY] == model.unpadded_vocab_size
    return {**values, _SIZE: model.vocab_size} if same else dict(values)


def _padded(name: str, entry: TensorEntry, dim: int, model: ModelSpec) -> TensorMap:
    shape = tuple(model.vocab_size if i == dim else size for i, size in enumerate(entry.shape))
    ids = whole_box(shape).between(dim, 0, model.num_token_ids)
    slabs = [Slab(ids, name, ids)]
    if model.vocab_size > model.num_token_ids:
        padding = whole_box(shape).between(dim, model.num_token_ids, model.vocab_size)
        slabs.append(Slab(padding, None, padding))
    return TensorMap(entry.dtype, shape, tuple(slabs))
