"""Maps between pipeproof's whole tensors and those of a convention, in both directions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import JsonValue

from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.model import ModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.state.checkpoint import Checkpoint, tensor_blocks
from pipeproof.state.names.convention import OWN_NAMES
from pipeproof.state.names.convention_tables import convention_of
from pipeproof.state.names.convention_tensors import concatenated, convention_tensors, is_table, weights_of
from pipeproof.state.names.name_codes import CopiesDifferError, NoNamesError
from pipeproof.state.regions import Region, subtract, whole_region
from pipeproof.state.tensor_map import StateMap, identity_map, invert

if TYPE_CHECKING:
    from pipeproof.state.state_index import TensorEntry


_ONE_SHARD: Mapping[str, int] = MappingProxyType({})


def map_from_own_names(
    convention: str, model: ModelSpec, dtype: str, ffn_shards: Mapping[str, int] = _ONE_SHARD
) -> StateMap:
    """Return the map from pipeproof's tensors, with weights in ``dtype``, to the convention's. Types stay.

    The padding of the vocabulary is dropped if the convention has none. ``ffn_shards``: by name, the number of
    tensor-parallel ranks whose gates and ups a fused tensor has; one by default.

    Raises:
        NoNamesError: PP928, the convention is unknown, or has no names for a part of the model.
    """
    ours = weights_of(model, dtype)
    if convention == OWN_NAMES:
        return identity_map(ours)
    names = convention_of(convention, model)
    tensors = convention_tensors(model, {name: entry.shape for name, entry in ours.items()}, names, ffn_shards)
    duplicates, duplicated, dropped = {}, set[str](), dict[str, tuple[Region, ...]]()
    for tensor in tensors:
        name = names.name_of(tensor.role, tensor.block, model.num_layers, tensor.expert)
        source = tensor.views[0].source
        transposed = not is_table(source) and names.is_transposed(tensor.role)
        duplicates[name] = concatenated(tensor.views, tensor.along, ours[source].dtype, transposed=transposed)
        if tensor.copy_of is not None:
            duplicated.add(source)
        if tensor.role in ("embed", "head") and tensor.views[0].region != whole_region(ours[source].shape):
            dropped[source] = tuple(subtract(whole_region(ours[source].shape), [tensor.views[0].region]))
    return StateMap(duplicates, dropped=dropped, duplicated=frozenset(duplicated))


def tied_copies(convention: str, model: ModelSpec) -> dict[str, str]:
    """Return the tensors of a convention that are copies, with their originals.

    A tied head may exist, and is not written.

    Raises:
        NoNamesError: PP928.
    """
    if convention == OWN_NAMES:
        return {}
    names = convention_of(convention, model)
    ours = weights_of(model, "float32")
    tensors = convention_tensors(model, {name: entry.shape for name, entry in ours.items()}, names, _ONE_SHARD)
    duplicates = {names.whole["head"]: names.whole["embed"]} if model.tied_embedding else {}
    for tensor in tensors:
        if tensor.copy_of is not None:
            name = names.name_of(tensor.role, tensor.block, model.num_layers)
            duplicates[name] = names.name_of(tensor.copy_of, "", model.num_layers)
    return duplicates


def map_to_convention(convention: str, tensors: Mapping[str, TensorEntry], model: ModelSpec, dtype: str) -> StateMap:
    """Return the map from a state's weights to the convention's tensors, without optimizer states.

    Raises:
        NoNamesError: PP928.
    """
    kept = map_from_own_names(convention, model, dtype)
    return replace(kept, removed=frozenset(n for n, entry in tensors.items() if entry.kind in ("moment", "counter")))


def model_of(values: Mapping[str, JsonValue]) -> ModelSpec:
    """Return the model of the plan whose values an index has, dotted."""
    model: dict[str, Any] = {}
    for key, value in values.items():
        section, *path = key.split(".")
        if section != "model":
            continue
        inner = model
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = value
    return ModelSpec.model_validate(model)


_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tensors that older files of Hugging Face have; they follow from the model's sizes."""


