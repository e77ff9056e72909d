"""Layouts of a model on a number of devices: the candidates, their lower bounds, and their plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipeproof.analysis.tune.frameworks import Framework
from pipeproof.analysis.tune.layout_bounds import Bounds, even_stages
from pipeproof.analysis.tune.layout_plans import base_data, plan_data, require_tunable
from pipeproof.analysis.tune.layouts import Layout, SearchSpace
from pipeproof.cost.devices import DEVICES
from pipeproof.specs.plan import PlanSpec

_MOST_DISTANCE = 16
"""Largest difference to the requested number of devices in the search for another number: it always ends."""


class DeviceLayouts:
    """The layouts of the model of a plan on ``num_gpus`` devices, with ``global_batch`` sequences in a step.

    ``fix`` has the allowed values of the names in ``layouts.FIXABLE``; a plan has ``memory_gib`` as its budget.

    Raises:
        BadPlanError: the plan has keys that do not go with other layouts.
    """

    present = slowest_us = None
    cost_source = "analytic"

    def __init__(
        self, spec: PlanSpec, framework: Framework, device: str, *, num_gpus: int, global_batch: int,
        memory_gib: float, fix: Mapping[str, Sequence[Any]],
    ) -> None:  # fmt: skip
        require_tunable(spec)
        self.framework, self.data, self._memory_gib = framework, base_data(spec, framework, device), memory_gib
        self.device, self.num_gpus, self.global_batch, self.seq_length = (
            device, num_gpus, global_batch, spec.gpt.seq_length
        )  # fmt: skip
        analytic = self.data["cost"]["analytic"]
        ranks_per_node = analytic.get("ranks_per_node") or DEVICES[device].ranks_per_node
        self._space = SearchSpace(spec, framework, num_gpus, global_batch, ranks_per_node, fix)
        self.removed, self._bounds = self._space.removed, Bounds(self.data, spec)
        self.layouts, self.bound = self._space.layouts, self._bounds.of

    def plan_of(self, layout: Layout) -> dict[str, Any]:
        """The plan of a layout, as in a plan file."""
        stages = self._bounds.stages_of(layout)
        return plan_data(self.data, self.framework, layout, None if even_stages(stages) else stages, self._memory_gib)

    def nearest_change(self) -> str | None:
        """The nearest number of devices, or the value that is fixed, with which there is a layout."""
        space = self._space
        for name in space.fix:
            rest = {key: values for key, values in space.fix.items() if key != name}
            if any(replace(space, fix=rest, removed=Counter()).layouts()):
                return f"There are some without `--fix {name}`."
        for distance in range(1, min(space.num_gpus, _MOST_DISTANCE + 1)):
            for number in (space.num_gpus + distance, space.num_gpus - distance):
                if any(replace(space, num_gpus=number, removed=Counter()).layouts()):
                    return f"The nearest number with one is {number}: give --gpus {number}."
        return None

    def notes(self, layouts: Sequence[Layout]) -> Iterator[str]:
        """Sentences about some layouts."""
        if any(layout.overlap != "none" for layout in layouts):
            yield "Overlap pairs: a forward and a backward alternate at the all-to-alls of experts."
