"""State of a training in PyTorch's distributed checkpoint (DCP): saved with one pipeline topology, loaded with another.

A checkpoint describes the whole model. Its names are

- ``NAME``: a parameter or persistent buffer, under its name in the whole model (``stage.N.NAME`` if the names of stages
  are local to them);
- ``optimizer.state.NAME.SLOT`` and ``optimizer.param_groups.NAME.KEY``: optimizer states and hyperparameters by the
  parameter's name, as ``torch.distributed.checkpoint.state_dict`` flattens them;
- ``pipeproof.extra.KEY``, ``pipeproof.rng.rankR.DEVICE`` and ``pipeproof.info``: entries that belong to no parameter.

So which rank holds which stage may differ between save and load. PyTorch writes and reads the tensors; other objects
are read with ``weights_only=True``, and the metadata, a pickle, is checked by ``state.dcp`` before PyTorch opens it.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipeproof.exec.train.plan_layers import Tie
from pipeproof.exec.train.torch.dcp_files import (
    RNG_RESTORED,
    Ranks,
    StoredObjects,
    contiguous,
    is_container,
    open_checked,
    read_checkpoint,
    require_plain,
    wrapped_container,
    write_checkpoint,
)
from pipeproof.exec.train.torch.model_names import (
    OPTIMIZER,
    HeldTensor,
    Location,
    ModelNames,
    Names,
    held_tensors,
    model_names,
    outline_of,
    ties_of,
)
from pipeproof.foreign_text import decode_json
from pipeproof.state.dcp.dcp_checkpoint import RESERVED, require_content
from pipeproof.state.dcp.dcp_metadata import DcpMetadata
from pipeproof.state.state_codes import DcpError, DcpMismatchError

# --- States of optimizers by the names of parameters ---


STATE, GROUP = f"{OPTIMIZER}.state.", f"{OPTIMIZER}.param_groups."
_NOT_HYPERPARAMETERS = ("params", "param_names")


def listed(optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return one or several optimizers as a list."""
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def parameters_of(
    optimizers: Sequence[torch.optim.Optimizer], held: Sequence[HeldTensor]
) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any], nn.Parameter, Location]]:
    """Yield each parameter of the optimizers, with its group and its first location.

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
    by_key = dict[str, dict[str, str]]()
    for name in (*metadata.tensors, *metadata.objects):
        if name.startswith(start):
            key, _, slot = name.removeprefix(start).rpartition(".")
            by_key.setdefault(key, {})[slot] = name
    return by_key


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
            raise DcpMismatchError(message, "do one step of the optimizer before the load: this creates it")
        else:
            on_device = stored.shape or slot != "step" or group.get("capturable") or group.get("fused")
            state[slot] = torch.empty(stored.shape, dtype=dtype, device=parameter.device if on_device else "cpu")
        tensors[name] = state[slot]

    def apply() -> None:
        optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[parameter] = state

    return OptimizerLoad(apply, tensors)


_EXTRA, _RNG, _INFO = (f"{RESERVED}{name}" for name in ("extra.", "rng.", "info"))


def save_dcp(
    directory: str | os.PathLike[str],
    stages: Mapping[int, nn.Module],
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    extra: Mapping[str, Any] | None = None,
    tied: Sequence[Tie] = (),
    names: Names = "auto",
    group: Any = None,
) -> None:
    """Save stages, optimizers, RNG states and ``extra`` of all ranks of ``group`` in one directory.

    Every rank calls it with its own stages, by global stage number. A stage that several ranks hold (data parallelism)
    is saved once, as is a weight that several stages use: one Parameter, or declared in ``tied``. Only the first rank's
    ``extra`` is saved: numbers, text, tensors, and lists and dicts of them. A directory that has a checkpoint is
    replaced at once: if processes are killed, it has the old or the new one.

    ``names`` is ``model`` if parameters have their names of the whole model, unique over all stages, and ``stage`` if
    names are local. Then only the same cut can load the checkpoint, on any ranks. ``auto`` takes ``stage`` only if all
    names that occur in two stages begin with a number, as in ``nn.Sequential``, and warns about it.

    Raises:
        DcpMismatchError: PP937, on all ranks: names are not unique, copies of a tied weight or of a buffer differ, or
            an optimizer has a parameter that no stage has.
        DcpError: PP936, on all ranks: the directory cannot be written.
    """
    ranks, path, extra = Ranks(group), Path(directory).absolute(), dict(extra or {})
    held = ranks.together(partial(held_tensors, stages))
    model = ranks.together(partial(model_names, ranks.gather(outline_of(held)), ties_of(stages, tied), names))
    if model.is_local and names == "auto" and ranks.rank == 0:
        warnings.warn(f"the names of stages are local to them: only the same cut can load {path}", stacklevel=2)
    require_equal_copies(ranks, held, model)
    states = ranks.together(partial(optimizer_entries, listed(optimizers), held, model.keys.__getitem__))
    owners = dict[str, int]()
    for table in ranks.gather({name: stage for name, (stage, _) in states.items()}):
        for name, stage in table.items():
            owners[name] = min(stage, owners.get(name, stage))
    content: dict[str, Any] = {
        model.keys[entry.location]: contiguous(entry.value)
        for entry in held
        if entry.stage == model.saved_by[model.keys[entry.location]]
    }
    content[OPTIMIZER] = {
        name.removeprefix(f"{OPTIMIZER}."): contiguous(value)
        for name, (stage, value) in states.items()
        if stage == owners[name]
    }
    ranks.together(partial(require_plain, extra))
    own: dict[str, Any] = {_INFO: _info_text(ranks, stages, model, extra)}
    own.update({f"{_EXTRA}{key}": wrapped_container(value) for key, value in extra.items()})
    if ranks.rank:
        own = {}
    own.update({f"{_RNG}rank{ranks.rank}.{device}": state for device, state in _rng_states().items()})
    content[RESERVED.rstrip(".")] = {name.removeprefix(RESERVED): value for name, value in own.items()}
    write_checkpoint(ranks, path, content)


def load_dcp(
    directory: str | os.PathLike[str],
    stages: Mapping[int, nn.Module],
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    tied: Sequence[Tie] = (),
    verify: bool = True,
    group: Any = None,
) -> dict[str, Any]:
    """Load the state of this rank's stages and optimizers, in place; return ``extra`` of the save.

    The number of ranks, the cut into stages and their placement may differ between save and load. The result also has
    ``rng_restored``: RNG states belong to ranks, and are restored only if every rank has the stages that it had.
    Without optimizers, their state in the checkpoint is not used. A checkpoint of other tools, with weights under their
    names in the model, is loaded in the same way.

    Everything is checked on all ranks before a tensor changes: metadata, lengths of files, names, shapes and types, and
    with ``verify`` the CRC-32 of all elements; each rank reads an equal part of them.

    Raises:
        DcpMismatchError: PP937, on all ranks: a tensor is missing, unexpected, or has another shape or type.
        DcpError: PP936, on all ranks: a file is missing, cut short or damaged, or the metadata is a foreign pickle.
    """
    ranks, path = Ranks(group), Path(directory).absolute()
    metadata = ranks.together(partial(open_checked, path))
    with StoredObjects(path, metadata) as objects:
        info = ranks.together(partial(_info, objects))
        held = ranks.together(partial(held_tensors, stages))
        mode: Names = "stage" if info.is_local else "model"
        model = ranks.together(partial(model_names, ranks.gather(outline_of(held)), ties_of(stages, tied), mode))
        key_of = partial(_key_in, metadata, info, model)
        targets = ranks.together(partial(_targets, path, held, key_of, metadata, info))
        used = set(model.aliases).union(*ranks.gather({*targets.tensors, *targets.extra_states.values()}))
        ranks.together(partial(_require_all_used, path, metadata, used))
        loads = ranks.together(partial(optimizer_loads, path, listed(optimizers), held, key_of, metadata, objects))
        rng = _rng_targets(ranks, stages, info, metadata)
        extra = ranks.together(partial(_extra, objects, info))
        extra_states = ranks.together(lambda: {at: objects.read(name) for at, name in targets.extra_states.items()})
    if verify:
        ranks.together(partial(require_content, path, metadata, ranks.rank, ranks.size))
    tensors = {**targets.tensors, **rng}
    for load in loads:
        tensors.update(load.tensors)
    read_checkpoint(ranks, path, tensors)
    for copy, key in targets.copies:
        copy.copy_(targets.tensors[key])
    for (stage, name), value in extra_states.items():
        stages[stage].load_state_dict({name: value}, strict=False)
    for load in loads:
        load.apply()
    for name, state in rng.items():
        (torch.set_rng_state if name.endswith(".cpu") else torch.cuda.set_rng_state)(state)
    return {**extra, RNG_RESTORED: bool(rng)}


def require_equal_copies(ranks: Ranks, held: Sequence[HeldTensor], model: ModelNames) -> None:
    """Refuse copies that differ: of weights that several stages use, and of buffers, which no gradient keeps equal."""
    stages_of = dict[str, set[int]]()
    for (stage, _), key in model.keys.items():
        stages_of.setdefault(key, set()).add(stage)
    digests = {
        entry.location: _md5_of(entry.value)
        for entry in held
        if isinstance(entry.value, torch.Tensor)
        and not isinstance(entry.value, DTensor)
        and (not isinstance(entry.value, nn.Parameter) or len(stages_of[model.keys[entry.location]]) > 1)
    }
    by_key = dict[str, tuple[Location, int, str]]()
    for rank, table in enumerate(ranks.gather(digests)):
        for location, digest in table.items():
            first, first_rank, expected = by_key.setdefault(model.keys[location], (location, rank, digest))
            if digest != expected:
                message = (
                    f"{first[1]} of stage {first[0]} on rank {first_rank} and {location[1]} of stage {location[0]} on "
                    f"rank {rank} are one tensor of the model, and have other bits"
                )
                fix = "reduce the gradients of a tied weight over its stages; broadcast buffers before the save"
                raise DcpMismatchError(message, fix)


def _md5_of(tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.md5(content.data, usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True)
class _Info:
    """The record of a save; defaults for a checkpoint of another tool."""

    is_local: bool = False
    topology: Sequence[Sequence[int]] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    wrapped: Sequence[str] = ()


def _info_text(ranks: Ranks, stages: Mapping[int, nn.Module], model: ModelNames, extra: Mapping[str, Any]) -> str:
    wrapped = [key for key, value in extra.items() if is_container(value)]
    table = {"is_local": model.is_local, "topology": ranks.gather(sorted(stages)), "aliases": dict(model.aliases)}
    return json.dumps({**table, "wrapped": wrapped})


def _rng_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _info(objects: StoredObjects) -> _Info:
    if _INFO not in objects.table:
        return _Info()
    try:
        return _Info(**decode_json(objects.read(_INFO)))
    except (ValueError, TypeError) as error:
        raise DcpError(f"{objects.path}: {_INFO} is damaged: {error}", "copy the checkpoint again") from error


@dataclass(slots=True)
class _Targets:
    """Tensors of this rank by key; further tensors with the same content; and extra states by stage and path."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: list[tuple[torch.Tensor, str]] = field(default_factory=list)
    extra_states: dict[Location, str] = field(default_factory=dict)


