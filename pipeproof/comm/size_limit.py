"""The limit of a plan's operations, known from its sizes: all commands refuse a larger plan before they generate it."""

from __future__ import annotations

from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.specs.plan import PlanSpec

MAX_OPERATIONS = 5_000_000
"""Most operations of a step, replicas counted once: about 400 bytes of memory each."""

_MOST_COMPUTATIONS = 3
"""F, I and W: computations of a work item in a schedule that is not generated."""

_MOST_TRANSFER_OPS = 13
"""Other operations of a work item without its collectives: two of each kind of transfer with its wait, slice and
gather, and one to spare for the step's end."""

_MOST_SHAPE_OPS = 8
"""Two META messages each way, with their waits."""

_MOST_PARTS = 3
"""The last parts of a forward and of a backward, and its last weight gradients."""

TOO_LARGE = RuleDoc(
    code="PP116",
    title="the plan has more operations than this release holds in memory",
    explanation=(
        "Every operation of a step is a row of the op table. Replicas along tp, cp, ep and dp run the same programs "
        "and are counted once; what counts is the number of stages, micro-batches, sequence splits and collectives "
        "inside layers."
    ),
    wrong="schedule: {num_micro_batches: 1000000}",
    right="schedule: {num_micro_batches: 8}",
)


def require_moderate_size(plan: PlanSpec, num_collectives: int = 0) -> None:
    """Refuse a plan whose op table would not fit into memory. O(1).

    ``num_collectives`` is the number of collectives in the layers of all stages for one work item.

    Raises:
        BadPlanAtError: PP116, more than ``MAX_OPERATIONS``.
    """
    schedule = plan.schedule
    num_batches = schedule.num_micro_batches * schedule.num_sequence_splits
    num_items = num_batches * plan.num_stages
    kind = SCHEDULE_KINDS.get(schedule.kind)
    most = num_batches * num_collectives + _MOST_TRANSFER_OPS * num_items
    if plan.turns is not None:  # a part behind each collective, and weight gradients behind those of backward
        most += 2 * num_batches * num_collectives + _MOST_PARTS * num_items
    most += _MOST_SHAPE_OPS * num_items if plan.transport.shape_exchange == "per_message" else 0
    most += _MOST_COMPUTATIONS * num_items if kind is None else kind.num_computations(plan.topology.pp, num_items)
    if most > MAX_OPERATIONS:
        splits = f" of {schedule.num_sequence_splits} splits" if schedule.num_sequence_splits > 1 else ""
        message = (
            f"{plan.num_stages} stages and {schedule.num_micro_batches} micro-batches{splits} make up to {most:,} "
            f"operations in a step, more than the {MAX_OPERATIONS:,} that this release holds"
        )
        fix = "check the plan with fewer micro-batches: after warm-up a schedule repeats itself"
        raise BadPlanAtError(TOO_LARGE.finding(message, help=fix), ("schedule", "num_micro_batches"))
