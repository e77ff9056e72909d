"""Maps of names and of AOA statements, and the proof that a map keeps the meaning of each element.

Even a bijection may exchange elements. A claimed map is compared with the correct one. Both read and make the same
tensors; where they differ, the finding names the expected and the actual elements.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.finding import Finding
from pipeproof.specs.model import ModelSpec
from pipeproof.state.aoa.aoa_engine import program_map
from pipeproof.state.aoa.read_statements import read_file
from pipeproof.state.aoa.tensor_families import metas_of_checkpoint, metas_of_plan
from pipeproof.state.checkpoint import SUFFIX, Checkpoint
from pipeproof.state.names.convention import OWN_NAMES
from pipeproof.state.names.convention_maps import map_from_convention, map_to_convention, model_of
from pipeproof.state.names.convention_tensors import plan_with
from pipeproof.state.names.deepseek_v4 import tables_of
from pipeproof.state.names.part_tables import CONFIG_FILE, config_of
from pipeproof.state.open_checkpoint import OPEN_INDEX
from pipeproof.state.region_text import and_more, number_of_expert, region_meaning, tensor_range_text, weight_name
from pipeproof.state.regions import Region, intersect
from pipeproof.state.reshard.reshard_codes import NOT_CONVERTIBLE, RefusedError
from pipeproof.state.reshard.reshard_targets import ReshardTask, require_index, without_optimizer_state
from pipeproof.state.reshard.shard_layout import ShardLayout
from pipeproof.state.safetensors_header import make_header
from pipeproof.state.state_layout import whole_state
from pipeproof.state.tensor_map import MapDifference, RegionCopy, StateMap, map_differences
from pipeproof.verify.layouts.index_maps import OTHER_INDICES

_EXPERT = re.compile(r"experts\.\d+\.")
_SHOWN = 12
_PAIRS = frozenset({"gate", "up"})


class _OwnRegion(NamedTuple):
    name: str
    region: Region


class _Mismatch(NamedTuple):
    """A difference, with the expected and the actual region in pipeproof's own tensors, where they exist."""

    difference: MapDifference
    expected: _OwnRegion | None
    actual: _OwnRegion | None


def prove_meaning(
    claimed: StateMap, correct: StateMap, model: ModelSpec, target: ShardLayout | None = None
) -> tuple[Finding, ...]:
    """PP211 for each kind of mistake by which a claimed map reads other elements than the correct map.

    Experts, fused queries, keys and values, gate and up have texts of their own. With ``target`` the finding names the
    rank that receives them. Tensors that only one map makes are not compared: that is a matter of names.
    """
    kinds: dict[str, list[_Mismatch]] = {}
    meanings = _OwnElements(correct, model)
    for difference in map_differences(claimed, correct):
        regions = (meanings.own_region(difference, copy) for copy in (difference.second, difference.first))
        mismatch = _Mismatch(difference, *regions)
        kinds.setdefault(_kind(mismatch), []).append(mismatch)
    return tuple(_finding(kind, mismatches, claimed, meanings, target) for kind, mismatches in kinds.items())


class _OwnElements:
    """Elements of any tensors in terms of pipeproof's own tensors, the correct map's source or target."""

    def __init__(self, correct: StateMap, model: ModelSpec) -> None:
        self.model = model
        self._into_own = all(weight_name(name) is not None for name in correct.tensors)
        self._readers = correct.readers()

    def own_region(self, difference: MapDifference, copy: RegionCopy) -> _OwnRegion | None:
        """Return the elements that a copy reads; None for zeros, and for elements without a name of pipeproof's."""
        if copy.source is None:
            return None
        if not self._into_own:
            return _OwnRegion(copy.source, copy.source_region) if weight_name(copy.source) is not None else None
        if copy == difference.second:
            return _OwnRegion(difference.tensor, difference.region)
        for reader in self._readers.get(copy.source, ()):
            common = intersect(reader.region, copy.source_region)
            if common is not None:
                return _OwnRegion(reader.tensor, _through(reader.copy, common))
        return None

    def text(self, copy: RegionCopy, own_region: _OwnRegion | None) -> str:
        """Describe the elements that a copy reads, with their meaning in the model."""
        if copy.source is None:
            return "zeros"
        stops = [reader.region.stops for reader in self._readers.get(copy.source, ())] or [copy.source_region.stops]
        shape = tuple(map(max, *stops)) if len(stops) > 1 else stops[0]
        meaning = own_region and region_meaning(own_region.name, own_region.region, self.model)
        return tensor_range_text(copy.source, copy.source_region, shape, meaning)