def _targets(
    path: Path, held: Iterable[HeldTensor], key_of: Callable[[Location], str], metadata: DcpMetadata, info: _Info
) -> _Targets:
    targets, loaded = _Targets(), dict[str, int]()
    for entry in held:
        key = key_of(entry.location)
        where = f"{entry.name} of stage {entry.stage}"
        if not isinstance(entry.value, torch.Tensor):
            if key not in metadata.objects:
                raise DcpMismatchError(f"{path} has no extra state {key}, {where}", "load the model that was saved")
            targets.extra_states[entry.stage, entry.path] = key
            continue
        stored = metadata.tensors.get(key)
        if stored is None:
            fix = "load the model that was saved"
            if info.is_local:
                fix = f"{path} has names that are local to stages: load it with the same cut into stages"
            raise DcpMismatchError(f"{path} has no tensor {key}, {where}", fix)
        dtype = str(entry.value.dtype).removeprefix("torch.")
        if (dtype, tuple(entry.value.shape)) != (stored.dtype, stored.shape):
            message = (
                f"{where} is {dtype} {list(entry.value.shape)}, and {path} has {key} as {stored.dtype} "
                f"{list(stored.shape)}"
            )
            raise DcpMismatchError(message, "load the model that was saved, in the type that it was saved in")
        if key not in targets.tensors:
            targets.tensors[key], loaded[key] = entry.value.detach(), id(entry.value)
        elif loaded[key] != id(entry.value):
            targets.copies.append((entry.value.detach(), key))
    return targets


