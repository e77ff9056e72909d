"""Carries out a rank's instructions: computes with the stage, moves tensors, logs what it did.

Which framework computes is said by a ``Framework``. Nothing here reads a value
of a tensor during a step: losses, gradients and what routers show are read at
its end (``finish``), so that on a GPU the host runs ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.exec.balance import RankBalance
from pipeproof.exec.children import ChildCollectives
from pipeproof.exec.clock import Clock, HostClock
from pipeproof.exec.framework import Collectives, Framework, RankStage, Tensor, Weight, World
from pipeproof.exec.jobs import Loss
from pipeproof.exec.machine import Instruction
from pipeproof.exec.oplog import HOST_QUEUE, LogEntry, Traffic
from pipeproof.exec.step_end import StepEnd
from pipeproof.exec.transfers import RankTransfers
from pipeproof.schedule.columns import unit_of
from pipeproof.schedule.ops import GATHER_KINDS, SLICE_KINDS, TRANSFER_KINDS, Op, OpKind
from pipeproof.stages.describe.boundary import Boundary
from pipeproof.stages.describe.watch import LayerWatch


@dataclass(slots=True)
class StepOutcome:
    """What one rank has to show for a step: its loss (last stage only), its shard of each gradient, its routers."""

    loss: Loss | None = None
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    routers: dict[str, np.ndarray] = field(default_factory=dict)
    not_finite: str = ""
    """The first operation whose loss is no number, if there is one."""

    @property
    def saved(self) -> tuple[Loss | None, dict[str, np.ndarray], dict[str, np.ndarray], str]:
        """What a step file has, in its order."""
        return self.loss, self.gradients, self.routers, self.not_finite


class RankAdapter:
    """One rank: its stages, their tensors and optimizers, and its communication.

    ``enter`` is called with the step and id of each host operation and each
    child collective before it is carried out. ``watch`` is shown what crosses
    the borders between layers. ``clock`` dates operations, which are the host's without it.
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
    ) -> None:
        self.rank = rank
        self._clock = HostClock() if clock is None else clock
        self._step_place = self._split_ns = 0
        self._plan, self._arrays, self._enter, self._watch = plan, framework.arrays, enter, watch
        self._coords = plan.mesh.coords(rank)
        self._data_rank = self._coords["dp"] * plan.mesh.size("ep") + self._coords["ep"]
        self._num_micro_batches = plan.spec.schedule.num_micro_batches
        self._collectives = {
            (plan.graph.groups[index].axis, collectives.ranks): collectives
            for index, collectives in world.collectives.items()
        }
        self._children = ChildCollectives(self, framework.arrays)
        self._stages: dict[int, RankStage] = {}
        lent: dict[str, Weight] = {}
        self._maker = framework.stages(plan, self._coords, self._children)
        for number in plan.stages_of_rank(rank):
            stage = self._maker.make(number, lent)
            self._stages[number] = stage
            lent |= stage.parameters
        routers = {number: self._maker.routers(stage) for number, stage in self._stages.items()}
        self._balance = RankBalance(
            plan, {number: one for number, one in routers.items() if one is not None}, self._children
        )
        self._step_end = StepEnd(plan, self._coords, self._stages, self._children, framework)
        self._transfers = RankTransfers(plan, rank, world.channels, framework.arrays)
        self._value = framework.value
        self._step = -1
        self._losses: list[tuple[Op, Tensor]] = []
        self._texts: dict[int, str] = {}
        self._computes: dict[OpKind, Callable[[Op], None]] = {
            OpKind.FORWARD: self._forward,
            OpKind.BACKWARD_INPUT: self._backward_input,
            OpKind.BACKWARD_WEIGHT: self._backward_weight,
            OpKind.BACKWARD: self._backward,
            OpKind.REDUCE_GRAD: self._reduce,
            OpKind.STEP: self._update,
            OpKind.GATHER_WEIGHT: self._step_end.gather,
        }
        self.log: list[LogEntry] = []
        self.outcome = StepOutcome()

    def weights(self) -> dict[str, np.ndarray]:
        """This rank's shard of each weight that the optimizer updates, as it is now."""
        return {name: self._value(w) for stage in self._stages.values() for name, w in stage.parameters.items()}

    def state(self) -> dict[tuple[str, str], Tensor]:
        """What this rank has from step to step, by weight or router, and slot, as ``pipeproof.state`` names them.

        A buffer stands by its name and an empty slot.
        """
        buffers = {
            (name, ""): one for stage in self._stages.values() for name, one in self._maker.buffers(stage).items()
        }
        return self._step_end.state() | self._balance.state() | buffers

    def put_state(self, state: Mapping[tuple[str, str], Tensor]) -> None:
        """Go on with what ``state`` gave; before the first step."""
        self._step_end.put_state(state)
        self._balance.put_state(state)
        for stage in self._stages.values():
            names = [name for name in self._maker.buffers(stage) if (name, "") in state]
            self._maker.put_buffers(stage, {name: state[name, ""] for name in names})

    def begin(self, step: int) -> None:
        """Forget the step before, and put in place what this one reads."""
        self._step = step
        self._maker.load(step)
        self._transfers.begin()
        self._balance.begin()
        self._losses.clear()
        self.outcome = StepOutcome()
        self._step_end.begin()
        self._step_place = len(self.log)
        self._clock.begin()

    def begin_again(self, step: int) -> None:
        """Put in place what a step reads whose operations are a replay of those of the step before."""
        self._step = step
        self._maker.load(step)
        self._step_end.begin()

    def finish(self) -> None:
        """The step's program is at its end: date its log, and read what there is to show for it into ``outcome``."""
        self.log[self._step_place :] = self._clock.dated(self.log[self._step_place :])
        loss: Loss | None = None
        not_finite = ""
        for op, one in self._losses:  # numpy adds them, in their order
            shown: Loss = self._arrays.to_numpy(one)[()]  # type: ignore[assignment]  # a scalar, or a vector of them
            loss = shown if loss is None else loss + shown
            if not not_finite and not np.isfinite(shown).all():
                not_finite = str(op)
        self.outcome = StepOutcome(loss, self._step_end.gradients(), self._balance.shown(), not_finite)

    def carry_out(self, instruction: Instruction) -> None:
        """Do what one instruction says; a transfer is posted, everything else is finished on return."""
        op_id, op = instruction.op_id, instruction.row.op
        kind = op.kind
        if kind in TRANSFER_KINDS:
            self._transfers.post(op_id)
            return
        self.enter(op_id)
        self._children.begin(op_id, op)
        self._split_ns = 0
        start = self.now()
        place = len(self.log)
        ranks: tuple[int, ...] = ()
        numel, dtype = 0, ""
        if kind is OpKind.WAIT:
            if op.target is not None and op.target.kind in TRANSFER_KINDS:  # all else is done when it returns
                self.log.append(self._transfers.wait(self._step, op_id))
        elif kind in self._computes:
            self._computes[kind](op)
        elif kind is OpKind.FREE:
            self._transfers.release_output(op)
        elif kind in GATHER_KINDS:
            collectives = self.collectives_over("tp", op.stage)
            own = self._transfers.gather(op_id, collectives)
            ranks, (numel, dtype) = collectives.ranks, self._transfers.size_of(own)
        elif kind in SLICE_KINDS:
            self._transfers.slice(op_id)
        elif kind is OpKind.ALL_REDUCE:
            ranks, numel, dtype = self._sum_norms(instruction)
        else:
            raise ValueError(f"the adapter cannot carry out {op}")
        text = self._texts.get(op_id)
        if text is None:
            text = self._texts[op_id] = str(op)
        entry = LogEntry(self._step, HOST_QUEUE, text, start, self.now(), ranks, numel, dtype, split_ns=self._split_ns)
        self.log.insert(place, entry)  # before the children that ran inside it

    def enter(self, op_id: int) -> None:
        """Say which operation is about to run."""
        self._enter(self._step, op_id)

    def now(self) -> int:
        """The time on the clock of the log."""
        return self._clock.now()

    def log_collective(self, op: Op, collectives: Collectives, tensor: Tensor, start_ns: int, traffic: Traffic) -> None:
        """Write down a collective that just ended."""
        self.log.append(
            LogEntry(
                self._step,
                HOST_QUEUE,
                str(op),
                start_ns,
                self.now(),
                collectives.ranks,
                self._arrays.numel(tensor),
                self._arrays.dtype(tensor),
                traffic=traffic,
            )
        )

    def collectives_over(self, axis: str, stage: int, weight: str = "") -> Collectives:
        """What issues the next collective along a mesh axis; along ``pp`` among the holders of a stage's weight."""
        self._transfers.drain()
        num_ranks = self._plan.mesh.size(axis)
        places = self._plan.shared_weights.places(stage, weight) if axis == "pp" else range(num_ranks)
        ranks = tuple(self._plan.mesh.rank({**self._coords, axis: place}) for place in places)
        return self._collectives[axis, ranks]

    def _forward(self, op: Op) -> None:
        tensors = self._transfers.of(op)
        assert op.micro_batch is not None
        index = self._data_rank * self._num_micro_batches + op.micro_batch
        members = self._members_before(op)
        for place, member in enumerate(members):
            self._arrays.want_gradient(tensors.input[place], wanted=member.has_gradient)
        inputs = tuple(tensors.input[place] for place in range(len(members)))
        stage, piece = self._stages[op.stage], op.split or 0
        tensors.output = stage.forward(inputs, step=self._step, index=index, piece=piece, watch=self._watch)
        if self._is_here(op.stage + 1, op):  # nothing is sent to a stage of the same rank
            handed_on = self._transfers.at(op.stage + 1, op).input
            handed_on.update((place, tensor.detach()) for place, tensor in enumerate(tensors.output))
        if op.stage == len(self._plan.stages) - 1:
            self._losses.append((op, tensors.output[-1].detach()))

    def _backward_input(self, op: Op) -> None:
        tensors = self._transfers.of(op)
        gradients = [tensors.output_grad.get(place) for place in range(len(tensors.output))]
        tensors.weights = self._stages[op.stage].backward_input(tensors.output, gradients)
        members = self._members_before(op)
        tensors.input_grad = {
            place: self._arrays.gradient(tensors.input[place]) for place, m in enumerate(members) if m.has_gradient
        }
        if self._is_here(op.stage - 1, op):
            self._transfers.at(op.stage - 1, op).output_grad.update(tensors.input_grad)
        tensors.output = ()
        tensors.input.clear()
        tensors.output_grad.clear()

    def _backward_weight(self, op: Op) -> None:
        tensors = self._transfers.of(op)
        assert tensors.weights is not None
        tensors.weights.accumulate()
        tensors.weights = None

    def _backward(self, op: Op) -> None:
        self._backward_input(op)
        self._split_ns = self.now()
        self._backward_weight(op)

    def _reduce(self, op: Op) -> None:
        self._step_end.reduce(op)
        self._balance.sum_loads(op)

    def _update(self, op: Op) -> None:
        self._step_end.update(op.stage)
        self._balance.end_step(op.stage)

    def _members_before(self, op: Op) -> tuple[Boundary, ...]:
        """What comes into the stage of an operation for its unit of work."""
        return self._plan.edges[op.stage - 1].members(self._unit(op)) if op.stage else ()

    def _sum_norms(self, instruction: Instruction) -> tuple[tuple[int, ...], int, str]:
        """A collective that stands alone is one of the norm's."""
        self._transfers.drain()
        group = self._plan.graph.groups[instruction.row.group]
        collectives = self._collectives[group.axis, group.ranks]
        squares = self._step_end.sum_norms(collectives)
        return collectives.ranks, self._arrays.numel(squares), self._arrays.dtype(squares)

    def _is_here(self, stage: int, op: Op) -> bool:
        """Whether this rank computes the operation's unit of work on a stage, which need not exist."""
        in_model = 0 <= stage < len(self._plan.stages)
        return in_model and int(self._plan.owner[stage, self._unit(op)]) == self._coords["pp"]

    def _unit(self, op: Op) -> int:
        return unit_of(op, self._plan.num_splits)
