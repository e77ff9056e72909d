"""Two plans with placeholder times and different stages, put on the same time per layer.

Costs of a plan are per stage. A plan with twice as many stages would have
twice the work if each of its stages took the same placeholder: its step would
be longer because of the default and not because of its schedule.
"""

from __future__ import annotations

from dataclasses import replace

from pipeproof.analysis.compare.timeline_files import TimelineFile, simulated_plan
from pipeproof.analysis.tune.recut import layer_times, stage_times
from pipeproof.stages.describe.model_family import stage_layers


def with_common_layers(a: TimelineFile, b: TimelineFile) -> tuple[TimelineFile, str]:
    """Return B with the time per layer of A, and a note about the costs of both; the note is empty if nothing differs.

    B is simulated again if both are plans with placeholder times, the same layers, and other stages.

    Raises:
        BadPlanError: the plan of B cannot be simulated with these times.
    """
    if a.loaded is None or b.loaded is None:
        return b, ""
    plan_a, plan_b = a.loaded.spec, b.loaded.spec
    sources = {plan_a.cost_source, plan_b.cost_source}
    if plan_a.has_layer_times and plan_b.has_layer_times:
        return b, ""
    if plan_a.num_stages == plan_b.num_stages or not sources <= {"placeholder", "given"}:
        return b, ""
    text = f"A has {plan_a.num_stages} stages, B {plan_b.num_stages}"
    stages_a, stages_b = stage_layers(plan_a), stage_layers(plan_b)
    same_layers = sorted(sum(stages_a, ())) == sorted(sum(stages_b, ()))
    if sources != {"placeholder"} or not same_layers:
        return b, f"costs are per stage, and {text}: each side has its own"
    cost, stages = plan_a.cost, range(plan_a.num_stages)
    times = {
        key: stage_times(stages_b, layer_times(stages_a, [of_stage(stage) for stage in stages]))
        for key, of_stage in {
            "forward_us": cost.forward_of,
            "backward_input_us": cost.backward_input_of,
            "backward_weight_us": cost.backward_weight_of,
        }.items()
    }
    if not all(times["forward_us"]):
        return b, f"costs are per stage, and {text}: each side has its own"
    kept = {**times, "backward_us": None, "overlapped_us": None}
    spec = plan_b.model_copy(update={"cost": plan_b.cost.model_copy(update=kept)})
    normalized = simulated_plan(b.file, replace(b.loaded, spec=spec))
    restored = replace(normalized, loaded=b.loaded, cost_source=b.cost_source, note=b.note)
    return restored, f"costs are per layer, as in A: {text}"