def _key_in(metadata: DcpMetadata, info: _Info, model: ModelNames, location: Location) -> str:
    """Return the name that the checkpoint has for a tensor: a tied weight may have been saved under its other name."""
    key = model.keys[location]
    if key in metadata.tensors or key in metadata.objects:
        return key
    if key in info.aliases:
        return info.aliases[key]
    return next((alias for alias, of in model.aliases.items() if of == key and alias in metadata.tensors), key)


def _require_all_used(path: Path, metadata: DcpMetadata, used: set[str]) -> None:
    names = sorted(
        name
        for name in metadata.tensors
        if name not in used and not name.startswith((STATE, GROUP, "optim.", RESERVED))
    )
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        message = f"{path} has the tensor {names[0]}{more}, which no stage of any rank has"
        raise DcpMismatchError(message, "load the whole model: all its stages, on the ranks of one group")


def _extra(objects: StoredObjects, info: _Info) -> dict[str, Any]:
    """Return ``extra`` of the save; tensors in it are loaded as objects."""
    extra = {}
    for name in objects.table:
        if name.startswith(_EXTRA):
            key, value = name.removeprefix(_EXTRA), objects.read(name)
            extra[key] = value[0] if key in info.wrapped else value
    return extra


def _rng_targets(
    ranks: Ranks, stages: Mapping[int, nn.Module], info: _Info, metadata: DcpMetadata
) -> dict[str, torch.Tensor]:
    """Return the RNG states to load by name: none, if another topology saved them."""
    if ranks.gather(sorted(stages)) != [list(numbers) for numbers in info.topology]:
        return {}
    names = {f"{_RNG}rank{ranks.rank}.{device}": state for device, state in _rng_states().items()}
    is_same = all(name in metadata.tensors and metadata.tensors[name].shape == (len(s),) for name, s in names.items())
    return {name: torch.empty_like(state) for name, state in names.items()} if all(ranks.gather(is_same)) else {}
