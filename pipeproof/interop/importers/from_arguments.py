"""Plans from the configuration that a tool has in its own process: no file is read, none of its code is run here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import SourceMap
from pipeproof.interop.importers.import_codes import unreadable
from pipeproof.interop.importers.imported import Flags, Imported, repeatable
from pipeproof.interop.importers.megatron.argument_block import arguments_of_values
from pipeproof.interop.importers.reader import import_flags, import_values
from pipeproof.interop.importers.tools.trainers import BRIDGE
from pipeproof.interop.importers.torchtitan import import_sections
from pipeproof.interop.importers.tree import Placed, Unknown, is_known, tree_of, tree_of_data

_SOURCE: Final = "the arguments"
_HERE: Final = Location(_SOURCE)


def from_arguments(arguments: object, kind: str = "megatron", flags: Flags = Flags()) -> Imported:  # noqa: B008 - frozen
    """Import the configuration of a training in the process of its tool.

    Args:
        arguments: ``megatron``: the namespace of ``get_args()`` or a dict of such names. ``megatron-bridge``: a
            ``ConfigContainer``. ``torchtitan``: a job configuration. Each may be nested dicts.
        kind: one of these three.
        flags: values that the configuration does not have.

    Raises:
        PlanFileError: PP170 if a value cannot be read or the kind is not known, PP171 if the tool refuses the settings.
    """
    if kind not in _KINDS:
        raise unreadable(f"`{kind}` has no arguments to read: {', '.join(_KINDS)} have", _HERE)
    return repeatable(partial(_KINDS[kind], _attributes(arguments)), flags)


def _megatron(values: Mapping[str, Any], flags: Flags) -> Imported:
    return import_flags(arguments_of_values(values, _SOURCE), flags)


def _megatron_bridge(values: Mapping[str, Any], flags: Flags) -> Imported:
    if not _attributes(values.get("model")):
        raise unreadable("the configuration has no `model`: give the whole ConfigContainer", _HERE)
    return import_values(BRIDGE, tree_of(dict(_leaves(values, "")), SourceMap(_SOURCE, ())), flags)


def _torchtitan(values: Mapping[str, Any], flags: Flags) -> Imported:
    """The sections of a ``Trainer.Config`` (torchtitan, commit b5bcd76: config/configs.py)."""
    data = {name: dict(_attributes(values.get(name))) for name in ("parallelism", "training", "model")}
    if not data["parallelism"]:
        raise unreadable("the configuration has no `parallelism`: give the whole configuration of the trainer", _HERE)
    spec = _attributes(values.get("model_spec"))
    layers = _attributes(spec.get("model")).get("layers")
    if isinstance(spec.get("name"), str):
        data["model"]["name"] = spec["name"]
    if isinstance(layers, Sequence):
        data["model"]["num_layers"] = len(layers)
    checkpoints = values.get("activation_checkpoint")
    mode = _attributes(checkpoints).get("mode") or type(checkpoints).__qualname__.lower()
    data["activation_checkpoint"] = {"mode": next((name for name in ("selective", "full") if name in mode), "none")}
    plain = {name: {key: v for key, v in keys.items() if v is not None and is_known(v)} for name, keys in data.items()}
    return import_sections(tree_of_data(plain, SourceMap(_SOURCE, ())), flags)


_KINDS: Final[Mapping[str, Callable[[Mapping[str, Any], Flags], Imported]]] = MappingProxyType(
    {"megatron": _megatron, "megatron-bridge": _megatron_bridge, "torchtitan": _torchtitan}
)


def _attributes(value: object) -> Mapping[str, Any]:
    """The items of a dict, or the attributes of an object with defaults of its class; empty for other values."""
    if isinstance(value, Mapping):
        return value
    if value is None or isinstance(value, (bool, int, float, str, list, tuple, type)):
        return {}
    names = (*getattr(type(value), "__dataclass_fields__", ()), *getattr(value, "__dict__", ()))
    return {name: getattr(value, name) for name in names if name[:1] != "_" and hasattr(value, name)}


def _leaves(values: Mapping[str, Any], above: str) -> Iterator[tuple[str, Placed]]:
    """The values of sections, by dotted names, and at the top; names for enumerations."""
    for name, value in values.items():
        value = value.name if isinstance(value, Enum) else value
        below = {} if above else _attributes(value)
        if below:
            yield from _leaves(below, f"{name}.")
        else:
            yield f"{above}{name}", Placed(value if is_known(value) else Unknown("no plain value", _HERE), _HERE)
