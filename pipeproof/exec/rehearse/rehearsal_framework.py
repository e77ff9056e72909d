"""Framework of a rehearsal: stages whose tensors carry the origin of their elements instead of values.

The machine, the adapter, the transfers and the end of a step are the same as in a run. A stage checks its arrived
tensors, issues the collectives that the graph has below the computation, and makes its output and the gradients of its
input.
"""

# ruff: noqa: D102 - the protocols document the methods
from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.comm.step_end_rows import num_loads
from pipeproof.exec.launch.worker import Emit, main, run_steps, verified_subject
from pipeproof.exec.rank.framework_choice import start_framework, start_ping_clock
from pipeproof.exec.rank.framework_protocol import Array, Framework, RankStage, StageCollectives, Tensor, World
from pipeproof.exec.rank.idle_messages import EdgeTimes, ping_edges
from pipeproof.exec.rank.job_files import Job, end_process, save_json
from pipeproof.exec.rehearse.element_identity import RehearsalArrays, RehearsalTensor
from pipeproof.exec.rehearse.rehearsal_arrivals import ArrivalChecks, Arrivals
from pipeproof.exec.rehearse.rehearsal_world import CollectiveInputs, RehearsalWorld
from pipeproof.schedule.op_table import NONE
from pipeproof.schedule.ops import COMPUTE_KINDS, OpKind
from pipeproof.specs.plan_sections import RunSpec
from pipeproof.stages.common.weights import WeightGradients
from pipeproof.stages.describe.gradient_facts import routers
from pipeproof.stages.describe.layer import COUNTS_DTYPE
from pipeproof.stages.describe.layer_records import LayerWatch
from pipeproof.stages.describe.stage_memory import Kept, shard_numel
from pipeproof.verify.subject import Subject

Tensors = Sequence[RehearsalTensor]


class RehearsalStage:
    """One stage on one rank, without values; a ``RankStage``."""

    def __init__(self, rehearsal: RehearsalStages, number: int) -> None:
        self._rehearsal, self.number = rehearsal, number
        plan = rehearsal.plan
        sizes, dtype = {axis: plan.mesh.size(axis) for axis in ("tp", "ep")}, plan.spec.run.weight_dtype
        self.parameters = {
            weight.name: RehearsalTensor(weight.local_shape(sizes), dtype)
            for weight in plan.weights_of(number, rehearsal.coords["pp"])
        }

    def forward(
        self, inputs: Tensors, *, step: int, index: int, split: int, watch: LayerWatch | None
    ) -> tuple[RehearsalTensor, ...]:
        schedule = self._rehearsal.plan.spec.schedule
        work_item = index % schedule.num_micro_batches * schedule.num_sequence_splits + split
        self._rehearsal.compute(OpKind.FORWARD, self.number, work_item, inputs, ())
        if self.number == len(self._rehearsal.plan.edges):
            outputs: list[RehearsalTensor | None] = [RehearsalTensor((), self._rehearsal.plan.spec.run.dtype)]
        else:
            outputs = self._rehearsal.boundary("output", self.number, work_item)
        return tuple(replace(o, work_item=work_item, inputs=tuple(inputs)) for o in outputs if o is not None)

    def backward_input(self, outputs: Tensors, gradients: Sequence[RehearsalTensor | None]) -> WeightGradients:
        inputs, work_item = outputs[0].inputs, outputs[0].work_item
        for kind in (OpKind.BACKWARD, OpKind.BACKWARD_INPUT):
            self._rehearsal.compute(kind, self.number, work_item, inputs, gradients)
        made = self._rehearsal.boundary("input_grad", self.number, work_item) if self.number else ()
        for tensor, gradient in zip(inputs, made, strict=True):
            tensor.gradient = gradient
        deferred = WeightGradients()
        deferred.defer(
            lambda: self._rehearsal.compute(OpKind.BACKWARD_WEIGHT, self.number, work_item, inputs, gradients)
        )
        return deferred

    def return_gradients(self) -> None:
        """Do nothing: gradients have no values."""


class RehearsalRouters:
    """Routers of one stage, whose loads are summed; a ``Routers``."""

    def __init__(self, names: Sequence[str], num_experts: int) -> None:
        self._names, self._num_experts = names, num_experts

    def begin(self) -> None: ...

    def biased(self) -> Sequence[str]:
        return self._names

    def load(self, experts: str) -> RehearsalTensor:
        return RehearsalTensor((self._num_experts,), COUNTS_DTYPE)

    def set_load(self, experts: str, load: Tensor) -> None: ...

    def move_biases(self) -> None: ...

    def bias(self, experts: str) -> RehearsalTensor:
        return self.load(experts)

    def put_bias(self, experts: str, bias: Tensor) -> None: ...

    def values(self) -> dict[str, Array]:
        return {}


