"""Edges of a model that is not a chain: tensors for later stages than the next, and the modules that pass them on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

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

    def input_form(self, number: int, form: Form, num_leaves: int) -> Form:
        """The structure of a stage's input, where the stage before returned ``num_leaves`` in a form."""
        made, used = self.direct(number - 1, makes=True), self.direct(number, makes=False)
        if not made and not used:
            return form
        keys = [*(form.keys or map(str, range(num_leaves)))]
        return Form("dict", (*keys[: len(keys) - len(made)], *used))

    def wrapped(self, number: int, module: nn.Module) -> nn.Module:
        """A stage in a wrapper that makes, takes and passes on the tensors of edges.

        Also behind a stage with direct edges, which returns a dict: the wrapper gives its output by position.
        """
        arriving = self.before(number) + self.direct(number, makes=False)
        leaving = self.before(number + 1) + self.direct(number, makes=True)
        if not arriving and not leaving and not self.direct(number - 1, makes=True):
            return module
        made = [name for name, (producer, *_) in self.edges.items() if producer == number]
        used = [name for name, (_, users, _) in self.edges.items() if number in users]
        return EdgeStage(number, module, arriving, used, leaving, made)

    def plan_entries(self, layers: Cut, outputs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The plan's ``edges``; ``outputs`` are the entries of their tensors by name."""
        return [
            {"name": name, "producer": layers[made][-1], "consumers": [layers[n][0] for n in users], "route": route}
            | dict(outputs[name])
            for name, (made, users, route) in self.edges.items()
        ]


class EdgeStage(nn.Module):  # type: ignore[misc]  # torch is untyped
    """A stage that returns a dict: its output by position (or by name, if it is a dict), then the edges that leave it.

    The stage takes its edges as keyword arguments. A tensor that it makes is under the edge's name in the dict that it
    returns, or is its output itself. A tensor that it passes on is copied, because the memory of a message may be
    reused.
    """

    def __init__(
        self, number: int, module: nn.Module, arriving: Sequence[str], used: Sequence[str], leaving: Sequence[str],
        made: Sequence[str],
    ) -> None:  # fmt: skip
        super().__init__()
        self._orig_mod = module  # the name that PyTorch's wrappers have, which names of weights leave out
        self._number, self._arriving, self._used = number, [*arriving], [*used]
        self._leaving, self._made = [*leaving], [*made]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output with the edges that leave the stage; without any, the output itself.

        Raises:
            PipelineError: the stage does not return the tensor of an edge that it makes.
        """
        passed = {name: kwargs[name] for name in self._arriving}
        named = {key: value for key, value in kwargs.items() if not key.isdigit() and key not in passed}
        positional = [value for key, value in kwargs.items() if key.isdigit()]
        value = self._orig_mod(*args, *positional, **named, **{name: passed[name] for name in self._used})
        if not self._leaving:
            return value
        what = f"stage {self._number}"
        form, leaves = leaves_of(value, what, torch.Tensor)
        keys = form.keys or tuple(map(str, range(len(leaves))))
        outputs = dict(zip(keys, leaves, strict=True))
        own = {name: outputs.pop(name) if name in outputs else value for name in self._made}
        if not outputs or not all(tensor is not value or form.kind == "tensor" for tensor in own.values()):
            raise PipelineError(
                f"{what} makes the edges {', '.join(own)}: return a tensor, which is the edge's too, or a dict with "
                "the output and the tensor of each edge by its name"
            )
        return outputs | {name: own[name] if name in own else passed[name].clone() for name in self._leaving}
