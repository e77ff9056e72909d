"""The global batch: it gives the number of micro-batches, or agrees with it."""

from __future__ import annotations

from collections.abc import Mapping

from pipeproof.diagnostics.problems import Problem
from pipeproof.specs.plan_sections import PlanSections
from pipeproof.specs.section import multiples


def with_micro_batches(data: object) -> object:
    """Return the keys of a plan with ``schedule.num_micro_batches`` where only ``global_batch_size`` is given.

    Values of wrong types are left to their own checks; a batch that does not divide is rounded, and refused by
    ``check_global_batch``.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("schedule"), Mapping):
        return data
    schedule, topology = data["schedule"], data.get("topology", {})
    size, last = schedule.get("micro_batch_size"), schedule.get("last_micro_batch_size")
    if "num_micro_batches" in schedule or schedule.get("global_batch_size") is None:
        return data
    ranks = [topology.get(axis, 1) if isinstance(topology, Mapping) else 1 for axis in ("dp", "ep")]
    sizes = [schedule["global_batch_size"], size, *ranks, 1 if last is None else last]
    if not all(type(number) is int and number > 0 for number in sizes):
        return {**data, "schedule": {**schedule, "num_micro_batches": 1}}
    sequences = schedule["global_batch_size"] // (ranks[0] * ranks[1])
    number = sequences // size if last is None else (sequences - last) // size + 1
    return {**data, "schedule": {**schedule, "num_micro_batches": max(1, number)}}


def check_global_batch(plan: PlanSections) -> list[Problem]:
    """PP108: the global batch divides over replicas and micro-batches; PP106: it is that of the micro-batches."""
    schedule, topology = plan.schedule, plan.topology
    batch, size, last = schedule.global_batch_size, schedule.micro_batch_size, schedule.last_micro_batch_size
    if batch is None:
        return []
    replicas = topology.dp * topology.ep
    made = replicas * (schedule.num_micro_batches * size if last is None else
                       (schedule.num_micro_batches - 1) * size + last)  # fmt: skip
    if made == batch:
        return []
    path = "schedule", "global_batch_size"
    unit = replicas * size
    if last is None and batch % unit:
        message = (
            f"schedule.global_batch_size {batch} does not divide by {unit}: topology.dp {topology.dp} x topology.ep "
            f"{topology.ep} ranks have their own micro-batches of schedule.micro_batch_size {size}"
        )
        return [Problem("PP108", path, message, help=f"set it to {multiples(batch, unit)}")]
    rest = "" if last is None else f", of which the last has {last},"
    message = (
        f"schedule.global_batch_size is {batch}, and {schedule.num_micro_batches} micro-batches of {size}{rest} on "
        f"{replicas} dp and ep ranks have {made} sequences"
    )
    return [Problem("PP106", path, message, help=f"remove num_micro_batches, or set global_batch_size to {made}")]
