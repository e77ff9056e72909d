"""Checks of lists by stage or by rank, and of the method of partition, against the schedule and the topology."""

from __future__ import annotations

from pipeproof.diagnostics.problems import Problem
from pipeproof.specs.plan_sections import PlanSections
from pipeproof.specs.stage_cut import UNIFORM


def check_placed_ranks(plan: PlanSections) -> list[Problem]:
    """PP109: a placement lists the stages of every pipeline rank."""
    placement, pp = plan.schedule.placement, plan.topology.pp
    if not isinstance(placement, tuple) or len(placement) == pp:
        return []
    ranks = f"{len(placement)} rank{'s' if len(placement) > 1 else ''}"
    message = f"`schedule.placement` has the stages of {ranks}, and topology.pp is {pp}"
    return [Problem("PP109", ("schedule", "placement"), message, help=f"give {pp} lists")]


def check_lengths(plan: PlanSections) -> list[Problem]:
    """PP109: lists by global stage have one entry per stage."""
    num_stages = plan.num_stages
    lists: dict[tuple[str, ...], object] = {("stages",): plan.stages}
    times = ("forward_us", "backward_us", "backward_input_us", "backward_weight_us", "overlapped_us", "optimizer_us")
    for name in times:
        lists["cost", name] = getattr(plan.cost, name)
    problems = []
    for path, values in lists.items():
        if isinstance(values, tuple) and len(values) != num_stages:
            entries = "1 entry" if len(values) == 1 else f"{len(values)} entries"
            alternative = "one time for all stages" if path[0] == "cost" else "leave it out for an even partition"
            problems.append(
                Problem(
                    "PP109",
                    path,
                    f"`{'.'.join(path)}` has {entries}, and {_stage_count(plan)}",
                    help=f"give {num_stages}, or {alternative}",
                )
            )
    return problems


def _stage_count(plan: PlanSections) -> str:
    pp, num_chunks = plan.topology.pp, plan.schedule.num_chunks
    factors = f"topology.pp {pp}" if num_chunks == 1 else f"topology.pp {pp} x schedule.num_chunks {num_chunks}"
    if isinstance(plan.schedule.placement, tuple):
        factors = "schedule.placement"
    return f"{factors} makes {plan.num_stages} stage{'s' if plan.num_stages > 1 else ''}"


def check_cut(plan: PlanSections) -> list[Problem]:
    """PP106: as in Fleet, ``uniform`` is for one chunk on a rank, or the two of DualPipeV."""
    if plan.stages != UNIFORM or plan.schedule.num_chunks == 1 or plan.schedule.kind == "dualpipe_v":
        return []
    message = f"`stages: uniform` is given together with schedule.num_chunks {plan.schedule.num_chunks}, and Fleet "
    message += "partitions several chunks by class only"
    fix = "write `layer:TransformerLayer|EmptyLayer`, or list the layers of each stage"
    return [Problem("PP106", ("stages",), message, help=fix)]
