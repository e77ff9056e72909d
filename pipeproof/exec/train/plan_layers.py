"""Layers of the plan of a script's modules: the layers of each stage, their weights' names, and shared weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.stages.describe.partition import even_shares

Tie = Mapping[int, str]
"""One weight that several stages use: its name in each of them, by global stage number."""

Cut = list[list[str]]
"""The names of layers by global stage."""


def stage_name(number: int) -> str:
    """Name of a layer that is a whole stage."""
    return f"stage.{number}"


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """One layer of a stage as its rank describes it: JSON values.

    ``kind`` is its class; ``parameters`` and ``outputs`` have the keys of the plan's layers. ``names`` are the names of
    ``parameters`` in the stage. ``shared`` has the names of weights that it uses and that belong to other layers of the
    stage. ``outputs`` is empty for the last layer of the model. ``activation_bytes`` is measured, or None.
    """

    name: str
    kind: str
    parameters: Sequence[Mapping[str, Any]]
    names: Sequence[str]
    shared: Sequence[str] = ()
    outputs: Sequence[Mapping[str, Any]] = ()
    activation_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class StageFacts:
    """The layers of one stage in order.

    ``edges`` are its tensors for stages after the next one, by name, with the keys of an output.
    """

    layers: tuple[LayerFacts, ...]
    edges: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def whole(
        cls, number: int, kind: str, parameters: Sequence[Mapping[str, Any]],
        outputs: Sequence[Mapping[str, Any]] = (), activation_bytes: int | None = None,
    ) -> StageFacts:  # fmt: skip
        """A stage that is one layer; its ``parameters`` have their names in the stage."""
        names = [weight["name"] for weight in parameters]
        return cls((LayerFacts(stage_name(number), kind, parameters, names, (), outputs, activation_bytes),))


def merged_ties(reports: Iterable[Mapping[str, Mapping[str, str]]]) -> list[dict[int, str]]:
    """The ties of a model from the ties that each rank sees, by key and by stage (a text, from JSON)."""
    by_key: dict[str, dict[int, str]] = {}
    for of_rank in reports:
        for key, names in of_rank.items():
            by_key.setdefault(key, {}).update({int(stage): name for stage, name in names.items()})
    return [dict(sorted(names.items())) for names in by_key.values() if len(names) > 1]


def names_in_plan(stages: Sequence[StageFacts], ties: Sequence[Tie]) -> list[dict[str, str]]:
    """The plan's name of each weight of each stage: a tied weight has the name that its first stage gives it."""
    planned = [
        {
            name: f"{layer.name}.{weight['name']}"
            for layer in facts.layers
            for name, weight in zip(layer.names, layer.parameters, strict=True)
        }
        for facts in stages
    ]
    for tie in ties:
        for number, name in tie.items():
            planned[number][name] = planned[min(tie)][tie[min(tie)]]
    return planned


def layers_content(stages: Sequence[StageFacts], ties: Sequence[Tie]) -> list[dict[str, Any]]:
    """The plan's ``model.layers``. A weight that several layers use belongs to the first; the others borrow it."""
    planned = names_in_plan(stages, ties)
    layers = []
    for names, layer in (
        (names, layer) for names, facts in zip(planned, stages, strict=True) for layer in facts.layers
    ):
        content: dict[str, Any] = {"name": layer.name}
        if layer.kind:
            content["kind"] = layer.kind
        if layer.outputs:
            content["out"] = [*layer.outputs]
        own = {f"{layer.name}.{weight['name']}": weight for weight in layer.parameters}
        used = [names[name] for name in (*layer.names, *layer.shared)]
        content["parameters"] = [own[name] for name in used if name in own]
        borrowed = [name for name in dict.fromkeys(used) if name not in own]
        if borrowed:
            content["borrows"] = borrowed
        if layer.activation_bytes is not None:
            content["activation_bytes"] = layer.activation_bytes
        layers.append(content)
    return layers


def declared_cut(content: Mapping[str, Any], num_stages: int) -> Cut | None:
    """The layers of each stage by the keys of a plan, not yet validated; None without layers and stages."""
    stages, layers = content.get("stages"), content.get("model", {}).get("layers")
    if isinstance(stages, list | tuple) and all(isinstance(names, list | tuple) for names in stages):
        return [[*names] for names in stages]
    if stages or not layers:
        return None
    names = [str(layer.get("name")) if isinstance(layer, Mapping) else "" for layer in layers]
    ends = [0, *accumulate(even_shares(len(names), num_stages))]
    return [names[begin:end] for begin, end in pairwise(ends)]


def planned_cut(content: Mapping[str, Any] | None, own: Cut) -> Cut:
    """The layers of each stage for a plan that may declare them; ``own`` are the layers from the cut.

    A plan with one layer for each stage stays so.

    Raises:
        PipelineError: the plan has the same layers in other stages.
    """
    declared = None if content is None else declared_cut(content, len(own))
    if declared is None or declared == own:
        return own
    if _layers_in(own) and _layers_in(declared) == _layers_in(own):
        numbers = [sum("layer." in name for name in names) for names in declared]
        is_model = any(name.endswith(("embed", "head")) for name in _layers_in(own))
        cutter = ("stages_of_transformers", "blocks_per_stage") if is_model else ("stages_of_sequential", "sizes")
        raise PipelineError(
            f"the plan has the stages {_shown(declared)}, and the model was cut into {_shown(own)}: cut it by "
            f"{cutter[0]}(.., {len(numbers)}, {cutter[1]}={numbers}), or leave out `stages` and `model` of the plan"
        )
    if all(len(names) == 1 for names in declared):
        return [[stage_name(number)] for number in range(len(own))]
    return own


def _layers_in(cut: Cut) -> list[str]:
    """All layers in order, without stages that only pass their input on."""
    return [name for name in chain(*cut) if not re.fullmatch(r"stage\.\d+", name)]


def _shown(cut: Cut) -> str:
    return "; ".join(f"{names[0]} to {names[-1]}" if len(names) > 1 else ", ".join(names) or "none" for names in cut)