class RehearsalStages:
    """Factory of a rank's stages; a ``Stages``. ``issued`` are the collectives of layers."""

    def __init__(
        self,
        plan: LoweredPlan,
        coords: Mapping[str, int],
        issued: StageCollectives,
        inputs: CollectiveInputs,
        arrivals: Arrivals,
    ) -> None:
        self.plan, self.coords = plan, coords
        self._issued, self._inputs, self._arrivals = issued, inputs, arrivals
        self._ops: dict[tuple[OpKind, int, int], int] = {}
        self._children: dict[int, list[int]] = {}
        graph = plan.graph
        for op_id in graph.rank_ops(arrivals.rank):
            kind, parent = graph.ops[op_id].kind, int(graph.parent[op_id])
            if kind in COMPUTE_KINDS:
                self._ops[kind, int(graph.stage[op_id]), int(graph.work_item[op_id])] = op_id
            elif parent != NONE:
                self._children.setdefault(parent, []).append(op_id)

    def make(self, number: int, lent: Mapping[str, RehearsalTensor]) -> RehearsalStage:
        return RehearsalStage(self, number)

    def routers(self, stage: RankStage) -> RehearsalRouters | None:
        assert isinstance(stage, RehearsalStage)
        num_experts = num_loads(self.plan.spec)
        return RehearsalRouters(routers(self.plan.layers_of(stage.number)), num_experts) if num_experts else None

    def load(self, step: int) -> None:
        self._arrivals.begin(step)

    def compute(
        self,
        kind: OpKind,
        stage: int,
        work_item: int,
        inputs: Sequence[RehearsalTensor | None],
        gradients: Sequence[RehearsalTensor | None],
    ) -> None:
        """Check the input of a computation, if the rank has one of this kind, and issue its collectives."""
        op_id = self._ops.get((kind, stage, work_item))
        if op_id is None:
            return
        op, forward, backward = str(self.plan.graph.ops[op_id]), (stage, work_item, True), (stage, work_item, False)
        self._arrivals.read_slots(forward, inputs, op)
        if kind is OpKind.FORWARD:
            self._arrivals.require_layouts(forward, inputs)
        else:
            self._arrivals.read_slots(backward, gradients, op)
        if kind in (OpKind.BACKWARD, OpKind.BACKWARD_INPUT):
            self._arrivals.require_layouts(backward, gradients)
        for child in self._children.get(op_id, ()):
            self._issue(child)

    def boundary(self, side: str, stage: int, work_item: int) -> list[RehearsalTensor | None]:
        """Return the tensors that a stage makes for a boundary's members, None for members without a gradient."""
        edge = self.plan.edges[stage if side == "output" else stage - 1]
        variant = edge.by_micro_batch[work_item] if edge.by_micro_batch else 0
        members = range(len(edge.variants[variant]))
        return [self._arrivals.outgoing(side, stage, variant, member, work_item) for member in members]

    def _issue(self, op_id: int) -> None:
        row, tensor = self.plan.graph.row(op_id), self._inputs.tensor(op_id)
        axis = self.plan.graph.groups[row.group].axis
        match row.op.kind:
            case OpKind.ALL_REDUCE:
                self._issued.all_reduce(tensor, label="", reduction=row.reduction or "sum")
            case OpKind.ALL_GATHER:
                self._issued.all_gather(tensor, 0, label="", axis=axis)
            case OpKind.REDUCE_SCATTER:
                self._issued.reduce_scatter(tensor, 0, label="", axis=axis)
            case _:
                self._issued.all_to_all(tensor, *self._inputs.exchanged(op_id), label="")


class RehearsalOptimizer:
    """Optimizer that only makes the tensors that ranks communicate; an ``Optimizer`` and a ``ShardedOptimizer``."""

    def __init__(self, weights: Mapping[str, RehearsalTensor], num_shards: int = 1) -> None:
        self.updated, self._num_shards = dict(weights), num_shards

    def zero_grad(self) -> None: ...

    def step(self) -> None: ...

    def state(self) -> dict[tuple[str, str], Tensor]:
        return {}

    def restore_state(self, weights: Mapping[str, Tensor], slots: Mapping[tuple[str, str], Tensor]) -> None: ...

    def allocate(self) -> None: ...

    def to_scatter(self, name: str) -> RehearsalTensor:
        shard = self.to_gather(name)
        return shard.reshape((self._num_shards * shard.numel,))

    def put_sum(self, name: str, part: Tensor) -> None: ...

    def to_gather(self, name: str) -> RehearsalTensor:
        weight = self.updated[name]
        return weight.reshape((shard_numel(weight.numel, self._num_shards),))

    def put_whole(self, name: str, shares: Tensor) -> None: ...

    def drop_weights(self) -> None: ...


