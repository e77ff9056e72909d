"""Maps between pipeproof's whole tensors and a convention's, and AOA statements between two conventions.

Statements are as a person would write them. Both conventions list tensors by role. For a role that both have, a
statement renames and transposes; if one fuses tensors that the other keeps separate, it merges or splits. Similar
layers share one statement with ``$LAYER_ID``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import JsonValue

from pipeproof.diagnostics.problems import grouped
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.model import ModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.state.checkpoint import Checkpoint, tensor_blocks
from pipeproof.state.names.convention import BIAS, OWN_NAMES, Convention
from pipeproof.state.names.convention_tables import OWN_CONVENTION, convention_of
from pipeproof.state.names.convention_tensors import (
    ConventionTensor,
    as_row,
    concatenated,
    convention_tensors,
    is_table,
    weights_of,
)
from pipeproof.state.names.deepseek_v4 import names_as_saved, require_tables, tables_of
from pipeproof.state.regions import Region, subtract, whole_region
from pipeproof.state.state_codes import CopiesDifferError, NoNamesError
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
        if tensor.role == "router_bias" and names.router_bias_is_row:
            duplicates[name] = as_row(duplicates[name])
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
    for byte and then dropped, and tables of experts are compared with the plan's; the proof reports missing and
    unexpected tensors.

    Raises:
        NoNamesError: PP928, the convention has no names for the plan's model.
        CopiesDifferError: PP929, two tensors that represent one of the plan's differ, or a table from the plan's.
        StateError: PP920, a file cannot be read.
    """
    model = require_gpt(convention, plan)
    saved = {} if model.compressed_attention is None else names_as_saved(checkpoint.tensors)
    copies = {} if convention == OWN_NAMES else tied_copies(convention, model)
    copies = {saved.get(copy, copy): saved.get(original, original) for copy, original in copies.items()}
    _require_equal_copies(checkpoint, copies)
    convention_map = map_from_own_names(convention, model, plan.run.weight_dtype, _ffn_shards(checkpoint))
    tables = (
        {} if convention == OWN_NAMES else {saved.get(name, name): table for name, table in tables_of(plan).items()}
    )
    require_tables(checkpoint, tables)
    types = {name: entry.dtype for name, entry in checkpoint.tensors.items()}
    firsts = {saved.get(name, name): first for name, first in convention_map.tensors.items()}
    as_stored = {name: replace(first, dtype=types.get(name, first.dtype)) for name, first in firsts.items()}
    back = invert(replace(convention_map, tensors=as_stored), weights_of(model, plan.run.weight_dtype))
    removed = {name for name in types if name in copies or name in tables or _DERIVED.fullmatch(name)}
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
        differ = partial(_copies_differ, checkpoint, original, copy)
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            raise differ(f"{first.dtype} {list(first.shape)}, {second.dtype} {list(second.shape)}")
        item, position = dtype_bytes(first.dtype), 0
        blocks = tensor_blocks(checkpoint, original), tensor_blocks(checkpoint, copy)
        for block, block_of_copy in zip(*blocks, strict=True):
            differing = np.flatnonzero((block != block_of_copy).reshape(-1, item).any(axis=1))
            if len(differing):
                gaps = np.flatnonzero(np.diff(differing) > 1)
                last = differing[gaps[0]] if len(gaps) else differing[-1]
                start, stop = position + int(differing[0]), position + int(last) + 1
                row, column = np.unravel_index(start, first.shape)[0], start % first.shape[-1]
                where = _position_text(int(row), int(column), first.shape)
                raise differ(f"first in elements {start} to {stop}, from {where} on")
            position += block.size // item


def _position_text(row: int, column: int, shape: tuple[int, ...]) -> str:
    return f"element {column}" if len(shape) == 1 else f"row {row}, column {column},"


def _copies_differ(checkpoint: Checkpoint, original: str, copy: str, difference: str) -> CopiesDifferError:
    if copy.endswith(("norm.weight", "norm.bias")):
        fix = "modules of this checkpoint have separate norms, and modules of a plan share the last one: without "
        fix += "`model.mtp` in the plan, and without the tensors of modules in the checkpoint, the rest can be read"
    elif ".layers." in copy:
        fix = "a plan's modules share embedding and head with the model: fix the checkpoint"
    else:
        fix = "the head of this checkpoint is not tied to the embedding: set `model.tied_embedding: false`"
    return CopiesDifferError(
        f"{checkpoint.path}: {copy} must be a copy of {original}, and they differ: {difference}", fix
    )


_LAYER, _EXPERT = "$LAYER_ID", "$EXPERT_ID"
_QKV = ("q", "k", "v")
_FUSED_HEADS = frozenset({"qkv", "qkv_by_kind"})


