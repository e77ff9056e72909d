"""Adapter of a rank's machine to a framework: it computes with the stage, moves tensors, and logs the operations.

This module reads no value of a tensor during a step: losses, gradients and router values are read at its end
(``finish``). So the host can run ahead of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import cast

import numpy as np

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.comm.plan_context import edge_position
from pipeproof.exec.rank.child_collectives import Call, ChildCollectives
from pipeproof.exec.rank.framework_protocol import (
    Collectives,
    DeferringStage,
    Framework,
    OverlappingFramework,
    RankStage,
    Tensor,
    ThreadedFramework,
    Weight,
    World,
)
from pipeproof.exec.rank.gpt_stage import adds_by_block
from pipeproof.exec.rank.job_files import Loss, StepOutcome
from pipeproof.exec.rank.machine import Begin, Finished, Instruction, ProtocolError, RankMachine
from pipeproof.exec.rank.op_log import HOST_QUEUE, Clock, HostClock, LogEntry, Traffic
from pipeproof.exec.rank.overlapped_pair import Alternation, OverlappedPair, PairSegments, overlapped_pairs, whole_pairs
from pipeproof.exec.rank.step_end import RankRouters, StepEnd
from pipeproof.exec.rank.transfers import RankTransfers, WorkItemTensors
from pipeproof.schedule.columns import work_item_of
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import GATHER_KINDS, SLICE_KINDS, Op, OpKind
from pipeproof.stages.describe.boundary import Boundary, DirectEdge
from pipeproof.stages.describe.layer_records import LayerWatch

Annotate = Callable[[str], AbstractContextManager[object]]


class RankAdapter:
    """One rank: its stages, their tensors and optimizers, and its communication.

    ``enter`` is called with the step and id of each host operation and each child collective before it is executed.
    ``watch`` gets the tensors between layers. ``clock`` times the operations; the default is the host's.
    ``make_step_end`` makes the end of a step from the plan, the coordinates, the stages, and the two issuers.
    ``frees_sends``: see ``RankTransfers``. ``overlap_points`` makes the context of each overlapped pair whose
    computations alternate at points outside of the graph; without it, pairs with parts in the graph alternate.
    ``annotate`` is called at the beginning of a step. It may return a function from an operation's text to its context:
    a range in the trace of a profiler.
    """

    def __init__(
        self,
        plan: LoweredPlan,
        rank: int,
        framework: Framework,
        world: World,
        enter: Callable[[int, int], None],
        watch: LayerWatch | None = None,
        clock: Clock | None = None,
        make_step_end: Callable[..., StepEnd] = StepEnd,
        *,
        frees_sends: bool = False,
        overlap_points: Callable[[Alternation], AbstractContextManager[object]] | None = None,
        annotate: Callable[[], Annotate | None] = lambda: None,
    ) -> None:
        self.rank, self._keeps_log, self._annotate = rank, True, annotate
        self._range_of: Annotate | None = None
        self._clock = HostClock() if clock is None else clock
        self._log_start = self._split_ns = 0
        self._plan, self._arrays, self._enter, self._watch = plan, framework.arrays, enter, watch
        self._framework = framework
        self._num_splits = plan.num_splits
        self._coords = plan.mesh.coords(rank)
        self._data_rank = self._coords["dp"] * plan.mesh.size("ep") + self._coords["ep"]
        self._num_micro_batches = plan.spec.schedule.num_micro_batches
        self._collectives = {
            (plan.graph.groups[index].axis, collectives.ranks): collectives
            for index, collectives in world.collectives.items()
        }
        self._used_over: dict[tuple[str, int, str], Collectives] = {}
        """The collectives that were asked for, by axis, stage and weight."""
        self._children = ChildCollectives(self, framework.arrays)
        self._factory = framework.stages(plan, self._coords, self._children)
        self._stages = self._made_stages()
        routers = {number: self._factory.routers(stage) for number, stage in self._stages.items()}
        self._routers = RankRouters(plan, {number: r for number, r in routers.items() if r is not None}, self._children)
        self._step_end = make_step_end(plan, self._coords, self._stages, self._children, framework)
        self.transfers = RankTransfers(plan, rank, world.channels, framework.arrays, frees_sends=frees_sends)
        self._step = -1
        self._losses: list[tuple[Op, Tensor]] = []
        self._traffic: list[tuple[LogEntry, Callable[[], Traffic]]] = []
        """Entries of this step without their counts of rows: for these the host would wait."""
        self._texts: dict[int, str] = {}
        self._overlap_points = overlap_points
        index = plan.graph.global_rank.index(rank)
        self._pairs = (overlapped_pairs if overlap_points is None else whole_pairs)(plan.graph, index)
        self._adds_by_block = adds_by_block(plan)
        self._paired = {op_id for pair in self._pairs.values() for op_id, _ in pair.containers} - self._pairs.keys()
        self._computes: dict[OpKind, Callable[[Op], None]] = {
            OpKind.FORWARD: self._forward,
            OpKind.BACKWARD_INPUT: self._backward_input,
            OpKind.BACKWARD_WEIGHT: self._backward_weight,
            OpKind.BACKWARD: self._backward,
            OpKind.REDUCE_GRAD: self._reduce,
            OpKind.STEP: self._update,
            OpKind.GATHER_WEIGHT: self._step_end.gather,
            OpKind.RESHARD: self._step_end.release,
        }
        self.log: list[LogEntry] = []
        self.outcome = StepOutcome()

    def leave_out_log(self) -> None:
        """Log nothing but collectives, and do not read the clock; call before the first step."""
        self._keeps_log = self.transfers.keeps_log = False

    def _made_stages(self) -> dict[int, RankStage]:
        """The rank's stages, each with the weights that earlier ones lend it."""
        stages: dict[int, RankStage] = {}
        lent: dict[str, Weight] = {}
        for number in self._plan.stages_of_rank(self.rank):
            stages[number] = self._factory.make(number, lent)
            lent |= stages[number].parameters
        return stages

    @property
    def stages(self) -> Mapping[int, RankStage]:
        """The rank's stages by number."""
        return self._stages

    def weights(self) -> dict[str, np.ndarray]:
        """Return this rank's shard of each main weight."""
        return self._step_end.weights()

    def state(self) -> dict[tuple[str, str], Tensor]:
        """Return this rank's state by weight or router, and slot, with the names of ``pipeproof.state``."""
        return self._step_end.state() | self._routers.state()

    def restore_state(self, state: Mapping[tuple[str, str], Tensor]) -> None:
        """Resume with the result of ``state``; call before the first step."""
        self._step_end.restore_state(state)
        self._routers.restore_state(state)

    def begin(self, step: int) -> None:
        """Begin a step: reset the tensors of the previous step, and load the input data."""
        self._step = step
        self._factory.load(step)
        self.transfers.begin()
        self._routers.begin()
        self._losses.clear()
        self._traffic.clear()
        self.outcome = StepOutcome()
        self._step_end.begin()
        self._range_of = self._annotate()
        self._log_start = len(self.log)
        self._clock.begin()

    def begin_again(self, step: int) -> None:
        """Begin a replayed step: load the input data."""
        self._step = step
        self._factory.load(step)
        self._step_end.begin()

    def clear(self) -> None:
        """Drop the tensors of a step that has ended, or failed."""
        self.transfers.begin()
        self._losses.clear()
        self._traffic.clear()

    def finish(self) -> None:
        """End a step: put times and counted rows into its log, and read its results into ``outcome``."""
        for entry, traffic in self._traffic:
            entry.traffic = traffic()
        self._traffic.clear()
        self.log[self._log_start :] = self._clock.timed_entries(self.log[self._log_start :])
        loss: Loss | None = None
        not_finite = ""
        for op, tensor in self._losses:  # numpy adds them, in their order
            value: Loss = self._arrays.to_numpy(tensor)[()]  # type: ignore[assignment]  # a scalar or a vector
            loss = value if loss is None else loss + value
            if not not_finite and not np.isfinite(value).all():
                not_finite = str(op)
        self.outcome = StepOutcome(loss, self._step_end.gradients(), self._routers.values(), not_finite)

    def execute(self, instruction: Instruction) -> None:
        """Execute one instruction; a transfer is only posted, all others are finished on return."""
        if self._range_of is None:
            self._execute(instruction)
            return
        with self._range_of(self._text(instruction)):
            self._execute(instruction)

    def _text(self, instruction: Instruction) -> str:
        text = self._texts.get(instruction.op_id)
        if text is None:
            text = self._texts[instruction.op_id] = str(instruction.row.op)
        return text

    def _execute(self, instruction: Instruction) -> None:
        op_id = instruction.op_id
        if instruction.is_transfer:
            self.transfers.post(op_id)
            return
        if op_id in self._pairs:
            self._alternate(self._pairs[op_id])
            return
        if op_id in self._paired:  # it ran with the first computation of its pair
            return
        op = instruction.row.op
        self.enter(op_id)
        self._children.begin(op_id, op)
        if not self._keeps_log:
            self._compute(instruction, op)
            return
        self._split_ns = 0
        start = self.now()
        position = len(self.log)
        ranks, numel, dtype = self._compute(instruction, op)
        text = self._text(instruction)
        entry = LogEntry(self._step, HOST_QUEUE, text, start, self.now(), ranks, numel, dtype, split_ns=self._split_ns)
        self.log.insert(position, entry)  # before the children that ran inside it

    def _compute(self, instruction: Instruction, op: Op) -> tuple[tuple[int, ...], int, str]:
        """Execute a host operation; return the members of its collective, and the size and type of this rank's part."""
        op_id, kind = instruction.op_id, op.kind
        compute = self._computes.get(kind)
        if compute is not None:
            compute(op)
        elif kind is OpKind.WAIT:
            if instruction.awaited_transfer is not None:  # all other operations are done already
                entry = self.transfers.wait(self._step, op_id, instruction.awaited_transfer)
                if entry is not None:
                    self.log.append(entry)
        elif kind is OpKind.FREE:
            self.transfers.free_output(op)
        elif kind in GATHER_KINDS:
            collectives = self.collectives_over("tp", op.stage)
            part = self.transfers.gather(op_id, collectives)
            return collectives.ranks, *self.transfers.size_of(part)
        elif kind in SLICE_KINDS:
            self.transfers.slice(op_id)
        elif kind is OpKind.ALL_REDUCE:
            return self._sum_norms(instruction)
        else:
            raise ValueError(f"the adapter cannot execute {op}")
        return (), 0, ""

    def enter(self, op_id: int) -> None:
        """Report the operation that is about to run."""
        self._enter(self._step, op_id)

    def now(self) -> int:
        """Return the time on the clock of the log."""
        return self._clock.now()

    def end_of(self, block: Callable[[], object]) -> int:
        """Return the time on the log's clock at which the work that ``block`` waits for ends, see ``Clock``."""
        return self._clock.end_of(block)

    def begin_entry(self, queue: str, text: str) -> LogEntry:
        """Append an entry that starts now to the log."""
        entry = LogEntry(self._step, queue, text, self.now(), 0)
        self.log.append(entry)
        return entry

    def fill_in(self, entry: LogEntry, collectives: Collectives, call: Call, result: Tensor) -> None:
        """Complete the entry of a collective that has ended."""
        entry.ranks = collectives.ranks
        entry.numel, entry.dtype = self._arrays.numel(call.tensor), self._arrays.dtype(call.tensor)
        entry.traffic = call.traffic
        if call.traffic_of is not None:  # the tensors are kept until then; tensors of counts are small
            self._traffic.append((entry, partial(call.traffic_of, result)))

    def collectives_over(self, axis: str, stage: int, weight: str = "") -> Collectives:
        """Return the collectives along a mesh axis; along ``pp`` they connect the holders of a stage's weight."""
        self.transfers.drain()
        cached = self._used_over.get((axis, stage, weight))
        if cached is None:
            num_ranks = self._plan.mesh.size(axis)
            indices = self._plan.shared_weights.places(stage, weight) if axis == "pp" else range(num_ranks)
            ranks = tuple(self._plan.mesh.rank({**self._coords, axis: index}) for index in indices)
            cached = self._used_over[axis, stage, weight] = self._collectives[axis, ranks]
        return cached

    def _alternate(self, pair: OverlappedPair) -> None:
        framework = cast(ThreadedFramework, self._framework)  # executor_support refuses the others
        forward, backward = (self._plan.graph.ops[op_id] for op_id in (pair.forward, pair.backward))

        def add_weights() -> None:
            deferred = self.transfers.of(backward).weights
            if deferred is not None:
                deferred.accumulate()
            else:  # the backward is under way, or has not begun
                cast(DeferringStage, self._stages[backward.stage]).accumulate_deferred()

        self._step_end.before_backward(backward.stage)
        halves = (lambda: self._forward(forward)), (lambda: self._backward_input(backward))
        if self._overlap_points is None:
            side_stream = cast(OverlappingFramework, self._framework).side_stream
            segments = PairSegments(pair, self, add_weights, side_stream)
            with self._children.issued_by(segments):
                segments.run(*halves, framework.as_this_thread())
        else:
            at_overlap_points = Alternation(pair, self)
            with self._overlap_points(at_overlap_points):
                at_overlap_points.run(*halves, framework.as_this_thread())
        if backward.kind is OpKind.BACKWARD:
            self._backward_weight(backward)

    def _forward(self, op: Op) -> None:
        tensors = self.transfers.of(op)
        assert op.micro_batch is not None
        index = self._data_rank * self._num_micro_batches + op.micro_batch
        members = self._members_before(op)
        if missing := set(range(len(members))) - tensors.input.keys():
            raise ProtocolError(f"{op} reads member {min(missing)} of its boundary, for which no receive is posted")
        for position, member in enumerate(members):
            self._arrays.want_gradient(tensors.input[position], wanted=member.has_gradient)
        inputs = tuple(tensors.input[position] for position in range(len(members)))
        stage, split = self._stages[op.stage], op.split or 0
        tensors.output = stage.forward(inputs, step=self._step, index=index, split=split, watch=self._watch)
        if self._owns(op.stage + 1, op):  # nothing is sent to a stage of the same rank
            next_input = self.transfers.on_stage(op.stage + 1, op).input
            crossing = tensors.output[: self._num_crossing(op.stage + 1, op)]
            next_input.update((position, tensor.detach()) for position, tensor in enumerate(crossing))
        self._pass_directly(op, tensors)
        if op.stage == len(self._plan.stages) - 1:
            self._losses.append((op, tensors.output[-1].detach()))

    def _backward_input(self, op: Op) -> None:
        tensors = self.transfers.of(op)
        gradients = [tensors.output_grad.get(position) for position in range(len(tensors.output))]
        for edge, position in self._direct_at(op.stage, makes=True):
            for user in reversed(edge.consumers) if edge.has_gradient else ():
                earlier, gradient = gradients[position], tensors.direct_grads.pop((position, user))
                gradients[position] = gradient if earlier is None else earlier + gradient
        tensors.weights = self._stages[op.stage].backward_input(tensors.output, gradients)
        members = self._members_before(op)
        tensors.input_grad = {
            position: self._arrays.gradient(tensors.input[position])
            for position, member in enumerate(members)
            if member.has_gradient
        }
        for edge, position in self._direct_at(op.stage, makes=False):
            if edge.has_gradient and self._owns(edge.producer, op):
                key = self._positions[edge.name, edge.producer], op.stage
                self.transfers.on_stage(edge.producer, op).direct_grads[key] = tensors.input_grad.pop(position)
        if self._owns(op.stage - 1, op):
            before = self.transfers.on_stage(op.stage - 1, op).output_grad
            for position in range(self._num_crossing(op.stage, op)):
                if position in tensors.input_grad:
                    before[position] = tensors.input_grad.pop(position)
        tensors.output = ()
        tensors.input.clear()
        tensors.output_grad.clear()

    def _backward_weight(self, op: Op) -> None:
        tensors = self.transfers.of(op)
        assert tensors.weights is not None
        self._step_end.before_backward(op.stage)
        tensors.weights.accumulate()
        tensors.weights = None

    def _backward(self, op: Op) -> None:
        self._step_end.before_backward(op.stage)
        self._backward_input(op)
        if not self._adds_by_block:
            self._split_ns = self.now()
        self._backward_weight(op)

    def _reduce(self, op: Op) -> None:
        self._step_end.reduce(op)
        self._routers.sum_loads(op)

    def _update(self, op: Op) -> None:
        self._step_end.update(op.stage)
        self._routers.end_step(op.stage)

    def _members_before(self, op: Op) -> tuple[Boundary, ...]:
        """Members of the edge before an operation's stage, for its work item, then direct edges to the stage."""
        key = op.stage, self._work_item(op)
        members = self._members.get(key)
        if members is None:
            crossing = self._plan.edges[op.stage - 1].members(key[1]) if op.stage else ()
            by_work_item = self._plan.size_of_work_item
            variant = by_work_item[key[1]] if by_work_item else 0
            direct = (edge.variants[variant] for edge, _ in self._direct_at(op.stage, makes=False))
            members = self._members[key] = (*crossing, *direct)
        return members

    @cached_property
    def _members(self) -> dict[tuple[int, int], tuple[Boundary, ...]]:
        """Results of ``_members_before`` by stage and work item: the same in all steps."""
        return {}

    def _num_crossing(self, stage: int, op: Op) -> int:
        """Number of a stage's inputs that the stage before it made."""
        return len(self._plan.edges[stage - 1].members(self._work_item(op))) if stage else 0

    @cached_property
    def _positions(self) -> dict[tuple[str, int], int]:
        """The position of each direct edge in the output of its producer and the input of each consumer."""
        plan = self._plan
        return {
            (edge.name, stage): edge_position(plan.edges, plan.direct, number, stage)
            for number, edge in enumerate(plan.direct)
            for stage in (edge.producer, *edge.consumers)
        }

    @cached_property
    def _direct(self) -> dict[tuple[int, bool], list[tuple[DirectEdge, int]]]:
        ends: dict[tuple[int, bool], list[tuple[DirectEdge, int]]] = {}
        for edge in self._plan.direct:
            for stage in (edge.producer, *edge.consumers):
                own = ends.setdefault((stage, stage == edge.producer), [])
                own.append((edge, self._positions[edge.name, stage]))
        return ends

    def _direct_at(self, stage: int, *, makes: bool) -> Sequence[tuple[DirectEdge, int]]:
        """The direct edges that a stage makes or uses, with their positions in its output or input."""
        return self._direct.get((stage, makes), ())

    def _pass_directly(self, op: Op, tensors: WorkItemTensors) -> None:
        """Give the tensors of direct edges that a stage made, or received for its rank, to later stages of the rank."""
        for makes, held in ((True, dict(enumerate(tensors.output))), (False, tensors.input)):
            for edge, position in self._direct_at(op.stage, makes=makes):
                if makes or op.stage in self._plan.receivers(edge):
                    for user in edge.consumers:
                        if user > op.stage and self._owns(user, op):
                            input_position = self._positions[edge.name, user]
                            self.transfers.on_stage(user, op).input[input_position] = held[position].detach()

    def _sum_norms(self, instruction: Instruction) -> tuple[tuple[int, ...], int, str]:
        """Execute a collective without a parent: a sum of norms."""
        self.transfers.drain()
        group = self._plan.graph.groups[instruction.row.group]
        collectives = self._collectives[group.axis, group.ranks]
        squares = self._step_end.sum_norms(collectives)
        return collectives.ranks, self._arrays.numel(squares), self._arrays.dtype(squares)

    def _owns(self, stage: int, op: Op) -> bool:
        """Return True if this rank computes the operation's work item on a stage; False if the stage does not exist."""
        in_model = 0 <= stage < len(self._plan.stages)
        return in_model and int(self._plan.owner[stage, self._work_item(op)]) == self._coords["pp"]

    def _work_item(self, op: Op) -> int:
        return work_item_of(op, self._num_splits)