def _through(copy: RegionCopy, source_region: Region) -> Region:
    inside = source_region.relative_to(copy.source_region)
    if copy.permutation is not None:
        inside = inside.permuted(copy.permutation)
    return inside.shifted(copy.region.offsets)


def _kind(mismatch: _Mismatch) -> str:
    if mismatch.difference.first.source is None or mismatch.difference.second.source is None:
        return "zeros"
    if _experts_of(mismatch) is not None:
        return "experts"
    names = [None if part is None else weight_name(part.name) for part in (mismatch.expected, mismatch.actual)]
    if None in names:
        return "other"
    expected, actual = (str(name) for name in names)
    if expected.endswith("attn.qkv.weight") and actual.endswith("attn.qkv.weight"):
        return "qkv"
    if {expected.split(".")[-2], actual.split(".")[-2]} == _PAIRS:
        return "gate and up"
    return "other"


def _experts_of(mismatch: _Mismatch) -> tuple[int, int] | None:
    """Return the expected and the actual expert, if the regions belong to two experts."""
    expected, actual = (
        number_of_expert(copy.source or "", copy.source_region)
        for copy in (mismatch.difference.second, mismatch.difference.first)
    )
    return None if expected is None or actual is None or expected == actual else (expected, actual)


def _finding(
    kind: str, mismatches: list[_Mismatch], claimed: StateMap, meanings: _OwnElements, target: ShardLayout | None
) -> Finding:
    first = mismatches[0]
    difference = first.difference
    where = tensor_range_text(difference.tensor, difference.region, claimed.tensors[difference.tensor].shape)
    actual, expected = meanings.text(difference.first, first.actual), meanings.text(difference.second, first.expected)
    order = " with its dims in another order" if actual == expected else ""
    begin = {"qkv": "the fused qkv is not split by groups of heads: ", "gate and up": "gate and up are exchanged: "}
    if kind == "experts":
        begin["experts"] = f"{_experts_text(mismatches, meanings.model)}: "
    rank = "" if target is None else _receiver_text(difference, target)
    more = and_more(len({mismatch.difference.tensor for mismatch in mismatches}) - 1, "tensor")
    fixes = {
        "experts": "read each expert by its own number, counted over all ranks",
        "qkv": "for each group of heads there are its queries, then its key, then its value: split between groups",
        "gate and up": "exchange the two: the gate is what goes through SiLU",
        "zeros": "only padding and what is added are zeros",
        "other": "read each tensor by its own name",
    }
    message = f"{begin.get(kind, '')}`{where}` would be `{actual}`, and is `{expected}`{order}{rank}{more}"
    return OTHER_INDICES.finding(message, help=fixes[kind])


def _experts_text(mismatches: list[_Mismatch], model: ModelSpec) -> str:
    """Describe the order of experts in the first tensor, or family of tensors, that differs."""
    family = _family(mismatches[0].difference)
    comes_for = dict(
        pair
        for mismatch in mismatches
        if _family(mismatch.difference) == family and (pair := _experts_of(mismatch)) is not None
    )
    number = max(*comes_for, *comes_for.values()) + 1 if model.moe is None else model.moe.num_experts
    order = [comes_for.get(expert, expert) for expert in range(number)]
    as_strings = sorted(range(number), key=str)
    if order == as_strings or sorted(range(number), key=order.__getitem__) == as_strings:
        return f"experts are in the order of strings: {_listed(as_strings)}"
    twice = sorted(expert for expert in set(order) if order.count(expert) > 1)
    if twice:
        missing = sorted(set(range(number)) - set(order))
        return f"experts {_listed(missing)} (of {number}) are missing, and {_listed(twice)} are repeated"
    expert = next(iter(comes_for))
    return f"expert {comes_for[expert]} stands for expert {expert} (of {number})"


def _family(difference: MapDifference) -> tuple[str, ...]:
    """Return a tensor and its source, with the number of the expert removed."""
    names = (difference.tensor, difference.second.source or "")
    return tuple(_EXPERT.sub("experts.", name) for name in names)


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return f"{shown}, .." if len(numbers) > _SHOWN else shown


def _receiver_text(difference: MapDifference, target: ShardLayout) -> str:
    """Return the first rank that receives some of it."""
    for held in target.shards.get(difference.tensor, ()):
        if held.rank is not None and any(
            intersect(region, difference.region) is not None for _, region in held.shard.regions()
        ):
            return f", on {held.where}"
    return ""