def statements_between(source: str, target: str, model: ModelSpec) -> str:
    """Return statements that make the tensors of convention ``target`` from the tensors of ``source``, one per line.

    Raises:
        NoNamesError: PP928, a convention has no names for the model, or no statements exist between the two.
    """
    sides = _named_model(source, model), _named_model(target, model)
    if sides[0].convention.padded != sides[1].convention.padded and model.num_token_ids != model.vocab_size:
        raise NoNamesError(
            f"no statement adds or removes the padding of a vocabulary, as needed between `{source}` and `{target}`",
            "go by names alone: `pipeproof state reshard --names`",
        )
    if sides[0].convention.rotary_pairs != sides[1].convention.rotary_pairs:
        raise _beyond_statements("the pairs of rotary positions", f"`{source}` and `{target}` need")
    return "".join(f"{statement.text}\n" for statement in _Statements(*sides, model).statements())


def _beyond_statements(what: str, who: str) -> NoNamesError:
    return NoNamesError(
        f"no statement takes {what} apart, as {who} it", "go by names alone: `pipeproof state reshard --names`"
    )


@dataclass(frozen=True, slots=True)
class _Statement:
    left: tuple[str, ...]
    right: str
    transposed: bool = False
    attributes: str = ""

    @property
    def text(self) -> str:
        names = ", ".join(f"{name}^T" if self.transposed else name for name in self.left)
        return f"{names} -> {self.right}{self.attributes}"


@dataclass(frozen=True, slots=True)
class _NamedModel:
    convention: Convention
    roles: Mapping[str, Mapping[str, ConventionTensor]]
    """By block and role; for experts the last one."""
    names: frozenset[str]
    num_layers: int

    def name(self, role: str, block: str) -> str:
        return self.convention.name_of(role, block, self.num_layers, _EXPERT)


def _named_model(name: str, model: ModelSpec) -> _NamedModel:
    if name == OWN_NAMES and (model.moe is not None or model.mla is not None):
        what = "one expert of a tensor" if model.moe is not None else "the pairs of rotary positions"
        raise _beyond_statements(what, "pipeproof's own names need")
    convention = OWN_CONVENTION if name == OWN_NAMES else convention_of(name, model)
    shapes = {ours: entry.shape for ours, entry in weights_of(model, "float32").items()}
    tensors = convention_tensors(model, shapes, convention, {})
    roles: dict[str, dict[str, ConventionTensor]] = {}
    for tensor in tensors:
        roles.setdefault(tensor.block, {})[tensor.role] = tensor
    names = (convention.name_of(tensor.role, tensor.block, model.num_layers, tensor.expert) for tensor in tensors)
    return _NamedModel(convention, roles, frozenset(names), model.num_layers)


