"""Rows for the weights of a rank's stages: sum their gradients, clip, step, gather the updated shards.

With ``schedule.reduce_gradients: at_end`` sums come after all computations.
With ``when_ready`` the sums of a stage come right after the last computation
that adds to its gradients, on a queue of their own, concurrently with later
computations; the rank waits for them at the end. If another pipeline rank has a
copy of a weight of the stage (DualPipe, a tied embedding), the stage is summed
at the end in any case: the ranks of that sum join it in the order of stages
then, but would join it in different orders if each followed its own program.

With ``memory.shard_optimizer: dp`` sums over dp are reduce-scatters, each dp
rank steps with its share of each weight (``stages.describe.stage_memory``), and the
shares are gathered. With ``memory.shard_gradients: dp`` all sums of a stage come right after each computation that
adds to its gradients, for what its micro-batch has added: the rank adds its shares of them, and keeps no more. With
``memory.shard_weights: dp`` no shares are gathered here, but the stage's before each of its computations.

The norm of all gradients for ``run.clip_norm``: the weights that each rank counts, and the axes of the sum.

After the gradients' own sums each rank adds the squares of its gradients, weight
by weight, into a vector with one entry for each weight of the model, in the
model's order. Each element of each gradient counts on one rank: ranks that
hold different parts count them all; among ranks with equal parts, or copies of
one weight, only the first counts. All-reduces over ``tp``, ``ep`` and ``pp``
complete the vector on all ranks; ``dp`` and ``cp`` ranks have equal gradients
by then. With a sharded optimizer each dp rank counts its share of every sum,
and the vector is summed over ``dp`` first.
The norm is the root of the vector's sum, entry by entry: the stage of a weight
changes no bit of it.

Sums of expert loads, from which router biases are updated; they follow the gradient sums.

A rank counts the experts of its own tokens, on any rank. TP ranks route the
same tokens and have equal counts. Counts are summed over axes whose ranks have
other tokens, and over copies of a stage. They are whole numbers, so neither the
order of sums nor the schedule matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import prod

from pipeproof.comm.plan_context import PlanContext
from pipeproof.diagnostics.finding import BadPlanAtError, Finding, Severity
from pipeproof.schedule.columns import Row
from pipeproof.schedule.ops import Op, OpKind, wait_for
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gradient_facts import TOKEN_AXES, bias_name, moves_biases, routers
from pipeproof.stages.describe.layer import COUNTS_DTYPE, Collective, CollectiveKind, Parameter
from pipeproof.stages.describe.stage_memory import num_shards, shard_numel, shards_gradients, shards_weights


def num_loads(plan: PlanSpec) -> int:
    """Return the number of elements of one router's sum; 0 without such sums."""
    moe = plan.model.moe
    return moe.num_experts if moe is not None and moves_biases(plan) else 0


def load_sums(plan: PlanContext, stage: int, axis: str) -> tuple[Collective, ...]:
    """The sums over an axis below the ``REDUCE_GRAD`` of a stage, router by router, after the sums of its weights."""
    num = num_loads(plan.spec)
    is_owed = axis in TOKEN_AXES or (axis == "pp" and len(plan.holders[stage]) > 1)
    names = routers(plan.layers_of(stage)) if num and is_owed else ()
    kind = CollectiveKind.ALL_REDUCE
    return tuple(
        Collective(kind, axis, num, bias_name(router), dtype=COUNTS_DTYPE, per_token=False) for router in names
    )


WEIGHT_AXES = ("tp", "ep")
"""Axes over which weights are sharded."""


def norm_axes(plan: PlanContext) -> tuple[str, ...]:
    """The axes over which the vector is summed, in order."""
    shared = ("dp",) if num_shards(plan.spec) > 1 else ()
    return (*shared, *(axis for axis in (*WEIGHT_AXES, "pp") if plan.mesh.size(axis) > 1))


def num_weights(plan: PlanContext) -> int:
    """The vector's length."""
    return sum(len(layer.parameters) for layer in plan.layers)


def counted_by(plan: PlanContext, coords: Mapping[str, int]) -> Iterator[tuple[int, int, str]]:
    """(index in the vector, stage, name) of the weights that the rank at ``coords`` counts."""
    index = {weight.name: i for i, weight in enumerate(w for layer in plan.layers for w in layer.parameters)}
    pp = coords["pp"]
    for stage, holders in enumerate(plan.holders):
        for weight in plan.weights_of(stage, pp) if pp in holders else ():
            is_first = plan.shared_weights.places(stage, weight.name)[0] == pp
            if is_first and all(coords[axis] == 0 or axis in weight.sharded_over for axis in WEIGHT_AXES):
                yield index[weight.name], stage, weight.name


DATA_AXES = ("ep", "dp")
"""Axes whose ranks see other micro-batches: every gradient is reduced over them unless its weight is sharded there."""

GRADIENTS_QUEUE = "gradients"
"""The queue of sums that are issued before the end of the step."""

