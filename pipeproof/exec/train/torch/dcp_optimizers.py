"""Optimizers in a distributed checkpoint: states and hyperparameters by the name of their parameter in the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipeproof.exec.train.torch.dcp_files import StoredObjects, require_plain
from pipeproof.exec.train.torch.model_names import OPTIMIZER, HeldTensor, Location
from pipeproof.state.dcp.dcp_metadata import DcpMetadata
from pipeproof.state.state_codes import DcpMismatchError

STATE, GROUP = f"{OPTIMIZER}.state.", f"{OPTIMIZER}.param_groups."
_NOT_HYPERPARAMETERS = ("params", "param_names")


def listed(optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return one or several optimizers as a list."""
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def parameters_of(
    optimizers: Sequence[torch.optim.Optimizer], held: Sequence[HeldTensor]
) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], nn.Parameter, Location]]:
    """Yield each parameter of the optimizers, with its group and its first place.

    Raises:
        DcpMismatchError: It is in no stage, or in two optimizers.
    """
    locations = dict[int, Location]()
    for entry in held:
        locations.setdefault(id(entry.value), entry.location)
    seen = set[int]()
    for number, optimizer in enumerate(optimizers):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in locations:
                    message = (
                        f"optimizer {number} has a parameter {list(parameter.shape)} that no stage of this rank has"
                    )
                    raise DcpMismatchError(message, "make the optimizer of the parameters of the stages")
                location = locations[id(parameter)]
                if id(parameter) in seen:
                    message = f"{location[1]} of stage {location[0]} is in two optimizers"
                    raise DcpMismatchError(message, "give each parameter to one optimizer")
                seen.add(id(parameter))
                yield optimizer, group, parameter, location


def optimizer_entries(
    optimizers: Sequence[torch.optim.Optimizer], held: Sequence[HeldTensor], key_of: Callable[[Location], str]
) -> dict[str, tuple[int, Any]]:
    """Return optimizer states and hyperparameters by name, each with the stage of its parameter."""
    entries = dict[str, tuple[int, Any]]()
    for optimizer, group, parameter, location in parameters_of(optimizers, held):
        key = key_of(location)
        for slot, value in optimizer.state.get(parameter, {}).items():
            if "." in slot:
                raise DcpMismatchError(f"the optimizer state {slot!r} of {key} has a dot in its name", "rename it")
            if not isinstance(value, torch.Tensor):
                require_plain({f"{slot} of {key}": value})
            entries[f"{STATE}{key}.{slot}"] = location[0], value
        for name, value in group.items():
            if name not in _NOT_HYPERPARAMETERS:
                require_plain({f"{name} of {key}": value})
                entries[f"{GROUP}{key}.{name}"] = location[0], value
    return entries


@dataclass(slots=True)
class OptimizerLoad:
    """The new state of one parameter in its optimizer, or new hyperparameters of one group."""

    apply: Callable[[], None]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def optimizer_loads(
    path: Path,
    optimizers: Sequence[torch.optim.Optimizer],
    held: Sequence[HeldTensor],
    key_of: Callable[[Location], str],
    metadata: DcpMetadata,
    objects: StoredObjects,
) -> list[OptimizerLoad]:
    """Return what to load for each parameter and each group.

    Raises:
        DcpMismatchError: The checkpoint has no state for a parameter, or one of another shape; or the parameters of a
            group were saved with different hyperparameters.
    """
    states, groups = (_by_key(start, metadata) for start in (STATE, GROUP))
    loads, first_of_group = list[OptimizerLoad](), dict[int, tuple[str, dict[str, Any]]]()
    for optimizer, group, parameter, location in parameters_of(optimizers, held):
        key = key_of(location)
        if key not in groups:
            message = f"{path} has no optimizer state for {key}"
            raise DcpMismatchError(message, "it was saved without the optimizer: load without `optimizers`")
        values, load = _group_values(groups[key], metadata, objects)
        loads.append(load)
        first_key, first_values = first_of_group.setdefault(id(group), (key, values))
        if first_key == key:
            load.apply = partial(group.update, values)
        differs = next((name for name in {**values, **first_values} if not _same(values, first_values, name)), None)
        if differs is not None:
            message = (
                f"{key} and {first_key} are in one group of the optimizer, and were saved with the {differs} "
                f"{values.get(differs)} and {first_values.get(differs)}"
            )
            raise DcpMismatchError(message, "make the groups of the optimizer as they were")
        loads.append(
            _state_load(optimizer, {**group, **values}, parameter, key, states.get(key, {}), metadata, objects)
        )
    return loads


def _by_key(start: str, metadata: DcpMetadata) -> dict[str, dict[str, str]]:
    """Return the names that begin with ``start`` by the parameter's key and by slot."""
    found = dict[str, dict[str, str]]()
    for name in (*metadata.tensors, *metadata.objects):
        if name.startswith(start):
            key, _, slot = name.removeprefix(start).rpartition(".")
            found.setdefault(key, {})[slot] = name
    return found


def _group_values(
    names: Mapping[str, str], metadata: DcpMetadata, objects: StoredObjects
) -> tuple[dict[str, Any], OptimizerLoad]:
    """Return hyperparameters; those that are tensors, such as a learning rate, are loaded later."""
    values, tensors = dict[str, Any](), dict[str, torch.Tensor]()
    for slot, name in names.items():
        stored = metadata.tensors.get(name)
        if stored is None:
            values[slot] = objects.read(name)
        else:
            values[slot] = tensors[name] = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    return values, OptimizerLoad(lambda: None, tensors)


def _same(values: Mapping[str, Any], others: Mapping[str, Any], name: str) -> bool:
    if name not in values or name not in others:
        return False
    value, other = values[name], others[name]
    return type(value) is type(other) and (isinstance(value, torch.Tensor) or bool(value == other))


def _state_load(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    parameter: nn.Parameter,
    key: str,
    names: Mapping[str, str],
    metadata: DcpMetadata,
    objects: StoredObjects,
) -> OptimizerLoad:
    state, tensors = dict[str, Any](), dict[str, torch.Tensor]()
    for slot, name in names.items():
        stored = metadata.tensors.get(name)
        if stored is None:
            state[slot] = objects.read(name)
            continue
        dtype, existing = getattr(torch, stored.dtype), optimizer.state.get(parameter, {}).get(slot)
        if isinstance(existing, torch.Tensor) and (existing.dtype, tuple(existing.shape)) == (dtype, stored.shape):
            state[slot] = existing
        elif stored.shape == tuple(parameter.shape) and stored.shape:
            state[slot] = torch.empty_like(parameter.detach(), dtype=dtype)
        elif stored.shape and isinstance(parameter, DTensor):
            message = f"{slot} of {key}, {list(stored.shape)}, has not the shape of its sharded parameter"
            raise DcpMismatchError(message, "do one step of the optimizer before the load, so that it exists")
        else:
            on_device = stored.shape or slot != "step" or group.get("capturable") or group.get("fused")
            state[slot] = torch.empty(stored.shape, dtype=dtype, device=parameter.device if on_device else "cpu")
        tensors[name] = state[slot]

    def apply() -> None:
        optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[parameter] = state

    return OptimizerLoad(apply, tensors)
