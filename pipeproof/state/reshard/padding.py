"""Maps between vocabularies with different padding: rows of token ids are copied, padding is dropped and added.

Megatron-LM pads the vocabulary to a multiple of 128 times the number of tensor-parallel ranks, so that a checkpoint for
another number has other rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import JsonValue

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.specs.custom_layers import CustomModelSpec
from pipeproof.specs.model import ModelSpec
from pipeproof.state.region_text import weight_name
from pipeproof.state.regions import Region, whole_region
from pipeproof.state.reshard.reshard_codes import SHAPE_MISMATCH
from pipeproof.state.state_index import TensorEntry
from pipeproof.state.tensor_map import RegionCopy, StateMap, TensorMap, identity_tensor

VOCABULARY_DIM = {"embed.weight": 0, "head.weight": 1}
"""Dim of a weight, and of its moments, that counts token ids."""
_KEY = "model.unpadded_vocab_size"
_SIZE = "model.vocab_size"


def padding_map(
    source: Mapping[str, TensorEntry], values: Mapping[str, JsonValue], model: ModelSpec | CustomModelSpec
) -> StateMap:
    """Map each tensor of a state to itself, except those that count token ids, which get the padding of ``model``.

    ``values`` are those of the source's index: a plan's keys, dotted. Padding of the source is dropped; that of the
    target is zeros, for weights and for moments.

    Raises:
        PipeproofError: PP214, the vocabularies differ in size, and the number of token ids is unknown or differs.
    """
    if isinstance(model, CustomModelSpec):  # without token ids
        return _unchanged(source)
    sizes = values.get(_SIZE, model.vocab_size), model.vocab_size
    ids = values.get(_KEY), model.unpadded_vocab_size
    if sizes[0] != sizes[1] and (ids[0] is None or ids[0] != ids[1]):
        was, is_now = ("not given" if number is None else f"{number}" for number in ids)
        message = f"{_SIZE} was {sizes[0]} and is {sizes[1]}, and {_KEY} was {was} and is {is_now}"
        fix = f"where both have the same ids and only the padding differs, give {_KEY} in both plans"
        raise PipeproofError(SHAPE_MISMATCH.finding(message, help=fix))
    if sizes[0] == sizes[1]:
        return _unchanged(source)
    tensors, dropped = dict[str, TensorMap](), dict[str, tuple[Region, ...]]()
    for name, entry in source.items():
        dim = None if entry.kind == "counter" else VOCABULARY_DIM.get(weight_name(name) or "")
        if dim is None:
            tensors[name] = identity_tensor(name, entry.dtype, entry.shape)
        else:
            tensors[name] = _padded(name, entry, dim, model)
            if entry.shape[dim] > model.num_token_ids:
                dropped[name] = (whole_region(entry.shape).sliced(dim, model.num_token_ids, entry.shape[dim]),)
    return StateMap(tensors, dropped=dropped)


def _unchanged(source: Mapping[str, TensorEntry]) -> StateMap:
    return StateMap({name: identity_tensor(name, entry.dtype, entry.shape) for name, entry in source.items()})


def with_vocabulary_of(values: Mapping[str, JsonValue], model: ModelSpec | CustomModelSpec) -> dict[str, JsonValue]:
    """Return the values of a state with the vocabulary size of ``model``, if both have the same token ids."""
    if isinstance(model, CustomModelSpec):
        return dict(values)
    same = values.get(_KEY) is not None and values[_KEY] == model.unpadded_vocab_size
    return {**values, _SIZE: model.vocab_size} if same else dict(values)


def _padded(name: str, entry: TensorEntry, dim: int, model: ModelSpec) -> TensorMap:
    shape = tuple(model.vocab_size if i == dim else size for i, size in enumerate(entry.shape))
    ids = whole_region(shape).sliced(dim, 0, model.num_token_ids)
    copies = [RegionCopy(ids, name, ids)]
    if model.vocab_size > model.num_token_ids:
        padding = whole_region(shape).sliced(dim, model.num_token_ids, model.vocab_size)
        copies.append(RegionCopy(padding, None, padding))
    return TensorMap(entry.dtype, shape, tuple(copies))