ADDS = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT})
"""Computations that add to the gradients of their stage."""


class StepEnd:
    """The rows of the rank at ``coords``; ``reduce_axes`` are the axes of gradient sums, in order.

    ``groups`` and ``copies``: see ``RankBlocks``; ``issued`` writes the collectives below an operation.
    """

    def __init__(
        self,
        plan: PlanContext,
        coords: Mapping[str, int],
        groups: Mapping[str, int],
        copies: Mapping[tuple[int, ...], int],
        issued: Callable[[Op, Iterable[Collective]], Iterator[Row]],
    ) -> None:
        self._plan, self._coords = plan, coords
        self._groups, self._copies, self._issued = groups, copies, issued
        self._shares = num_shards(plan.spec)

    @cached_property
    def _stages(self) -> list[int]:
        """The trained stages of the rank; none if no gradient is made."""
        program = self._plan.programs[self._coords["pp"]]
        is_training = any(op.kind is not OpKind.FORWARD for op in program)
        return sorted({op.stage for op in program} - self._plan.spec.frozen_stages) if is_training else []

    def ready_behind(self, reduce_axes: Sequence[str]) -> Mapping[Op, Sequence[int]]:
        """The stages whose sums do not wait for the end, by the last computation that adds to their gradients.

        In the order of these computations.
        """
        if self._plan.spec.schedule.reduce_gradients != "when_ready" or not reduce_axes:
            return {}
        program = self._plan.programs[self._coords["pp"]]
        last = {op.stage: position for position, op in enumerate(program) if op.kind in ADDS}
        borrowers = self._plan.shared_weights.borrowers(self._coords["pp"])
        ready: dict[int, list[int]] = {}
        for stage in sorted(last):
            if not self._copied(stage):
                users = {stage, *borrowers.get(stage, ())} & last.keys()
                ready.setdefault(max(last[user] for user in users), []).append(stage)
        return {program[position]: ready[position] for position in sorted(ready)}

    def reduce_concurrently(self, added: Op, stages: Iterable[int], reduce_axes: Sequence[str]) -> Iterator[Row]:
        """The sums of stages, concurrent with the computations after ``added``, which adds last to their gradients."""
        yield Row(wait_for(added), queue=GRADIENTS_QUEUE)
        for stage in stages:
            yield from self._reduce(stage, reduce_axes, GRADIENTS_QUEUE)

    def updates(self, reduce_axes: Sequence[str]) -> Iterator[list[Row]]:
        """The end of the step, stage by stage; nothing if no gradient is made.

        Operations for all stages come between the sums of all and the first step. Stages whose sums are under way
        come first, in the order of the sums.
        """
        concurrent = [stage for stages in self.ready_behind(reduce_axes).values() for stage in stages]
        in_order = [*concurrent, *(stage for stage in self._stages if stage not in concurrent)]
        if self._plan.spec.run.clip_norm is None:
            for stage in in_order:
                yield [*self._summed(stage, reduce_axes, concurrent), *self._step(stage)]
        elif in_order:  # the norm needs all gradients complete
            for stage in in_order:
                yield list(self._summed(stage, reduce_axes, concurrent))
            yield list(self._norm(self._stages[0]))
            for stage in in_order:
                yield list(self._step(stage))

    def given(self, reduced: Iterable[int], reduce_axes: Sequence[str]) -> Iterator[Row]:
        """The end of the step of a program that has its own communication, which sums stages ``reduced``."""
        for stage in self._stages:
            yield from () if stage in reduced else self.reduce(stage, reduce_axes)
            yield from self._step(stage)

    def reduce(self, stage: int, reduce_axes: Sequence[str], micro_batch: int | None = None) -> Iterator[Row]:
        """Sums of a stage's gradients over the copies of weights, if there are several, then over each axis.

        With ``micro_batch`` they sum its contribution alone.
        """
        return self._reduce(stage, reduce_axes, "", micro_batch)

    def _copied(self, stage: int) -> list[Parameter]:
        """The weights of a stage that other pipeline ranks hold, too."""
        places, weights = self._plan.shared_weights.places, self._plan.weights_of(stage, self._coords["pp"])
        return [weight for weight in weights if len(places(stage, weight.name)) > 1]

    def _reduce(
        self, stage: int, reduce_axes: Sequence[str], queue: str, micro_batch: int | None = None
    ) -> Iterator[Row]:
        copied, weights = self._copied(stage), self._plan.weights_of(stage, self._coords["pp"])
        owed = {"pp": copied} if copied else {}
        owed |= {axis: [weight for weight in weights if is_reduced(weight, axis)] for axis in reduce_axes}
        for axis, reduced in owed.items():
            reduce = Op(OpKind.REDUCE_GRAD, stage, micro_batch, axis=axis)
            yield Row(reduce, queue=queue)
            weights_then_loads = (
                *(self._reduction(axis, weight) for weight in reduced),
                *load_sums(self._plan, stage, axis),
            )
            for row in self._issued(reduce, weights_then_loads):
                yield replace(row, queue=queue)

    def _reduction(self, axis: str, weight: Parameter) -> Collective:
        """The sum of one weight's gradient; over dp each rank of a sharded optimizer needs only its share."""
        if axis == "dp" and self._shares > 1:
            numel = self._shares * shard_numel(self._numel(weight), self._shares)
            return Collective(CollectiveKind.REDUCE_SCATTER, axis, numel, weight.name)
        return Collective(CollectiveKind.ALL_REDUCE, axis, self._numel(weight), weight.name)

    def _numel(self, weight: Parameter) -> int:
        return prod(weight.local_shape({name: self._plan.mesh.size(name) for name in ("tp", "ep")}))

    def _summed(self, stage: int, reduce_axes: Sequence[str], concurrent: Iterable[int]) -> Iterator[Row]:
        """The sums of a stage, or the wait for earlier issued sums: for the last one, because they are in order."""
        if stage in concurrent:
            yield Row(wait_for(Op(OpKind.REDUCE_GRAD, stage, axis=reduce_axes[-1])))
        elif not shards_gradients(self._plan.spec):
            yield from self.reduce(stage, reduce_axes)

    def _norm(self, stage: int) -> Iterator[Row]:
        """The sums of the squared norms of all gradients, as rows of the rank's first stage."""
        for axis in norm_axes(self._plan):
            all_pp = tuple(range(self._plan.mesh.size("pp")))
            group = self._copies[all_pp] if axis == "pp" else self._groups[axis]
            op = Op(OpKind.ALL_REDUCE, stage, axis=axis)
            yield Row(op, stop=num_weights(self._plan), group=group, reduction="sum")

    def _step(self, stage: int) -> Iterator[Row]:
        """The optimizer, and after it the gather of the shares that the dp ranks have updated."""
        yield Row(Op(OpKind.STEP, stage))
        if self._shares > 1 and not shards_weights(self._plan.spec):
            yield from self.gather(stage)

    def gather(self, stage: int) -> Iterator[Row]:
        """The gather of a stage's weights from the shares of the dp ranks."""
        gather = Op(OpKind.GATHER_WEIGHT, stage, axis="dp")
        yield Row(gather)
        weights = self._plan.weights_of(stage, self._coords["pp"])
        yield from self._issued(gather, (self._share(weight) for weight in weights))

    def _share(self, weight: Parameter) -> Collective:
        numel = shard_numel(self._numel(weight), self._shares)
        return Collective(CollectiveKind.ALL_GATHER, "dp", numel, weight.name)


