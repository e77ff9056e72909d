"""Plans of layouts: the given plan with another mesh, schedule, cut and memory settings."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from pipeproof.analysis.tune.frameworks import Framework
from pipeproof.analysis.tune.layouts import Layout, near_even_blocks
from pipeproof.diagnostics.finding import BadPlanError, Finding, Severity
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.layer import is_block, layer_order

_KEPT_SECTIONS = ("model", "loss", "transport", "buffers", "cost", "memory", "run", "suppress")
_OF_PAIRS = "cost_of_pairs"
"""In ``base_data``: keys of ``cost`` that only layouts with an overlap have."""

_WRITTEN_APART = ("pipeproof", "model", "schedule", "memory", _OF_PAIRS)
_VARIED_MEMORY = ("recompute", "shard_optimizer", "budget_gib")


def require_tunable(spec: PlanSpec) -> None:
    """Refuse a plan whose tensors or sequences depend on the layout.

    Raises:
        BadPlanError: PP106, with the key and the remedy.
    """
    if spec.is_custom:
        raise _refused("`model.kind: layers` has no sizes that other layouts could be computed from", "use kind gpt")
    schedule = spec.schedule
    settings = {
        "model.empty_layers": any(spec.gpt.num_empty),
        "model.hyper_connections": spec.gpt.hyper_connections is not None,
        "boundaries": bool(spec.boundaries),
        "schedule.seq_lengths": schedule.seq_lengths is not None,
        "schedule.last_micro_batch_size": schedule.last_micro_batch_size is not None,
        "schedule.num_sequence_splits": schedule.num_sequence_splits > 1,
        "memory.shard_weights": spec.memory.shard_weights == "dp",
        "memory.shard_gradients": spec.memory.shard_gradients == "dp",
    }
    for key, is_given in settings.items():
        if is_given:
            raise _refused(f"`{key}` is given, and tune does not vary layouts with it", f"remove {key}")


def _refused(message: str, help: str) -> BadPlanError:
    return BadPlanError(Finding("PP106", Severity.ERROR, message, help=help))


def base_data(spec: PlanSpec, framework: Framework, device: str) -> dict[str, Any]:
    """The sections of the given plan that layouts share, with the framework's keys and the device's times."""
    declared = spec.model_dump(mode="json", exclude_unset=True)
    data = {key: dict(declared[key]) for key in _KEPT_SECTIONS if isinstance(declared.get(key), Mapping)}
    if "suppress" in declared:
        data["suppress"] = declared["suppress"]
    for name, section in framework.sections.items():
        if name != "schedule":
            data[name] = {**section, **data.get(name, {})}
    if "gradient_dtype" in data.get("memory", {}) and "main_grad_dtype" not in declared.get("run", {}):
        for key in {"dtype", "main_grad_dtype"} - set(declared.get("run", {})):
            data["run"].pop(key, None)  # they would replace the plan's types for times and memory
    data["run"] = {**data.get("run", {}), "backend": "paddle" if framework.name == "paddle" else "torch"}
    memory = {key: value for key, value in data.get("memory", {}).items() if key not in _VARIED_MEMORY}
    analytic = declared.get("cost", {}).get("analytic") or {}
    analytic = {"device": analytic} if isinstance(analytic, str) else dict(analytic)
    analytic["device"] = device
    if data["run"].get("dtype", "float32") in ("float32", "float16"):
        analytic.setdefault("dtype", "bfloat16")
    cost = {key: value for key, value in declared.get("cost", {}).items() if key in ("p2p", "network", "recv_slowdown")}
    schedule = {**framework.sections.get("schedule", {})}
    if "reduce_gradients" in declared["schedule"]:
        schedule["reduce_gradients"] = declared["schedule"]["reduce_gradients"]
    of_pairs = {key: value for key, value in declared.get("cost", {}).items() if key == "collective_slowdown"}
    cost["analytic"] = analytic
    return {"pipeproof": 1, **data, "memory": memory, "cost": cost, _OF_PAIRS: of_pairs, "schedule": schedule}


def plan_data(
    base: Mapping[str, Any],
    framework: Framework,
    layout: Layout,
    stages: Sequence[Sequence[str]] | None,
    budget_gib: float | None = None,
) -> dict[str, Any]:
    """The plan of a layout, as in a plan file; ``stages`` is its cut unless it is even."""
    topology: dict[str, Any] = {
        axis: getattr(layout, axis) for axis in ("pp", "tp", "dp", "cp", "ep") if getattr(layout, axis) > 1
    }
    if layout.tp > 1:
        topology["sequence_parallel"] = True
    schedule: dict[str, Any] = {"kind": layout.kind}
    if layout.variant is not None:
        schedule["variant"] = layout.variant
    schedule["framework"] = framework.name
    schedule["num_micro_batches"] = layout.num_micro_batches
    schedule["micro_batch_size"] = layout.mbs
    if layout.vpp > 1:
        schedule["num_chunks"] = layout.vpp
    cost = base["cost"]
    if layout.overlap != "none":
        schedule["overlap"] = layout.overlap
        cost = {**cost, **base[_OF_PAIRS]}
    memory = {**base["memory"], "recompute": layout.recompute, "shard_optimizer": layout.shard_optimizer}
    if layout.recompute != "selective":
        memory.pop("recompute_modules", None)
    if budget_gib is not None:
        memory["budget_gib"] = budget_gib
    data = {
        "pipeproof": 1,
        "model": base["model"],
        "topology": topology,
        "schedule": {**schedule, **base["schedule"]},
        **{key: value for key, value in base.items() if key not in _WRITTEN_APART},
        "cost": cost,
        "memory": memory,
    }
    if layout.pp > 1 and framework.transport:
        data["transport"] = {**framework.transport, **base.get("transport", {})}
    if stages is not None:
        data["stages"] = [list(names) for names in stages]
    return data


def balanced_cut(spec: PlanSpec, times: Mapping[str, float], num_stages: int) -> tuple[tuple[str, ...], ...]:
    """The layers of each stage for stages of nearly equal times; ``times`` has the time of each layer by name.

    A stage begins at the block whose beginning is nearest to its share of the whole time. Each stage keeps a block but
    the first, which may have the embedding alone, and the last, which may have the norm and the head alone.
    """
    names = list(layer_order(spec.gpt))
    blocks = [name for name in names if is_block(name)]
    first, last = blocks[0], blocks[-1]
    before = sum(times[name] for name in names[: names.index(first)])
    after = sum(times[name] for name in names[names.index(last) + 1 :])
    begins = [before, *accumulate((times[name] for name in blocks), initial=before)][1:]  # of each block, and the end
    total = begins[-1] + after
    bounds = [0]
    for stage in range(1, num_stages):
        share = total * stage / num_stages
        lowest, highest = bounds[-1] + (stage > 1), len(blocks) - (num_stages - 1 - stage)
        above = bisect_left(begins, share)
        below = bisect_left(begins, begins[above - 1]) if above else 0
        is_below = above == len(begins) or share - begins[below] <= begins[above] - share
        nearest = below if above and is_below else above
        bounds.append(min(max(nearest, lowest), highest))
    return _cut_at(names, blocks, bounds)


def near_even_cut(spec: PlanSpec, num_stages: int) -> tuple[tuple[str, ...], ...]:
    """The layers of each stage for ``near_even_blocks``; no stages if there are none.

    MTP modules do not count as blocks: they are on the last stage.
    """
    names, blocks = list(layer_order(spec.gpt)), [f"layer.{number}" for number in range(spec.gpt.num_layers)]
    numbers = near_even_blocks(len(blocks), num_stages)
    return () if numbers is None else _cut_at(names, blocks, [0, *accumulate(numbers)][:-1])


def _cut_at(names: list[str], blocks: list[str], begins: list[int]) -> tuple[tuple[str, ...], ...]:
    """The layers of stages that begin at these blocks; other layers are with the block before them, or the first."""
    ends = [*map(names.index, blocks), names.index(blocks[-1]) + 1]
    bounds = [0, *(ends[begin] for begin in begins[1:]), len(names)]
    return tuple(tuple(names[start:stop]) for start, stop in pairwise(bounds))
