"""Maps between pipeproof's whole tensors and those of a convention of names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from pipeproof.specs.model import ModelSpec
from pipeproof.state.boxes import Box, minus, whole_box
from pipeproof.state.mapping import StateMap, identity_map
from pipeproof.state.names.parts import parts_of, weights_of
from pipeproof.state.names.tables import CONVENTIONS, OURS, convention_of
from pipeproof.state.names.views import put_together

if TYPE_CHECKING:
    from pipeproof.state.index import TensorEntry

__all__ = ["CONVENTIONS", "copies_of", "model_of", "names_of", "written_names"]

_EMBEDDING = "embed.weight"
"""[vocabulary, hidden size], here as everywhere, and so is a head that is tied to it."""
_ONE_SHARD: Mapping[str, int] = MappingProxyType({})


def names_of(convention: str, model: ModelSpec, dtype: str, ffn_shards: Mapping[str, int] = _ONE_SHARD) -> StateMap:
    """The convention's tensors, made of pipeproof's own, whose weights are in ``dtype``. Types stay as they are.

    Where the convention has no padding of the vocabulary, that of a plan is left out.

    ``ffn_shards``: of how many tensor-parallel ranks' gates and ups a fused tensor is, by its name; without, of one.

    Raises:
        NoNamesError: PP928, there is no such convention, or it has no names for what the model has.
    """
    ours = weights_of(model, dtype)
    if convention == OURS:
        return identity_map(ours)
    names = convention_of(convention, model)
    parts = parts_of(model, {name: entry.shape for name, entry in ours.items()}, names, ffn_shards)
    found, copied, dropped = {}, set[str](), dict[str, tuple[Box, ...]]()
    for part in parts:
        name = names.name_of(part.role, part.block, model.num_layers, part.expert)
        source = part.views[0].source
        turned = source != _EMBEDDING and names.turns(part.role)
        found[name] = put_together(part.views, part.along, ours[source].dtype, turned=turned)
        if part.copy_of is not None:
            copied.add(source)
        if part.role in ("embed", "head") and part.views[0].box != whole_box(ours[source].shape):
            dropped[source] = tuple(minus(whole_box(ours[source].shape), [part.views[0].box]))
    return StateMap(found, dropped=dropped, copied=frozenset(copied))


def copies_of(convention: str, model: ModelSpec) -> dict[str, str]:
    """The tensors of a convention that are copies, and of which; a tied head may be there, and is not written.

    Raises:
        NoNamesError: PP928.
    """
    if convention == OURS:
        return {}
    names = convention_of(convention, model)
    ours = weights_of(model, "float32")
    parts = parts_of(model, {name: entry.shape for name, entry in ours.items()}, names, _ONE_SHARD)
    found = {names.whole["head"]: names.whole["embed"]} if model.tied_embedding else {}
    for part in parts:
        if part.copy_of is not None:
            found[names.name_of(part.role, part.block, model.num_layers)] = names.whole[part.copy_of]
    return found


def written_names(convention: str, tensors: Mapping[str, TensorEntry], model: ModelSpec, dtype: str) -> StateMap:
    """The convention's tensors of a state's weights; what the optimizer keeps is left out, on purpose.

    Raises:
        NoNamesError: PP928.
    """
    kept = names_of(convention, model, dtype)
    return replace(kept, removed=frozenset(n for n, entry in tensors.items() if entry.kind in ("moment", "counter")))


def model_of(values: Mapping[str, JsonValue]) -> ModelSpec:
    """The model of the plan whose values an index has, dotted."""
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