def is_reduced(weight: Parameter, axis: str) -> bool:
    """Return True if gradients are partial over the axis, or on a data axis unless the weight is sharded there.

    Experts get the tokens of all EP ranks.
    """
    return (axis in DATA_AXES and axis not in weight.sharded_over) or axis in weight.partial_over


def require_own_updates(plan: PlanContext) -> None:
    """Refuse keys for the end of a step that have no effect on the plan.

    Raises:
        BadPlanAtError: PP106, the schedule file defines the sums itself, without a norm; every stage has copies; or
            sharded gradients would be summed over copies of weights.
    """
    spec = plan.spec
    shards = ("memory", "shard_gradients"), "`memory.shard_gradients: dp` is given"
    if spec.memory.shard_gradients == "dp" and (plan.has_copies or plan.shared_weights.users):
        why = "several layers or pipeline ranks have a weight in common, whose sums are not added micro-batch by "
        raise _refused(*shards, why + "micro-batch", "remove shard_gradients")
    if plan.foreign is not None and not plan.foreign.computes_only:
        why = "the schedule has its own communication, "
        if spec.run.clip_norm is not None:
            why += "in which no norm is summed"
            raise _refused(("run", "clip_norm"), "`run.clip_norm` is given", why, "remove clip_norm, or {other}")
        if spec.memory.shard_gradients == "dp":
            raise _refused(*shards, why + "which sums gradients once", "remove shard_gradients, or {other}")
        if spec.schedule.reduce_gradients == "when_ready":
            why += "which defines when gradients are summed"
            raise _refused(_WHEN, _IS_WHEN_READY, why, "remove reduce_gradients, or {other}")
    if spec.schedule.reduce_gradients == "when_ready" and all(len(ranks) > 1 for ranks in plan.holders):
        why = "every stage has copies on several pipeline ranks, whose gradients are summed when all have ended"
        raise _refused(_WHEN, _IS_WHEN_READY, why, "remove reduce_gradients")


_WHEN = ("schedule", "reduce_gradients")
_IS_WHEN_READY = "`schedule.reduce_gradients: when_ready` is given"


def _refused(path: tuple[str, ...], fact: str, why: str, fix: str) -> BadPlanAtError:
    fix = fix.format(other="take a schedule of computations only")
    return BadPlanAtError(Finding("PP106", Severity.ERROR, f"{fact}, and {why}", help=fix), path)
