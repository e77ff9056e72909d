"""Checks of ``schedule.overlap`` against the schedule, the experts, the memory and the times."""

from __future__ import annotations

from pipeproof.diagnostics.problems import KeyPath, Problem, dotted, listed
from pipeproof.specs.plan_sections import PlanSections

ORDERED_WITH_PAIRS = ("dualpipe", "dualpipe_v", "1f1b", "interleaved")
"""Kinds of generated schedules in which a forward and a backward may overlap, with any times."""

GENERATED_WITH_PAIRS = (*ORDERED_WITH_PAIRS, "optimal")
"""The same, and the kind that pairs them where this is shorter."""

_KINDS_WITH_PAIRS = (*GENERATED_WITH_PAIRS, "file", "custom")


def check_overlap(plan: PlanSections) -> list[Problem]:
    """PP106: there are pairs, and all-to-alls in them to hide; their parts are known, and timed once."""
    schedule, path = plan.schedule, ("schedule", "overlap")
    if schedule.turns is None:
        return _unused_slowdown(plan, "`schedule.overlap` is none")
    problems = []
    if schedule.kind not in _KINDS_WITH_PAIRS:
        message = f"`schedule.overlap` is of pairs that overlap, and `kind: {schedule.kind}` has none"
        problems.append(Problem("PP106", path, message, help=f"use kind {listed(_KINDS_WITH_PAIRS)}, or remove it"))
    if plan.is_custom:  # computations are whole in the graph: they pass the turn at the seams of a script's modules
        if schedule.overlap != "pairs":
            message = "`schedule.overlap` orders the parts of a GPT's blocks, and the model has custom layers"
            problems.append(Problem("PP106", path, message, help="use overlap: pairs, or remove it"))
        if schedule.kind == "optimal":
            message = "the solver needs the parts of pairs, and those of custom layers are not known"
            problems.append(Problem("PP106", path, message, help="use another kind, or remove overlap"))
        return [*problems, *_unused_slowdown(plan, "the model has custom layers")]
    if plan.gpt.moe is None or plan.topology.ep == 1:
        lacks = "model.moe is missing" if plan.gpt.moe is None else "topology.ep is 1"
        message = f"`schedule.overlap` hides the all-to-alls of experts, and there are none: {lacks}"
        problems.append(Problem("PP106", path, message, help="remove overlap, or use experts with ep > 1"))
    return [*problems, *(_conflict(key, value, why, fix) for key, value, why, fix in _conflicts(plan))]


def _unused_slowdown(plan: PlanSections, why: str) -> list[Problem]:
    if plan.cost.collective_slowdown is None:
        return []
    message = f"`cost.collective_slowdown` is of collectives on a queue of their own, and {why}"
    fix = "remove it" if plan.is_custom else "remove it, or add schedule.overlap"
    return [Problem("PP106", ("cost", "collective_slowdown"), message, help=fix, at_key=True)]


def _conflict(key: KeyPath, value: str, why: str, fix: str) -> Problem:
    message = f"`{dotted(key)}: {value}` does not go together with `schedule.overlap`: {why}"
    return Problem("PP106", key, message, help=fix)


def _conflicts(plan: PlanSections) -> list[tuple[KeyPath, str, str, str]]:
    """(key, value, reason, fix) of each key whose value does not go together with an overlap."""
    memory, cost, conflicts = plan.memory, plan.cost, list[tuple[KeyPath, str, str, str]]()
    if memory.recompute == "full":
        why = "a backward would run whole forwards, with all-to-alls of their own, in its turns"
        conflicts.append((("memory", "recompute"), "full", why, "use selective, or remove overlap"))
    issuing = ("moe", "mlp", "mla_up_proj") if plan.topology.tp > 1 else ("moe",)
    again = [module for module in memory.recompute_modules if module in issuing]
    if memory.recompute == "selective" and again:
        why = "a backward would run forwards, with collectives of their own, in its turns"
        conflicts.append((("memory", "recompute_modules"), f"[{again[0]}]", why, f"remove {again[0]}, or overlap"))
    if memory.sequence_parallel_activations == "regather":
        why = "weight gradients would wait for gathers in their turns"
        key = "memory", "sequence_parallel_activations"
        conflicts.append((key, "regather", why, "use keep, or remove overlap"))
    if memory.offload_blocks:
        why = "the copies of a backward would have to end before its first turn"
        conflicts.append((("memory", "offload_blocks"), str(memory.offload_blocks), why, "remove one of them"))
    if cost.overlapped_us is not None:
        why = "the time of a pair follows from its parts"
        conflicts.append((("cost", "overlapped_us"), "..", why, "remove overlapped_us"))
    if cost.analytic is not None and "ep" in cost.analytic.overlap:
        why = "all-to-alls would be hidden twice"
        conflicts.append((("cost", "analytic", "overlap"), "[ep]", why, "remove ep from it"))
    return conflicts
