"""Names of a whole model's tensors, from the stages of all ranks: unique, and one for a weight that several use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeproof.exec.train.plan_layers import Tie
from pipeproof.state.dcp.dcp_checkpoint import RESERVED
from pipeproof.state.state_codes import DcpMismatchError

Names = Literal["auto", "model", "stage"]
"""Meaning of the names in a stage: of the whole model, or of this stage alone; ``auto`` decides."""
Location = tuple[int, str]
"""Stage number, and name in that stage."""
OPTIMIZER = "optimizer"
"""First part of the names of optimizer states and hyperparameters in a checkpoint."""
_FIX_NAMES = (
    "declare a weight that both use as `tied=[{stage: name, ..}]`; if all names are local to their stages, give "
    '`names="stage"`, and only the same cut can load'
)


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A parameter, buffer or extra state of a stage; ``path`` is its name in ``state_dict``, with wrappers."""

    stage: int
    name: str
    path: str
    value: Any

    @property
    def location(self) -> Location:
        """Stage and name."""
        return self.stage, self.name


@dataclass(frozen=True, slots=True)
class ModelNames:
    """Names of a whole model: by stage and local name the key in the checkpoint, and the stage that saves each key."""

    keys: Mapping[Location, str]
    saved_by: Mapping[str, int]
    aliases: Mapping[str, str]
    """The key of each further name of a tied weight."""
    is_local: bool


Outline = tuple[dict[int, list[str]], list[list[Location]]]
"""Names by stage, and the locations of tensors that are in several stages."""


def held_tensors(stages: Mapping[int, nn.Module]) -> list[HeldTensor]:
    """Return parameters, persistent buffers and extra states of stages, in the order of stages."""
    held = []
    for number in sorted(stages):
        for path, value in stages[number].state_dict(keep_vars=True).items():
            held.append(HeldTensor(number, _name_of(stages[number], path), path, value))
    return held


def _name_of(module: nn.Module, path: str) -> str:
    """Return a name without the parts that wrappers add: compiled modules, checkpoint wrappers, and DDP."""
    owner, parts = module, []
    for part in path.split("."):
        is_wrapper = part in ("_orig_mod", "_checkpoint_wrapped_module")
        if not is_wrapper and not (part == "module" and isinstance(owner, DistributedDataParallel)):
            parts.append(part)
        owner = getattr(owner, part, None)
    return ".".join(parts)


def unwrapped(stage: nn.Module) -> nn.Module:
    """Return the stage that DDP or ``torch.compile`` wraps, or the module itself."""
    while isinstance(stage, DistributedDataParallel) or hasattr(stage, "_orig_mod"):
        stage = stage.module if isinstance(stage, DistributedDataParallel) else stage._orig_mod  # noqa: SLF001
    return stage


def outline_of(held: Iterable[HeldTensor]) -> Outline:
    """Return names by stage, and the locations of each tensor that is in several stages."""
    names, same = dict[int, list[str]](), dict[int, list[Location]]()
    for entry in held:
        names.setdefault(entry.stage, []).append(entry.name)
        if isinstance(entry.value, torch.Tensor):
            same.setdefault(id(entry.value), []).append(entry.location)
    return names, [locations for locations in same.values() if len(locations) > 1]


def ties_of(stages: Mapping[int, nn.Module], tied: Sequence[Tie]) -> list[list[Location]]:
    """Return the locations of each weight that ``tied`` or the stages declare as tied."""
    declared = [*tied, *getattr(stages, "tied", ())]
    return [[(stage, name.replace("_orig_mod.", "")) for stage, name in sorted(one.items())] for one in declared]


def model_names(outlines: Sequence[Outline], tied: Sequence[Sequence[Location]], names: Names) -> ModelNames:
    """Return the names of the whole model from the names in all ranks' stages.

    Raises:
        DcpMismatchError: Two weights have one name.
    """
    by_stage = dict[int, list[str]]()
    for table, _ in outlines:
        for stage, local in table.items():
            if sorted(by_stage.setdefault(stage, local)) != sorted(local):
                odd = min(set(local).symmetric_difference(by_stage[stage]))
                message = f"two ranks hold stage {stage}, and only one of them has {odd}"
                raise DcpMismatchError(message, "build the same module on all ranks of a stage")
    locations = [(stage, name) for stage in sorted(by_stage) for name in by_stage[stage]]
    first = _first_of_ties(locations, [*(tie for _, ties in outlines for tie in ties), *tied])
    owners, conflicts = dict[str, Location](), list[tuple[Location, Location]]()
    for location in locations:
        owner = owners.setdefault(first[location][1], first[location])
        if owner != first[location]:
            conflicts.append((owner, location))
    are_numbers = all(name.partition(".")[0].isdecimal() for _, (_, name) in conflicts)
    is_local = names == "stage" or (names == "auto" and bool(conflicts) and are_numbers)
    if conflicts and not is_local:
        (stage, _), (other, name) = conflicts[0]
        if (stage, name) in first and stage != other:
            message = f"stages {stage} and {other} both have {name}, and it is not declared as one weight"
        else:
            message = f"{name} of stage {other} has the name of another weight of stage {stage}"
        raise DcpMismatchError(message, _FIX_NAMES)
    keys = {at: f"stage.{first[at][0]}.{first[at][1]}" if is_local else first[at][1] for at in locations}
    for location, key in keys.items():
        if key.startswith((f"{OPTIMIZER}.", RESERVED)):
            message = f"{location[1]} of stage {location[0]} begins as names of optimizer states and of pipeproof do"
            raise DcpMismatchError(message, "rename the module")
    aliases = {} if is_local else {name: keys[stage, name] for stage, name in locations if name not in owners}
    return ModelNames(keys, {keys[at]: first[at][0] for at in locations}, aliases, is_local)


def _first_of_ties(locations: Sequence[Location], ties: Iterable[Sequence[Location]]) -> Mapping[Location, Location]:
    """Return for each location the first location, in the order of stages, of the same weight."""
    order = {location: number for number, location in enumerate(locations)}
    first = {location: location for location in locations}

    def root(location: Location) -> Location:
        while first[location] != location:
            location = first[location]
        return location

    for tie in ties:
        stages_held = {stage for stage, _ in locations}
        missing = next((at for at in tie if at not in order and at[0] in stages_held), None)
        if missing is not None:
            message = f"the tied weight {missing[1]} is declared for stage {missing[0]}, which has no such parameter"
            raise DcpMismatchError(message, "correct `tied`")
        roots = sorted({root(location) for location in tie if location in order}, key=order.__getitem__)
        for other in roots[1:]:
            first[other] = roots[0]
    return {location: root(location) for location in locations}
