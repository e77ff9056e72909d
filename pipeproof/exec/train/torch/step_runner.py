"""Steps of one rank: the script's arguments are split, the plan's program runs, and its results are collected."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.monitor.plan_ring import PlanRing, ring_of_process
from pipeproof.exec.monitor.torch_watch import watch
from pipeproof.exec.rank.op_log import Clock
from pipeproof.exec.rank.pipeline_failures import PipelineFailures
from pipeproof.exec.rank.stall_watch import StallWatch
from pipeproof.exec.rank.torch.cuda_graph import CaptureStream, TorchProgress
from pipeproof.exec.rank.torch.op_timing import op_ranges
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.module_plan import TrainedPlan
from pipeproof.exec.train.torch.boundary_inference import unchanged_state
from pipeproof.exec.train.torch.channel_groups import ScriptGroup, StageWorld
from pipeproof.exec.train.torch.data_parallel import ReplicatedStepEnd, groups_of, local_part
from pipeproof.exec.train.torch.module_stage import MissingGradients, ModuleStage, StepData, TorchModules, trained
from pipeproof.exec.train.torch.overlap_points import at_overlap_points
from pipeproof.exec.train.torch.replayed_step import Replays
from pipeproof.exec.train.torch.roll_call import RollCall
from pipeproof.exec.train.torch.signatures import Signature, Signatures, digests_of, require_same_digests
from pipeproof.exec.train.torch.split_backward import gradients_aside
from pipeproof.exec.train.torch.stage_keywords import StepInputs
from pipeproof.exec.train.torch.start_phases import Connected, Placed, Planned, Ranks, Settings, alternates
from pipeproof.exec.train.torch.step_loss import (
    NUM_ITEMS,
    StepLoss,
    StepTerms,
    divide_gradients,
    earlier_aside,
    with_tensor_number,
)
from pipeproof.exec.train.train_rank import TrainRank

if TYPE_CHECKING:
    from pipeproof.exec.rank.framework_protocol import Framework, World


_FIRST_WAIT = -2
"""The number for the wait for rank 0's word, in place of an operation number; other ranks follow downwards."""