def map_from_convention(convention: str, checkpoint: Checkpoint, plan: PlanSpec) -> StateMap:
    """Return the map from a checkpoint's tensors, named by ``convention``, to the plan's weights.

    A tensor of another type than ``run.dtype`` (or ``main_grad_dtype``) is cast once. Existing copies are compared byte
    for byte and then dropped; the proof reports missing and unexpected tensors.

    Raises:
        NoNamesError: PP928, the convention has no names for the plan's model.
        CopiesDifferError: PP929, two tensors that represent one of the plan's differ.
        StateError: PP920, a file cannot be read.
    """
    model = require_gpt(convention, plan)
    copies = {} if convention == OWN_NAMES else tied_copies(convention, model)
    _require_equal_copies(checkpoint, copies)
    convention_map = map_from_own_names(convention, model, plan.run.weight_dtype, _ffn_shards(checkpoint))
    types = {name: entry.dtype for name, entry in checkpoint.tensors.items()}
    as_stored = {
        name: replace(first, dtype=types.get(name, first.dtype)) for name, first in convention_map.tensors.items()
    }
    back = invert(StateMap(as_stored), weights_of(model, plan.run.weight_dtype))
    removed = {name for name in types if name in copies or _DERIVED.fullmatch(name)}
    return StateMap(back.tensors, frozenset(removed))


def require_gpt(convention: str, plan: PlanSpec) -> ModelSpec:
    """Return the plan's model.

    Raises:
        NoNamesError: PP928, it is a sequence of custom layers.
    """
    if plan.is_custom:
        raise NoNamesError(
            f"`{convention}` has no names for custom layers",
            "leave `--names` away; AOA statements can name tensors: `--aoa`",
        )
    return plan.gpt


def _ffn_shards(checkpoint: Checkpoint) -> dict[str, int]:
    """Return by name the number of shards along the output of a fused gate and up.

    Each of Paddle's ranks fuses its own.
    """
    fused = (name for name in checkpoint.tensors if name.endswith(".up_gate_proj.weight"))
    return {name: len({stored.shard.offsets[-1] for stored in checkpoint.shards.get(name, ())}) or 1 for name in fused}


def _require_equal_copies(checkpoint: Checkpoint, copies: Mapping[str, str]) -> None:
    for copy, original in copies.items():
        if copy not in checkpoint.tensors or original not in checkpoint.tensors:
            continue
        first, second = checkpoint.tensors[original], checkpoint.tensors[copy]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            raise _copies_differ(
                checkpoint, original, copy, f"{first.dtype} {list(first.shape)}, {second.dtype} {list(second.shape)}"
            )
        item, position = dtype_bytes(first.dtype), 0
        blocks = tensor_blocks(checkpoint, original), tensor_blocks(checkpoint, copy)
        for block, block_of_copy in zip(*blocks, strict=True):
            differing = np.flatnonzero((block != block_of_copy).reshape(-1, item).any(axis=1))
            if len(differing):
                gaps = np.flatnonzero(np.diff(differing) > 1)
                last = differing[gaps[0]] if len(gaps) else differing[-1]
                start, stop = position + int(differing[0]), position + int(last) + 1
                row, column = np.unravel_index(start, first.shape)[0], start % first.shape[-1]
                range_text = f"first in elements {start} to {stop}"
                raise _copies_differ(
                    checkpoint,
                    original,
                    copy,
                    f"{range_text}, from {_position_text(int(row), int(column), first.shape)} on",
                )
            position += block.size // item


def _position_text(row: int, column: int, shape: tuple[int, ...]) -> str:
    return f"element {column}" if len(shape) == 1 else f"row {row}, column {column},"


def _copies_differ(checkpoint: Checkpoint, original: str, copy: str, difference: str) -> CopiesDifferError:
    if copy.endswith(("norm.weight", "norm.bias")):
        fix = "modules of this checkpoint have a norm of their own, and those of a plan share the last one: without "
        fix += "`model.mtp` in the plan, and without the tensors of modules in the checkpoint, the rest can be read"
    elif ".layers." in copy:
        fix = "a plan's modules share embedding and head with the model: fix the checkpoint"
    else:
        fix = "the head of this checkpoint is not tied to the embedding: set `model.tied_embedding: false`"
    return CopiesDifferError(
        f"{checkpoint.path}: {copy} must be a copy of {original}, and they differ: {difference}", fix
    )