class RankProgram:
    """State of one rank, the ``index``-th of the graph: its position in the program, its transfers and tensors.

    The state after a step is validated if the plan ``is_proved``; another plan may leave anything behind.
    """

    def __init__(self, graph: OpGraph, index: int, adapter: RankAdapter, *, is_proved: bool = True) -> None:
        self.machine, self.adapter, self._is_proved = RankMachine(graph, index), adapter, is_proved
        self.op_id = -1
        """The last operation that began; it may be a transfer that is only posted; -1 before the first."""
        self._handed_out: Sequence[Instruction] = ()
        self._num_executed = 0
        """The machine's last instructions, and how many of them the adapter has executed."""

    def run(self, step: int) -> None:
        """Run one step, operation by operation; the adapter has begun it.

        Raises:
            ProtocolError: the state is wrong when the step has ended.
            Exception: any error of an operation, with the state of the rank as a note.
        """
        try:
            instructions = self.machine.handle(Begin(step))
            while instructions:
                self._handed_out, self._num_executed = instructions, 0
                for instruction in instructions:
                    self.op_id = instruction.op_id
                    self.adapter.execute(instruction)
                    self._num_executed += 1
                instructions = self.machine.handle(Finished(self.op_id))
            if self._is_proved:
                self.validate_state()
        except Exception as error:
            error.add_note(self.story())
            raise

    def validate_state(self) -> None:
        """Check the invariants of the machine before an operation or after a step, and of transfers and tensors.

        Raises:
            ProtocolError: an invariant is violated.
        """
        self.machine.validate_state()
        due = frozenset(instruction.op_id for instruction in self._handed_out[self._num_executed :])
        self.adapter.transfers.validate_state(self.machine.under_way - due, due=due, at_end=self.machine.finished)

    def story(self) -> str:
        """Return lines on the rank's position, posted transfers, used slots and kept work items."""
        lines = [self.machine.position(), *self.adapter.transfers.story()]
        try:
            self.validate_state()
        except ProtocolError as error:
            lines.append(f"  wrong: {error}")
        return "\n".join(lines)