class StepRunner:
    """The steps of a pipeline that has started."""

    def __init__(
        self, ranks: Ranks, settings: Settings, placed: Placed, planned: Planned, plan: TrainedPlan,
        connected: Connected,
    ) -> None:  # fmt: skip
        self.ranks, self.settings, self.plan, self.device = ranks, settings, plan, placed.device
        self.num_stages, self.num_micro_batches = placed.num_stages, plan.lowered.spec.schedule.num_micro_batches
        self.micro_batch_size = planned.num_rows
        self.modules, self.world = connected.modules, connected.world
        self.gradients = RankGradients(self.modules, plan.lowered, ranks.rank, self.device, ranks.script_group)
        self.framework = TorchModules(self.device, self.modules)
        self._missing = MissingGradients(ranks.agreement, plan.lowered.owner)
        self._replicas, self._alternates = placed.replicas, alternates(plan, settings)
        self.contract = planned.contract
        self._failures = PipelineFailures(ranks.agreement, self.world.abort)
        self._progress = TorchProgress() if self.device.type == "cuda" else None
        self._replays = Replays(self.gradients.trained_by_name, CaptureStream(self.device)) if settings.replay else None
        roll = RollCall(self.world.rounds, self._wait_for)
        self._signatures = Signatures(ranks, settings, placed, planned, plan, roll)
        self.signature = self._signatures.first
        """The sizes of the last step that began."""
        self._make_train: Callable[[LoweredPlan], TrainRank] | None = None
        self.current = self.signature.train = self.rank_of(plan.lowered)
        """The machine of the last step that began."""
        self._entered = -1
        self.num_steps = 0
        """Number of steps that have begun."""
        self.watch = StallWatch(
            connected.watched, settings.timeout_s, weakref.WeakMethod(self._describe), self.world.abort,
            None if self._progress is None else self._progress.read,
            partial(_let_go, None if self._replays is None else weakref.ref(self._replays), self.world),
        )  # fmt: skip
        ranks.script_group.at_end(self.watch.close)
        self._num_replicas = next(iter(self._replicas.values())).size
        self._loss = self._step_loss()

    def rank_of(self, lowered: LoweredPlan, channels: Any = None, clock: Clock | None = None) -> TrainRank:
        """This rank's machine and adapter for a plan, optionally with other channels and another clock."""
        own = self.world if channels is None else replace(self.world, channels=channels)
        sums = {each.members: each for each in self.world.collectives.values()}
        step_end = partial(ReplicatedStepEnd, self._replicas, sums)
        framework, world = cast("Framework", self.framework), cast("World", own)  # without optimizers
        return TrainRank(
            lowered, self.ranks.rank, framework, world, self._enter, step_end, clock,
            is_proved=not self.plan.findings,
            overlap_points=at_overlap_points if self._alternates and channels is None else None, annotate=op_ranges,
            ring=None if channels is not None else self._ring_of(lowered),
        )  # fmt: skip

    @contextmanager
    def running(self, make: Callable[[LoweredPlan], TrainRank]) -> Iterator[None]:
        """Run the steps of this block on other machines, one for each plan, and operation by operation."""
        made: dict[int, TrainRank] = {}

        def of_plan(plan: LoweredPlan) -> TrainRank:
            if id(plan) not in made:
                made[id(plan)] = make(plan)
            return made[id(plan)]

        self._make_train = of_plan
        try:
            yield
        finally:
            self._make_train = None

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Run steps that leave gradients, buffers and random states as they were.

        They run operation by operation: a replay would write to the gradients that are put aside.
        """
        replays, self._replays = self._replays, None
        try:
            with gradients_aside(self.gradients.parameters()), self.unchanged_state():
                yield
        finally:
            self._replays = replays

    def unchanged_state(self) -> AbstractContextManager[None]:
        """A context that leaves buffers and random states as they were."""
        return unchanged_state([stage.module for stage in self.modules.values()], self.device)

    def one_error(self) -> AbstractContextManager[None]:
        """A context whose errors on one rank are errors on all.

        Raises:
            PipelineError: the pipeline has ended.
        """
        if self.watch.is_closed:
            raise PipelineError("this pipeline has ended: close() was called, or its process group was destroyed")
        return self._failures.as_one(self.watch, RuntimeError, self._note_operation)

    def step(self, inputs: StepInputs, scaler: torch.amp.GradScaler | None) -> tuple[torch.Tensor | None, StepTerms]:
        """Run or replay forward and backward of all micro-batches; return the loss, and the micro-batches' losses."""
        inputs = inputs._replace(loss_kwargs=with_tensor_number(inputs.loss_kwargs, self.device))
        by_tokens = self.settings.normalize == "tokens"
        weights = self.gradients.parameters() if by_tokens else []
        if by_tokens and isinstance(self.settings.loss_fn, nn.Module):
            weights += self.settings.loss_fn.parameters()
        with earlier_aside(weights, copies=self._replays is not None) if by_tokens else nullcontext():
            data = self._run(inputs, scaler)
            terms = self._loss.of_all_copies(data.terms, self.signature.num_micro_batches)
            loss, count = self._loss.total(terms, has_share=NUM_ITEMS in inputs.loss_kwargs, is_training=True)
            if count is not None:
                divide_gradients(weights, count / self._num_replicas)
        if scaler is not None and scaler.is_enabled():
            with self.watch.calling("the exchange of overflows"):
                self.gradients.share_overflow()
        return loss, terms

    def _run(self, inputs: StepInputs, scaler: torch.amp.GradScaler | None) -> StepData:
        weights: list[nn.Parameter] = []
        signature = self._agreed("step", inputs, partial(self._require_trainable, scaler, weights))
        rank, step = self._train_of(signature), self._begin()
        if self._progress is not None:
            self._progress.begin(step)
        execute = partial(self._execute, rank, signature, step, scaler, weights)
        replay = None
        if self._replays is not None and self._make_train is None:
            replay = self._replays.of(self._signatures.words, self._signatures.known)
        if replay is None:
            return execute(inputs)
        was_captured = replay.is_captured
        data = replay.run(inputs, execute)
        if not was_captured:
            replay.last_op = self._entered
        if replay.is_captured:
            self.watch.enter(step, replay.last_op, on_device=True)
        return data

    def evaluate(self, inputs: StepInputs) -> tuple[torch.Tensor | None, StepTerms, list[Any]]:
        """Run the forwards; return the loss, the micro-batches' losses, and outputs if the last stage had no target."""
        signature = self._agreed("eval_step", inputs, lambda: None)
        if signature.forward is None:
            assert signature.forward_plan is not None
            signature.forward = self.rank_of(signature.forward_plan.lowered)
        self.current = signature.forward
        data = self._execute(signature.forward, signature, self._begin(), None, self.gradients.parameters(), inputs)
        for replicas in self._replicas.values():
            replicas.reshard()
        torch.clear_autocast_cache()  # it may hold casts without a graph
        terms = data.terms if data.outputs else self._loss.of_all_copies(data.terms, signature.num_micro_batches)
        loss, _ = self._loss.total(terms, has_share=NUM_ITEMS in inputs.loss_kwargs, is_training=False)
        return loss, terms, [data.outputs[index] for index in sorted(data.outputs)]

    def _step_loss(self) -> StepLoss:
        """The sums of the loss over copies of the last stage, data ranks and ranks of the pipeline."""
        plan, settings, last = self.plan.lowered, self.settings, self._replicas.get(self.num_stages - 1)
        holders = plan.holders[-1]
        shared = [each for each in self.world.collectives.values() if each.members == holders]
        return StepLoss(
            (settings.normalize == "tokens", settings.loss_on == "all", settings.averages_losses),
            shared[0] if last is not None and len(holders) > 1 else None,
            list if last is None or last.size == 1 else partial(getattr, last, "groups"), self.ranks.script_group,
            self.ranks.global_ranks[holders[0]], self.device,
            torch.float64 if plan.spec.run.dtype == "float64" else torch.float32, self.watch.calling,
        )  # fmt: skip

    def _ring_of(self, lowered: LoweredPlan) -> PlanRing | None:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        return ring_of_process(
            watch, lowered.graph, self.ranks.rank, self.ranks.global_ranks, backend, self.framework.arrays
        )

    def _agreed(self, call: str, inputs: StepInputs, require: Callable[[], None]) -> Signature:
        """The signature of the next step, on which all ranks agree before anything is posted."""
        split = partial(self._step_data, inputs, is_training=call == "step")
        self.signature = self._signatures.agreed(call, inputs, require, split)
        if self.settings.check_inputs:
            self._require_same_inputs(inputs)
        return self.signature

    def _train_of(self, signature: Signature) -> TrainRank:
        assert signature.plan is not None
        if self._make_train is not None:
            self.current = self._make_train(signature.plan.lowered)
        else:
            if signature.train is None:
                signature.train = self.rank_of(signature.plan.lowered)
            self.current = signature.train
        return self.current

    def _begin(self) -> int:
        step, self.num_steps = self.num_steps, self.num_steps + 1
        return step

    def _wait_for(self, rank: int) -> None:
        """Note that this rank waits for the word of another one."""
        self.watch.enter(self.num_steps, _FIRST_WAIT - rank)

    def _describe(self, op_id: int) -> Mapping[str, Any]:
        """The facts of an operation, or of a wait for the word of another rank."""
        if op_id <= _FIRST_WAIT:
            return {"op": "the call of a step", "stage": -1, "micro_batch": -1, "peer": _FIRST_WAIT - op_id}
        return self.current.describe(op_id)

    def _enter(self, step: int, op_id: int) -> None:
        self._entered = op_id
        progress = self._progress if self.current is not self.signature.forward else None
        self.watch.enter(step, op_id, on_device=progress is not None)
        if progress is not None:
            progress.write(op_id)

    def _note_operation(self) -> None:
        """Show the operation that raised as this rank's operation, and not the operation that a GPU reports."""
        if self.current.op_id >= 0 and not self.watch.is_calling:
            self.watch.enter(self.num_steps - 1, self.current.op_id)

    def _execute(
        self, rank: TrainRank, signature: Signature, step: int, scaler: torch.amp.GradScaler | None,
        weights: Sequence[nn.Parameter], inputs: StepInputs,
    ) -> StepData:  # fmt: skip
        try:
            is_training, num = rank is not signature.forward, signature.num_micro_batches
            data = self._step_data(inputs, num, None, is_training=is_training)
            data.scaler, data.boundaries = scaler, signature.boundaries
            is_first = is_training and self._missing.is_first_step
            versions, before = self._versions(weights), self.gradients.states() if is_first else {}
            self._missing.owner = rank.plan.owner
            for stage in self.modules.values():
                stage.begin(data, self._missing)
            for replicas in self._replicas.values():
                replicas.begin()
            rank.run(step)
            self._require_unchanged(weights, versions)
            if is_first:
                self._end_first_step(before)
        finally:
            rank.adapter.clear()
            for stage in self.modules.values():
                stage.end()
        return data

    def _step_data(self, inputs: StepInputs, num: int, rows: int | None, *, is_training: bool) -> StepData:
        """Split the script's arguments into ``num`` micro-batches; ``rows`` are the step's, if not checked yet."""
        is_last = self.num_stages - 1 in self.modules
        data = self.contract.step_data(inputs, num, rows, [*self.modules], is_last=is_last)
        if is_last and data.targets is None:
            if len(self.plan.lowered.holders[-1]) > 1 and not is_training:
                raise PipelineError("copies of the last stage share the micro-batches: pass `target` to eval_step()")
            if self.settings.loss_fn is not None and is_training:
                raise PipelineError("this rank has the last stage: pass `target` to step()")
        if is_last:
            self._put_normalization(data, inputs.loss_kwargs, num)
        if self.settings.normalize == "tokens" and is_training:
            _require_no_gradient(inputs)
        return data

    def _require_same_inputs(self, inputs: StepInputs) -> None:
        """Compare the arguments of all ranks by digests."""
        every: list[Any] = [None] * self.ranks.num_ranks
        digests = digests_of(self.contract.keywords.assigned(inputs))
        with self.watch.calling("the comparison of inputs"):
            dist.all_gather_object(every, digests, group=self.ranks.group)
        try:
            require_same_digests(every)
        except PipelineError as error:
            error.leaves_usable = True
            raise

    def _put_normalization(self, data: StepData, loss_kwargs: Mapping[str, Any], num: int) -> None:
        """Set how losses are normalized."""
        settings, has_share = self.settings, NUM_ITEMS in loss_kwargs
        if loss_kwargs and settings.loss_fn is None:
            raise PipelineError("loss_kwargs are for loss_fn, which this Pipeline does not have: pass **kwargs")
        if has_share and settings.normalize == "tokens":
            raise PipelineError(
                f"normalize='tokens' divides by the count that loss_fn returns: leave out {NUM_ITEMS}, or normalize"
            )
        if has_share:
            data.num_replicas = self._num_replicas
        elif settings.averages_losses:
            data.num_losses = num

    def _require_trainable(self, scaler: torch.amp.GradScaler | None, weights: list[nn.Parameter]) -> None:
        """Refuse a step without gradients, and parameters that the plan does not have: no norm would count them.

        All parameters are appended to ``weights``: modules may have others in each step, and are walked once.
        """
        if not torch.is_grad_enabled():
            raise PipelineError(
                "step() runs backwards, and gradients are disabled (torch.no_grad or inference_mode): use eval_step()"
            )
        if self._replays is not None and scaler is not None and scaler.is_enabled():
            raise PipelineError("replay=True: a GradScaler changes between steps: use bfloat16, or replay=False")
        for number, stage in self.modules.items():
            planned = {id(weight) for weight in stage.parameters.values()}
            for weight in _weights_in(stage.module):
                weights.append(weight)
                if weight.requires_grad and id(weight) not in planned and not self._replicas[number].is_sharded:
                    name = next(name for name, other in stage.module.named_parameters() if other is weight)
                    raise PipelineError(
                        f"stage {number}: parameter {name} was frozen when the Pipeline was made, or is another object "
                        "than then: make a new Pipeline after changes of requires_grad, and load values with copy_ "
                        "(load_state_dict without assign=True)"
                    )

    def _versions(self, weights: Sequence[nn.Parameter]) -> list[int]:
        """Numbers of writes of all parameters, which an optimizer inside of a step would increase."""
        if any(each.is_sharded for each in self._replicas.values()):
            return []  # fully_shard writes gathered weights
        return [weight._version for weight in weights]  # noqa: SLF001

    def _require_unchanged(self, weights: Sequence[nn.Parameter], versions: Sequence[int]) -> None:
        if versions and list(versions) != self._versions(weights):
            raise PipelineError(
                "parameters changed inside of step(): later micro-batches used other weights; step the optimizer after "
                "Pipeline.step (not in a hook), and keep what a forward itself updates in buffers"
            )

    def _end_first_step(self, before: Mapping[int, tuple[torch.Tensor | None, int]]) -> None:
        """Let all ranks know which stages have unused inputs; ``before`` are the gradients before the step."""

        def unused() -> list[int]:
            after = self.gradients.states()
            changed = {n for n, (grad, writes) in after.items() if grad is not before[n][0] or writes != before[n][1]}
            for stage in self.modules.values():
                stage.require_gradients(changed)
            return self._missing.unused

        self._missing.end_first_step(self.ranks.agreement.gather("first step", unused))