class RehearsalClip:
    """Clip that only has the vector of squared norms; a ``Clip``."""

    def __init__(self, num_weights: int, dtype: str) -> None:
        self.squares = RehearsalTensor((num_weights,), dtype)

    def begin(self) -> None: ...

    def clip(self, weights: Mapping[str, RehearsalTensor]) -> None: ...


class RehearsalFramework:
    """Rehearsal of one rank of an unfolded plan over a ``real`` framework, which only moves bytes; a ``Framework``.

    ``checked`` has the results of all checks.
    """

    has_values = False

    def __init__(self, real: Framework, subject: Subject, rank: int) -> None:
        self._real, self._run = real, subject.plan.spec.run
        self.arrays = RehearsalArrays(real.arrays)
        self._arrivals = Arrivals(subject, rank, self.arrays)
        groups = (index for index, group in enumerate(subject.graph.groups) if rank in group.ranks)
        self._inputs = CollectiveInputs(self._arrivals, groups, self._run)
        self.num_threads, self.checked = real.num_threads, self._arrivals.checked

    def connect(self, rank: int, plan: LoweredPlan, progress: Callable[[str], None]) -> RehearsalWorld:
        return self.world(self._real.connect(rank, plan, progress))

    def world(self, real: World) -> RehearsalWorld:
        """Return the communication of the rehearsal over the framework's."""
        self._real_world = real
        return RehearsalWorld(real, self._inputs, self.arrays, self._arrivals)

    def finish(self, job: Job, emit: Emit) -> None:
        """Time the edges after the last step, write the measurements and checks, and wait for all ranks."""
        arrays, real = self.arrays.real, self._real_world
        times: EdgeTimes = {}
        if not job.options.share_gpus:  # with shared GPUs edges are sockets
            clock = start_ping_clock(self._run, arrays)
            graph, device = self._arrivals.graph, self._run.device
            times = ping_edges(real, arrays, clock, graph, device, lambda phase: emit("setup", what=phase))
        save_json(job.rank_file(real.rank, "edges"), times, EdgeTimes)
        save_json(job.rank_file(real.rank, "checks"), self.checked, ArrivalChecks)
        # The host runs ahead of a GPU: if a rank ended now, its peers would not get its last messages.
        arrays.synchronize()
        real.barrier()

    def stages(self, plan: LoweredPlan, coords: Mapping[str, int], collectives: StageCollectives) -> RehearsalStages:
        return RehearsalStages(plan, coords, collectives, self._inputs, self._arrivals)

    def optimizer(self, run: RunSpec, weights: Mapping[str, RehearsalTensor]) -> RehearsalOptimizer:
        return RehearsalOptimizer(weights)

    def sharded_optimizer(
        self, run: RunSpec, weights: Mapping[str, RehearsalTensor], num_shards: int, index: int, kept: Kept
    ) -> RehearsalOptimizer:
        return RehearsalOptimizer(weights, num_shards)

    def clip(self, counted: Mapping[int, RehearsalTensor], num_weights: int, limit: float, dtype: str) -> RehearsalClip:
        return RehearsalClip(num_weights, dtype)

    def gradient(self, weight: RehearsalTensor) -> RehearsalTensor:
        return weight

    def put_gradient(self, weight: RehearsalTensor, gradient: Tensor) -> None: ...

    def main(self, weight: RehearsalTensor) -> RehearsalTensor:
        return weight

    def value(self, weight: RehearsalTensor) -> np.ndarray:
        return self.arrays.to_numpy(weight)


def rehearse_rank(job: Job, rank: int, emit: Emit, real: Framework | None = None) -> None:
    """Rehearse every step of one rank's program, as ``run_rank``; ``real`` is the plan's framework if it was started.

    Raises:
        RuntimeError: this process derives another plan than the verified one, a peer died, or the backend failed.
    """
    subject = verified_subject(job)
    if real is None:
        real = start_framework(subject.plan.spec.run, computes=False, share_gpus=job.options.share_gpus)
    rehearsal = RehearsalFramework(real, subject, rank)
    run_steps(job, subject, rank, emit, rehearsal, lambda: rehearsal.finish(job, emit))


if __name__ == "__main__":
    end_process(main(sys.argv[1:], rehearse_rank))