def map_of_names(convention: str, source: Checkpoint, plan: LoweredPlan | None) -> StateMap:
    """Return the map from a source under the convention's names to a plan's tensors.

    Without a plan, to the convention's.

    Raises:
        PipeproofError: The convention has no names for the model, tied copies differ, or the source does not describe
            its model.
    """
    if plan is not None:
        return map_from_convention(convention, source, plan.spec)
    return map_to_convention(convention, source.tensors, _model(source, None), _dtype(source))


def require_other_names(convention: str, path: Path) -> None:
    """Refuse to read pipeproof's own output under the names of other tools.

    Raises:
        RefusedError: The convention is not pipeproof's own.
    """
    if convention != OWN_NAMES:
        message = f"the tensors of {path} have pipeproof's own names, and not the names of `{convention}`"
        raise RefusedError(NOT_CONVERTIBLE, message, "leave `--names` out")


def as_directory(task: ReshardTask, source: Checkpoint, convention: str) -> ReshardTask:
    """Turn a task for one file with names of transformers into a task for a directory, with the model's configuration.

    Tables of experts by token id get a second file, and both an index.

    Raises:
        PipeproofError: The source does not describe its model.
    """
    files = {CONFIG_FILE: _json(config_of(_model(source, None), _dtype(source), convention))}
    tables, target = _tables(source), task.target
    if not tables:
        return replace(task, one_file=None, extra_files=files)
    first, second = (f"model-0000{number}-of-00002{SUFFIX}" for number in (1, 2))
    start, header = make_header({name: ("int64", table.shape) for name, table in tables.items()}, target.metadata)
    content = b"".join((start, *(tables[name].astype("<i8").tobytes() for name in header.arrays)))
    size = target.size_bytes + len(content) - len(start)
    weight_map = {**dict.fromkeys(target.tensors, first), **dict.fromkeys(tables, second)}
    index = _json({"metadata": {"total_size": size}, "weight_map": weight_map})
    (shards,) = target.files.values()
    target = replace(target, files={first: shards}, ranks={first: 0})
    return replace(task, target=target, one_file=None, extra_files={**files, second: content, OPEN_INDEX: index})


def require_no_tables(convention: str, source: Checkpoint) -> None:
    """Refuse another output than a directory for names of a model with tables of experts, which have no place in it.

    Raises:
        PipeproofError: The model has tables, or the source does not describe it.
    """
    if convention != OWN_NAMES and _tables(source):
        message = f"`{convention}` has tables of experts by token id, and only a directory of its files gets them"
        fix = "name a directory: an OUT without an ending, of the default format"
        raise RefusedError(NOT_CONVERTIBLE, message, fix)


def _tables(source: Checkpoint) -> dict[str, npt.NDArray[np.int64]]:
    model, seed = _model(source, None), require_index(source, "tables depend on `run.seed`").values.get("run.seed", 0)
    return tables_of(plan_with(model, seed=seed))


def _json(content: Mapping[str, object]) -> str:
    return json.dumps(content, indent=2) + "\n"


def meaning_findings(
    convention: str, claimed: StateMap, source: Checkpoint, plan: LoweredPlan | None, target: ShardLayout
) -> tuple[Finding, ...]:
    """Return findings where a map of user-written statements moves elements to elements of another meaning.

    Raises:
        PipeproofError: See ``map_of_names``.
    """
    return prove_meaning(claimed, map_of_names(convention, source, plan), _model(source, plan), target)


def _dtype(source: Checkpoint) -> str:
    return next((entry.dtype for entry in source.tensors.values() if entry.kind == "weight"), "float32")


def _model(source: Checkpoint, plan: LoweredPlan | None) -> ModelSpec:
    if plan is not None:
        return plan.spec.gpt
    return model_of(require_index(source, "names depend on the model").values)


def map_of_statements(file: Path, source: Checkpoint, plan: LoweredPlan | None, *, weights_only: bool) -> StateMap:
    """Return the map to a plan's tensors, or without a plan to all tensors that the statements make.

    Raises:
        AoaError: The file or a statement cannot be read, or a statement does not match the tensors.
    """
    before, after = metas_of_checkpoint(source), None if plan is None else metas_of_plan(plan)
    if weights_only:
        before = {name: before[name] for name in without_optimizer_state(source.tensors)}
    if weights_only and plan is not None and after is not None:
        after = {name: after[name] for name in without_optimizer_state(whole_state(plan))}
    return program_map(read_file(file), before, after)
