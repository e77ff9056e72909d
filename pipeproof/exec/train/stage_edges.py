"""Edges of a model that is not a chain: tensors for later stages than the next, and how stages pass them on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.plan_layers import Cut
from pipeproof.exec.train.stage_boundaries import Form, leaves_of

Edges = Mapping[str, Sequence[Any]]
"""By name: the stage that makes a tensor, the later stages that use it, and the route (default ``relay``)."""


@dataclass(frozen=True, slots=True)
class StageEdges:
    """The edges of all stages by name: the producer, the consumers in ascending order, and the route."""

    edges: dict[str, tuple[int, tuple[int, ...], str]]

    @classmethod
    def of(cls, of_script: Edges, plan: Mapping[str, Any], layers: Cut) -> StageEdges:
        """The edges from the script's argument, or from its plan with the layers of each stage.

        Raises:
            PipelineError: both differ, or an edge does not lead to later stages.
        """
        stage_of = {name: number for number, names in enumerate(layers) for name in names}
        planned: dict[str, Sequence[Any]] = {}
        for edge in plan.get("edges", ()):
            unknown = [name for name in (edge["producer"], *edge["consumers"]) if name not in stage_of]
            if unknown:
                raise PipelineError(f"the plan's edge {edge['name']!r} names {unknown[0]!r}: the layers are {layers}")
            users = [stage_of[name] for name in edge["consumers"]]
            planned[edge["name"]] = stage_of[edge["producer"]], users, edge.get("route", "relay")
        by_script, by_plan = (
            {
                name: (producer, tuple(sorted({*users})), *(route or ["relay"]))
                for name, (producer, users, *route) in edges.items()
            }
            for edges in (of_script, planned)
        )
        if by_script and by_plan and by_script != by_plan:
            raise PipelineError(
                f"the plan has the edges {by_plan}, and the argument {by_script}: leave out one of them"
            )
        for name, (producer, users, route) in (by_script or by_plan).items():
            if (
                not name.isidentifier() or route not in ("relay", "direct") or not users
                or not 0 <= producer < users[0] or users[-1] >= len(layers)
            ):  # fmt: skip
                raise PipelineError(
                    f"edges has {name!r}: ({producer}, {[*users]}, {route!r}): give a name of letters, digits and _, "
                    f"the stage that makes the tensor, the later ones that use it, of 0 to {len(layers) - 1}, and "
                    "'relay' or 'direct'"
                )
        return cls(by_script or by_plan)

    def before(self, number: int) -> list[str]:
        """The edges that cross the boundary before a stage, in their order."""
        return [
            name
            for name, (producer, users, route) in self.edges.items()
            if route == "relay" and producer < number <= users[-1]
        ]

    def direct(self, number: int, *, makes: bool) -> list[str]:
        """The direct edges that a stage makes, or that it uses."""
        return [
            name
            for name, (producer, users, route) in self.edges.items()
            if route == "direct" and (number == producer if makes else number in users)
        ]

    def leaving(self, number: int) -> list[str]:
        """The edges that leave a stage, in the order of its last outputs."""
        return self.before(number + 1) + self.direct(number, makes=True)

    def input_form(self, number: int, form: Form, num_leaves: int) -> Form:
        """The structure of a stage's input, where the stage before returned ``num_leaves`` in a form."""
        made, used = self.direct(number - 1, makes=True), self.direct(number, makes=False)
        if not made and not used:
            return form
        keys = [*(form.keys or map(str, range(num_leaves)))]
        return Form("dict", (*keys[: len(keys) - len(made)], *used))

    def of_stage(self, number: int) -> PassedEdges | None:
        """The edges of a stage; None if they change neither its input nor its output."""
        arriving = self.before(number) + self.direct(number, makes=False)
        leaving = self.leaving(number)
        is_named = bool(arriving or self.direct(number - 1, makes=True))
        if not is_named and not leaving:
            return None
        made = [name for name, (producer, *_) in self.edges.items() if producer == number]
        used = [name for name, (_, users, _) in self.edges.items() if number in users]
        return PassedEdges(number, is_named, arriving, used, leaving, made)

    def plan_entries(self, layers: Cut, outputs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The plan's ``edges``; ``outputs`` are the entries of their tensors by name."""
        return [
            {"name": name, "producer": layers[made][-1], "consumers": [layers[n][0] for n in users], "route": route}
            | dict(outputs[name])
            for name, (made, users, route) in self.edges.items()
        ]


@dataclass(frozen=True, slots=True)
class PassedEdges:
    """The names of a stage's edges: those that arrive, that it uses, that leave, and that it makes.

    Where ``is_named``, the input is a dict: the output of the stage before by position (or by name, if that is a dict),
    then the edges. A stage with edges that leave returns such a dict. A tensor that it makes is under the edge's name
    in the dict that it returns, or is its output itself.
    """

    number: int
    is_named: bool
    arriving: Sequence[str]
    used: Sequence[str]
    leaving: Sequence[str]
    made: Sequence[str]

    def split(self, received: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        """The output of the stage before, by position and by name, and the edges that arrived."""
        edges = {name: received[name] for name in self.arriving}
        named = {key: value for key, value in received.items() if not key.isdigit() and key not in edges}
        return [value for key, value in received.items() if key.isdigit()], named, edges

    def output(self, value: Any, arrived: Mapping[str, Any], tensor_type: type[Any]) -> Any:
        """The output with the edges that leave the stage; without any, the output itself.

        A tensor that the stage passes on is copied, because the memory of a message may be reused.

        Raises:
            PipelineError: the stage does not return the tensor of an edge that it makes.
        """
        if not self.leaving:
            return value
        what = f"stage {self.number}"
        form, leaves = leaves_of(value, what, tensor_type)
        keys = form.keys or tuple(map(str, range(len(leaves))))
        outputs = dict(zip(keys, leaves, strict=True))
        own = {name: outputs.pop(name) if name in outputs else value for name in self.made}
        if not outputs or not all(tensor is not value or form.kind == "tensor" for tensor in own.values()):
            raise PipelineError(
                f"{what} makes the edges {', '.join(own)}: return a tensor, which is the edge's too, or a dict with "
                "the output and the tensor of each edge by its name"
            )
        return outputs | {name: own[name] if name in own else arrived[name].clone() for name in self.leaving}
