"""Layouts of a model whose plan has the times of its layers: kinds of schedules, each with its fastest cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from pipeproof.analysis.tune.frameworks import Framework
from pipeproof.analysis.tune.layer_cuts import Best, LayerCost, Layers, Problem, Way, numbers_of_stages, search_cuts
from pipeproof.analysis.tune.layouts import Bound, Layout
from pipeproof.analysis.tune.present_step import PresentStep, present_step
from pipeproof.diagnostics.finding import BadPlanError, Finding, Severity
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.custom_layers import CustomLayerSpec
from pipeproof.specs.exact_times import TIME_KEYS
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.specs.plan import PlanSpec

FIXABLE = ("vpp", "schedule")
"""Names that ``fix`` takes."""


class LayerLayouts:
    """The layouts of one plan on its own ranks, or on ``gpus`` of them; the choices of a search.

    A layout has the plan's micro-batches, with the times of its layers. Weights, gradients and the layers' kept
    activations count as memory, which is at most ``limit`` bytes; states of optimizers are not in such a plan.

    Raises:
        BadPlanError: the plan has ranks on other axes than pp and dp.
    """

    device = None
    cost_source = "given"

    def __init__(
        self, loaded: LoadedPlan, framework: Framework, fix: Mapping[str, Sequence[Any]], gpus: int | None,
        limit: int | None,
    ) -> None:  # fmt: skip
        self.spec, self.framework, self.fix, self._limit = loaded.spec, framework, fix, limit
        self.removed: Counter[str] = Counter()
        topology, schedule = self.spec.topology, self.spec.schedule
        self.num_gpus = topology.num_ranks if gpus is None else gpus
        if self.num_gpus % topology.dp:
            message = f"{self.num_gpus} ranks are not a multiple of the plan's topology.dp, {topology.dp}"
            raise BadPlanError(Finding("PP106", Severity.ERROR, message, help="give another number, or change dp"))
        self._num_pp = self.num_gpus // topology.dp
        self.present: PresentStep | None = present_step(loaded) if gpus is None else None
        self.global_batch, self.seq_length = schedule.num_micro_batches * schedule.micro_batch_size * topology.dp, 1
        self.data: dict[str, Any] = self.spec.model_dump(mode="json", exclude_unset=True)
        self._layers = [layer for layer in self.spec.custom.layers if not _is_empty(layer)]
        self._found: dict[Layout, Best] = {}

    @property
    def slowest_us(self) -> Any:
        """The time of the plan's own step; None on another number of ranks."""
        return None if self.present is None else self.present.step_us

    def layouts(self) -> Iterator[Layout]:
        """Yield the fastest cut of each kind of schedule and number of chunks."""
        schedule, way = self.spec.schedule, _way(self._layers)
        names = [layer.name for layer in self._layers]
        latency = round(self.spec.cost.p2p_latency_us * 1000)
        layers = Layers(_static_bytes(self.spec, self._layers), names[0] == "embed" and names[-1] == "head", latency)
        problem = Problem(layers, way, self._num_pp, schedule.num_micro_batches)
        best_cuts, lacking = search_cuts([problem], self._limit)
        self.removed["no cut fits into the memory"] += len(lacking)
        for best in best_cuts:
            layout = Layout(
                self._num_pp, best.num_chunks, 1, 1, 1, self.spec.topology.dp, schedule.micro_batch_size,
                schedule.num_micro_batches, best.kind, None, "/".join(map(str, best.sizes)), "none", "none",
            )  # fmt: skip
            if all(getattr(layout, _ATTRIBUTES[name]) in allowed for name, allowed in self.fix.items()):
                self._found[layout] = best
                yield layout

    def bound(self, layout: Layout, _: float) -> Bound | None:
        """The time of a layout's computations; it fits into the memory."""
        return Bound(self._found[layout].step / 1000, 0.0)

    def plan_of(self, layout: Layout) -> dict[str, Any]:
        """The whole plan of a layout; stages without layers of the model pass on their input."""
        data = {key: value for key, value in self.data.items() if key != "cost"}
        cost = {key: value for key, value in self.data.get("cost", {}).items() if key not in TIME_KEYS}
        kept = {key: value for key, value in self.data["schedule"].items() if key in _KEPT}
        chunks = {"num_chunks": layout.vpp} if layout.vpp > 1 else {}
        data["schedule"] = {"kind": layout.kind, **kept, **chunks}
        data["topology"] = {**self.data.get("topology", {}), "pp": layout.pp}
        by_name = {layer["name"]: layer for layer in self.data["model"]["layers"]}
        layers: list[dict[str, Any]] = []
        stages: list[list[str]] = []
        for number, numbers in enumerate(numbers_of_stages(self._found[layout].sizes)):
            own = [by_name[self._layers[n].name] for n in numbers] or [_empty_layer(number, layers[-1])]
            layers += own
            stages.append([layer["name"] for layer in own])
        data["model"], data["stages"] = {**self.data["model"], "layers": layers}, stages
        return {**data, **({"cost": cost} if cost else {})}

    def notes(self, layouts: Sequence[Layout]) -> Iterator[str]:
        """Sentences about the rows."""
        if layouts:
            yield "Stages take the sums of the measured times of their layers; the cut has the layers of each stage."


_ATTRIBUTES = {"vpp": "vpp", "schedule": "kind"}
_KEPT = ("num_micro_batches", "micro_batch_size", "seq_lengths", "reduce_gradients")


def _is_empty(layer: CustomLayerSpec) -> bool:
    """True for a layer that only passes on its input, as in a stage without layers of the model."""
    return layer.name.startswith("stage.") and not layer.parameters and not any(layer.times.values())


def _empty_layer(number: int, before: Mapping[str, Any]) -> dict[str, Any]:
    times = {key: 0 for key in before if key in TIME_KEYS}
    return {"name": f"stage.{number}", "out": before["out"], "activation_bytes": 0, **times}


def _way(layers: Sequence[CustomLayerSpec]) -> Way:
    costs = []
    for layer in layers:
        times, kept = {key: round(time * 1000) for key, time in layer.times.items()}, layer.activation_bytes or 0
        inputs = times.get("backward_input_us", times.get("backward_us", 0))
        costs.append(LayerCost(times["forward_us"], inputs, times.get("backward_weight_us", 0), kept, kept, kept, kept))
    return Way("as measured", "backward_weight_us" in layers[0].times, tuple(costs))


def _static_bytes(spec: PlanSpec, layers: Sequence[CustomLayerSpec]) -> tuple[int, ...]:
    """Weights and gradients of each layer."""
    size = dtype_bytes(spec.run.dtype)
    return tuple(2 * size * sum(prod(weight.shape) for weight in layer.parameters) for layer in layers)