class _Statements:
    def __init__(self, source: _NamedModel, target: _NamedModel, model: ModelSpec) -> None:
        self.source, self.target, self.model = source, target, model

    def statements(self) -> Iterator[_Statement]:
        """Yield all statements; statements with ``$LAYER_ID`` come when the first layer needs them."""
        blocks = dict.fromkeys((*self.source.roles, *self.target.roles))
        patterns = {block: self._block(block, f"layer.{_LAYER}") for block in blocks if block.startswith("layer.")}
        layers = grouped((pattern, block.removeprefix("layer.")) for block in patterns for pattern in patterns[block])
        shared = {each for each in layers if all(self._there(name) <= {*layers[each]} for name in each.left)}
        done = set[_Statement]()
        for block in blocks:
            statements = self._block(block, block)
            for statement, pattern in zip(statements, patterns.get(block, statements), strict=True):
                if pattern not in shared:
                    yield statement
                elif pattern not in done:
                    done.add(pattern)
                    yield pattern

    def _there(self, pattern: str) -> set[str]:
        """Return the numbers of layers for which the source has a tensor of such a name."""
        number = re.escape(pattern).replace(re.escape(_LAYER), "([0-9]+)", 1).replace(re.escape(_EXPERT), "[0-9]+")
        matches = (re.fullmatch(number, name) for name in self.source.names)
        return {match[1] for match in matches if match is not None}

    def _block(self, block: str, label: str) -> list[_Statement]:
        return [] if block not in self.target.roles else list(self._roles(block, label))

    def _roles(self, block: str, label: str) -> Iterator[_Statement]:
        """Yield the statements of a block, with ``label`` for its name."""
        source, target = self.source.roles[block], self.target.roles[block]
        for role, tensor in target.items():
            kind = role.removesuffix(BIAS)
            suffix = role.removeprefix(kind)
            if role == "proj" and self.source.convention.hidden_first != self.target.convention.hidden_first:
                yield from self._halves_exchanged(label)
            elif role in source:
                yield from self._same_role(role, label, tensor)
            elif tensor.copy_of is not None:
                transposed = self.source.convention is OWN_CONVENTION and tensor.copy_of == "head"
                yield _Statement((self.source.name(tensor.copy_of, ""),), self.target.name(role, label), transposed)
            elif kind in _FUSED_HEADS and f"q{suffix}" in source:
                yield self._merged([each + suffix for each in _QKV], role, label)
            elif kind in _FUSED_HEADS:
                (other,) = _FUSED_HEADS - {kind}
                yield from self._regrouped(other + suffix, role, label)
            elif kind == "q":
                fused = next(each + suffix for each in _FUSED_HEADS if each + suffix in source)
                yield from self._split(fused, [each + suffix for each in _QKV], label)
            elif kind.endswith("gate_up"):
                apart = kind.removesuffix("_up"), kind.removesuffix("gate_up") + "up"
                yield self._merged([each + suffix for each in apart], role, label)
            elif kind.endswith("gate"):
                apart = kind, kind.removesuffix("gate") + "up"
                yield from self._split(f"{kind}_up{suffix}", [each + suffix for each in apart], label)
        for role, tensor in source.items():
            if tensor.copy_of is not None and role not in target:
                yield _Statement((self.source.name(role, label),), "_")

    def _same_role(self, role: str, label: str, tensor: ConventionTensor) -> Iterator[_Statement]:
        names = self.source.name(role, label), self.target.name(role, label)
        is_matrix = len(tensor.views[0].shape) == 2 and not is_table(tensor.views[0].source)
        layouts = {named_model.convention.is_transposed(role) for named_model in (self.source, self.target)}
        transposed = is_matrix and len(layouts) > 1
        by_rank = {role in named_model.convention.fused_by_rank for named_model in (self.source, self.target)}
        if len(by_rank) > 1:  # with tensor parallelism Paddle's columns differ: each rank has its own
            yield from self._regrouped(role, role, label)
        elif transposed or names[0] != names[1]:
            yield _Statement((names[0],), names[1], transposed)

    def _is_transposed(self, role: str) -> bool:
        return not role.endswith(BIAS) and self.source.convention.transposed != self.target.convention.transposed

    def _merged(self, roles: Sequence[str], role: str, label: str) -> _Statement:
        left = tuple(self.source.name(each, label) for each in roles)
        attributes = self._columns(self.target, role)
        return _Statement(left, self.target.name(role, label), self._is_transposed(role), attributes)

    def _split(self, role: str, roles: Sequence[str], label: str) -> Iterator[_Statement]:
        names = tuple(self.target.name(each, label) for each in roles)
        yield from self._separated(role, label, names)
        if self._is_transposed(role):
            yield from (_Statement((name,), name, transposed=True) for name in names)

    def _regrouped(self, role: str, role_there: str, label: str) -> Iterator[_Statement]:
        """Take a fused tensor apart, and fuse its parts in the target's order."""
        name = self.source.name(role, label)
        parts = tuple(f"{name}.{part}" for part in (_QKV if role.startswith("qkv") else ("gate", "up")))
        yield from self._separated(role, label, parts)
        there, attributes = self.target.name(role_there, label), self._columns(self.target, role_there)
        yield _Statement(parts, there, self._is_transposed(role), attributes)

    def _separated(self, role: str, label: str, parts: tuple[str, ...]) -> Iterator[_Statement]:
        """Split a fused tensor. A statement makes equal parts, so grouped queries are first as many as keys."""
        name, attributes = self.source.name(role, label), self._columns(self.source, role)
        num_groups = self.model.num_heads // self.model.kv_heads if role.startswith("qkv_by_kind") else 1
        if num_groups == 1:
            yield _Statement((name,), ", ".join(parts), attributes=attributes)
            return
        queries = tuple(f"{name}.{number}" for number in range(num_groups))
        yield _Statement((name,), ", ".join((*queries, *parts[1:])), attributes=attributes)
        yield _Statement(queries, parts[0], attributes=attributes)

    def _columns(self, named_model: _NamedModel, role: str) -> str:
        """Return the attributes that describe the order of a fused tensor's columns."""
        axis = 0 if named_model.convention.transposed or role.endswith(BIAS) else 1
        if role.removesuffix(BIAS) == "qkv":
            heads = f"num_heads={self.model.num_heads}, num_key_value_groups={self.model.kv_heads}"
            return f", fused_qkv, {heads}{', axis=0' if axis == 0 else ''}"
        return ", fused_ffn" if role in named_model.convention.fused_by_rank else f", axis={axis}"

    def _halves_exchanged(self, label: str) -> Iterator[_Statement]:
        """Swap the halves of the projection that joins hidden state and embedding."""
        names = self.source.name("proj", label), self.target.name("proj", label)
        halves = f"{names[0]}.first", f"{names[0]}.second"
        axes = [1 if named_model.convention.transposed else 0 for named_model in (self.source, self.target)]
        yield _Statement((names[0],), ", ".join(halves), attributes=f", axis={axes[0]}")
        transposed = self.source.convention.transposed != self.target.convention.transposed
        yield _Statement((halves[1], halves[0]), names[1], transposed, f", axis={axes[1]}")
