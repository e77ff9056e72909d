"""Checks across the keys of a plan: sizes that divide, lists that fit, keys that exclude each other.

Each function reads validated values and returns every problem that it finds;
paths count from the section that calls it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, get_args

from pipeproof.specs.analytic import NO_FLOAT8, DeviceName
from pipeproof.specs.model_checks import multiples
from pipeproof.specs.problems import KeyPath, Problem, describe_value, dotted, listed

if TYPE_CHECKING:
    from pipeproof.specs.cost import CostSpec
    from pipeproof.specs.plan import PlanSpec, SuppressSpec
    from pipeproof.specs.topology import TopologySpec

_CODE = re.compile(r"PP[1-9][0-9]{2}", re.ASCII)


def check_order(topology: TopologySpec) -> list[Problem]:
    """PP106: ``order`` names each of the five axes once."""
    axes = ("tp", "cp", "ep", "dp", "pp")
    if sorted(topology.order) == sorted(axes):
        return []
    missing = [axis for axis in axes if axis not in topology.order]
    repeated = [axis for axis in axes if topology.order.count(axis) > 1]
    wrong = [f"lacks {listed(missing, 'and')}"] if missing else []
    if repeated:
        wrong.append(f"names {listed(repeated, 'and')} more than once")
    return [
        Problem(
            "PP106",
            ("order",),
            f"`topology.order` must name each axis once, and it {' and '.join(wrong)}",
            help="the default is [tp, cp, ep, dp, pp]",
        )
    ]


def check_cost(cost: CostSpec) -> list[Problem]:
    """The backward time is given whole, or as both of its parts (PP104), and no time twice (PP106)."""
    if cost.analytic is not None or cost.profile is not None:
        source, does = ("analytic", "computes") if cost.analytic is not None else ("profile", "measured")
        return [
            Problem(
                "PP106",
                (name,),
                f"`cost.{name}` is given together with `cost.{source}`, which {does} it",
                help=f"remove {name}, or give all times and remove {source}",
                at_key=True,
            )
            for name in sorted(cost.model_fields_set)
            if (name.endswith("_us") or name == "profile" != source) and getattr(cost, name) is not None
        ]
    parts = [name for name in ("backward_input_us", "backward_weight_us") if getattr(cost, name) is not None]
    if cost.backward_us is not None and parts:
        beside = listed([f"`cost.{name}`" for name in parts], "and")
        return [
            Problem(
                "PP106",
                ("backward_us",),
                f"`cost.backward_us` is given together with {beside}",
                help="give backward_us alone, or backward_input_us and backward_weight_us",
                at_key=True,
            )
        ]
    if len(parts) == 1:
        other = "backward_weight_us" if parts == ["backward_input_us"] else "backward_input_us"
        return [
            Problem(
                "PP104",
                (parts[0],),
                f"`cost.{parts[0]}` is given without `cost.{other}`",
                help=f"add `{other}`, or give the whole time as backward_us",
                at_key=True,
            )
        ]
    return []


def check_analytic(plan: PlanSpec) -> list[Problem]:
    """PP106: computed times are of types whose peaks the data sheets have."""
    analytic, problems = plan.cost.analytic, list[Problem]()
    if analytic is None:
        return problems
    if analytic.dtype is None and plan.run.dtype == "float64":
        message = "`cost.analytic` has no times for run.dtype float64"
        mend = "add `dtype: bfloat16` or `dtype: float32` to cost.analytic"
        problems.append(Problem("PP106", ("cost", "analytic"), message, help=mend))
    if analytic.matmul_dtype == "float8" and analytic.device in NO_FLOAT8:
        message = f"`cost.analytic.matmul_dtype` is float8, in which {analytic.device} computes no products"
        others = [name for name in get_args(DeviceName) if name not in NO_FLOAT8]
        mend = f"remove matmul_dtype, or name a device that has it: {listed(others, 'or')}"
        problems.append(Problem("PP106", ("cost", "analytic", "matmul_dtype"), message, help=mend))
    return problems


def check_splits(plan: PlanSpec) -> list[Problem]:
    """PP108: every sequence divides into its splits, and these over the TP ranks; PP106: not beside other cuts."""
    schedule, topology = plan.schedule, plan.topology
    num_splits = schedule.num_sequence_splits
    if num_splits == 1:
        return []
    if topology.cp > 1:
        message = f"sequences are cut into {num_splits} splits that follow each other, and over {topology.cp} cp ranks"
        return [
            Problem("PP106", ("schedule", "num_sequence_splits"), message, help="use one of the two: cp 1, or 1 split")
        ]
    unit = num_splits * (topology.tp if topology.sequence_parallel else 1)
    lengths: dict[KeyPath, int] = {("model", "seq_length"): plan.model.seq_length}
    for index, length in enumerate(schedule.seq_lengths or ()):
        lengths["schedule", "seq_lengths", index] = length
    problems = []
    for path, length in lengths.items():
        if length % unit:
            reason = f"schedule.num_sequence_splits {num_splits}"
            if unit != num_splits:
                reason += f" x topology.tp {topology.tp} (sequence parallelism)"
            message = f"{dotted(path)} {length} does not divide by {reason}"
            problems.append(Problem("PP108", path, message, help=f"set it to {multiples(length, unit)}"))
    return problems


def check_suppression(entry: SuppressSpec) -> list[Problem]:
    """PP106: a whole code, and a reason in words; whether there is such a code is for ``check`` to say."""
    problems = []
    if not _CODE.fullmatch(entry.code):
        meant = entry.code.strip().upper()
        message = f"`suppress` needs a whole code such as PP202, found {describe_value(entry.code)}"
        mend = f"write {meant}" if _CODE.fullmatch(meant) else "`pipeproof check` prints the code of each finding"
        problems.append(Problem("PP106", ("code",), message, help=mend))
    if not entry.reason.strip():
        message = "a suppression needs a reason, and this one is empty"
        problems.append(Problem("PP106", ("reason",), message, help="say why the finding does no harm in this plan"))
    return problems


def check_lengths(plan: PlanSpec) -> list[Problem]:
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
            one_time = "one time for all stages" if path[0] == "cost" else "leave it out for an even cut"
            problems.append(
                Problem(
                    "PP109",
                    path,
                    f"`{'.'.join(path)}` has {entries}, and {_stage_count(plan)}",
                    help=f"give {num_stages}, or {one_time}",
                )
            )
    return problems


def _stage_count(plan: PlanSpec) -> str:
    pp, num_chunks = plan.topology.pp, plan.schedule.num_chunks
    factors = f"topology.pp {pp}" if num_chunks == 1 else f"topology.pp {pp} x schedule.num_chunks {num_chunks}"
    if isinstance(plan.schedule.placement, tuple):
        factors = "schedule.placement"
    return f"{factors} makes {plan.num_stages} stage{'s' if plan.num_stages > 1 else ''}"