def _require_no_gradient(values: Any) -> None:
    """Refuse tensors of the script that would get gradients of the undivided sum."""
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(values)):
        raise PipelineError(
            "normalize='tokens' divides the gradients of the stages' parameters, and an argument of this step requires "
            f"a gradient: detach it, or divide in loss_fn by {NUM_ITEMS} of loss_kwargs"
        )


def _let_go(replays: weakref.ref[Replays] | None, world: StageWorld) -> None:
    """Drop graphs, then the groups that they use: a communicator of NCCL does not end before its graphs."""
    kept = None if replays is None else replays()
    if kept is not None:
        kept.close()
    world.close()


# --- Gradients of the stages of one rank ---


class RankGradients:
    """The gradients of the stages ``modules``; ``group`` are the ranks of the pipeline."""

    def __init__(
        self, modules: Mapping[int, ModuleStage], plan: LoweredPlan, rank: int, device: torch.device,
        group: ScriptGroup,
    ) -> None:  # fmt: skip
        self._modules, self._plan, self._rank, self._device, self._group = modules, plan, rank, device, group

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's stages, each once."""
        every = (weight for stage in self._modules.values() for weight in stage.module.parameters())
        return [*{id(weight): weight for weight in every}.values()]

    def states(self) -> dict[int, tuple[torch.Tensor | None, int]]:
        """The gradient of each parameter by its id, with its number of writes."""
        return {
            id(weight): (weight.grad, -1 if weight.grad is None else weight.grad._version)  # noqa: SLF001
            for weight in self.parameters()
        }

    def trained_by_name(self) -> dict[str, nn.Parameter]:
        """The trained parameters, by names for messages."""
        return {f"{n}.{name}": w for n, stage in self._modules.items() for name, w in trained(stage.module).items()}

    def total_norm(self) -> torch.Tensor:
        """The 2-norm of the gradients of all stages; every rank calls it."""
        plan = self._plan
        every = (w.name for n, holders in enumerate(plan.holders) for w in plan.weights_of(n, holders[0]))
        position = {name: index for index, name in enumerate(dict.fromkeys(every))}
        dtype = torch.float64 if plan.spec.run.dtype == "float64" else torch.float32
        norms = torch.zeros(len(position), dtype=dtype, device=self._device)
        for name, weight in self._counted().items():
            gradient = weight.grad.coalesce().values() if weight.grad.is_sparse else weight.grad
            norm = torch.linalg.vector_norm(gradient, dtype=dtype)
            norms[position[name]] = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        dist.all_reduce(norms, group=self._group())  # exact: each is on one rank, and zero on all others
        return torch.linalg.vector_norm(norms)

    def share_overflow(self) -> None:
        """Spread non-finite gradients of one rank to all ranks, without waiting for the device."""
        gradients = [weight.grad for weight in self.parameters() if weight.grad is not None]
        local = [part for part in map(local_part, gradients) if part.numel()]
        bad = torch.zeros((), device=self._device)
        for part in local:
            bad = torch.maximum(bad, part.isfinite().all().logical_not().float())
        for group in (*groups_of(gradients), self._group()):  # first over the shards of this rank's stages
            dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=group)
        factor = torch.where(bad > 0, float("inf"), 1.0)
        for dtype in {part.dtype for part in local}:  # one element of each, as each optimizer looks at its own
            firsts = [part[(0,) * part.dim()] for part in local if part.dtype == dtype]
            torch._foreach_mul_(firsts, factor.to(dtype))

    def copies(self, what: Literal["weights", "gradients"]) -> dict[tuple[int, str], Any]:
        """Whole copies on the CPU of the trained weights or their gradients, by stage and name in the module."""
        tensors: dict[tuple[int, str], torch.Tensor] = {}
        for number, stage in self._modules.items():
            for name, weight in trained(stage.module).items():
                tensor = weight if what == "weights" else weight.grad
                if tensor is None:
                    tensor = torch.zeros_like(weight)
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                tensors[number, name] = whole.detach().cpu().clone()
        return tensors

    def received(self) -> list[tuple[int, str]]:
        """The stage and name of each trained weight that has a gradient."""
        return [
            (number, name)
            for number, stage in self._modules.items()
            for name, weight in trained(stage.module).items()
            if weight.grad is not None
        ]

    def _counted(self) -> dict[str, nn.Parameter]:
        """The parameters whose gradients this rank counts in a norm, by the plan's names.

        Shared ones count on their first holder.
        """
        shared = self._plan.shared_weights
        return {
            weight.name: stage.parameters[weight.name]
            for number, stage in self._modules.items()
            for weight in self._plan.weights_of(number, self._rank)
            if shared.places(number, weight.name)[0] == self._rank and stage.parameters[weight.name].grad is not None
        }


def _weights_in(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of a module in its order; ``parameters`` would also make their names, in each step."""
    parts, seen = [module], set[nn.Module]()
    while parts:
        part = parts.pop()
        if part not in seen:
            seen.add(part)
            yield from (weight for weight in part._parameters.values() if weight is not None)  # noqa: SLF001
            parts += [child for child in reversed(part._modules.values()) if child is not None]  # noqa: SLF001
