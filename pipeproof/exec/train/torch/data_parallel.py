"""Data parallelism around a stage: FSDP2, DDP, or replicas whose gradients the pipeline sums itself.

Micro-batches add to local gradients without communication; the sum over the replicas is the plan's ``REDUCE_GRAD:dp``.
FSDP gathers a stage's weights once per step, unless ``fully_shard(reshard_after_forward=True)`` asks for their memory,
and scatters its gradients once. All average over the replicas.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeproof.diagnostics.problems import grouped
from pipeproof.exec.rank.step_end import StepEnd
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.channel_groups import OrderedSums, ScriptGroup
from pipeproof.schedule.ops import Op

BUCKET_BYTES = 25 * 2**20
"""Gradients that are summed together, as DDP's default."""


class Replicas:
    """The replicas of one stage; ``group`` is the process group of a replicated stage, None with FSDP or alone.

    Raises:
        PipelineError: the wrappers do not go together, or not with a pipeline.
    """

    def __init__(
        self, number: int, module: nn.Module, group: dist.ProcessGroup | None,
        around: Callable[[int, nn.Module], nn.Module] = lambda _, module: module,
    ) -> None:  # fmt: skip
        self.number, self.module = number, module
        self._fsdp = _fsdp_roots(module)
        self._ddp = module if _is_ddp(module) else None
        if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
            raise PipelineError(f"stage {number} is wrapped by FSDP1: use fully_shard of torch.distributed.fsdp")
        if self._ddp is None and any(_is_ddp(part) for part in module.modules()):
            raise PipelineError(f"stage {number}: DDP must wrap the whole stage, not a part of it")
        if self._ddp is not None:
            if group is not None:
                raise PipelineError(f"stage {number} is wrapped by DDP, which has its group: no data_group")
            if self._fsdp:
                raise PipelineError(f"stage {number} is wrapped by DDP around fully_shard: use one of them")
            if getattr(self._ddp, "_comm_hooks", None):
                raise PipelineError(
                    f"stage {number}: DDP has a communication hook, which the pipeline's sum at the end of a step "
                    "does not call: remove it"
                )
            group = self._ddp.process_group
        if self._fsdp and group is not None:
            raise PipelineError(f"stage {number} is sharded by fully_shard, which sums its gradients: no data_group")
        self._group = None if group is None else ScriptGroup(group)
        self._called = around(number, module if self._ddp is None else self._ddp.module)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the replicas.

        Raises:
            PipelineError: the script has destroyed it.
        """
        return None if self._group is None else self._group()

    @property
    def size(self) -> int:
        """Number of replicas."""
        if self._fsdp:
            return _num_replicas(self._largest())
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups to sum over, one after another, for a sum over all replicas."""
        if self._fsdp:
            info = self._largest().mesh_info
            names = ("shard_process_group", "replicate_process_group")
            return [getattr(info, name) for name in names if hasattr(info, name)]
        return [] if self.group is None else [self.group]

    def _largest(self) -> Any:
        """The group of parameters with most replicas."""
        states = (part._get_fsdp_state() for root in self._fsdp for part in _fsdp_parts(root))  # noqa: SLF001 - as PyTorch
        return max((group for state in states for group in _groups_of(state)), key=_num_replicas)

    @property
    def is_sharded(self) -> bool:
        """True with FSDP."""
        return bool(self._fsdp)

    def call(self) -> nn.Module:
        """The module to call, inside of ``around``: without DDP, because the pipeline sums at the end of the step."""
        return self._called

    def begin(self) -> None:
        """Begin a step: no backward scatters gradients; weights stay gathered where the script leaves the choice."""
        for root in self._fsdp:
            root.set_requires_gradient_sync(False)
            root.set_is_last_backward(False)
            for part in _fsdp_parts(root):
                if not _reshards(part):
                    part.set_reshard_after_forward(False, recurse=False)
                    part.set_reshard_after_backward(False, recurse=False)
        if self._ddp is not None and self._ddp.will_sync_module_buffers():  # as DDP's forward does
            for buffer in self._ddp.modules_buffers:
                dist.broadcast(buffer, group=self.group, group_src=0)

    def reduce(self) -> None:
        """Average the gradients over the replicas."""
        for root in self._fsdp:
            _finish_fsdp(root)
        self.reshard()
        if self.group is not None:
            with torch.no_grad():
                for bucket in _buckets(self._averaged()):
                    average_gradients(bucket, self.group)

    def reshard(self) -> None:
        """Reshard gathered weights if no backward does."""
        for root in self._fsdp:
            for part in _fsdp_parts(root):
                part.reshard()

    def _averaged(self) -> list[nn.Parameter]:
        """The trained parameters, without those that the script keeps from DDP, such as a rank's own experts."""
        module = self.module if self._ddp is None else self._ddp.module
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        return [weight for name, weight in module.named_parameters() if weight.requires_grad and name not in ignored]


class ReplicatedStepEnd(StepEnd):
    """The end of a step whose gradients are summed over ``dp`` by ``replicas``, by stage number.

    ``sums`` has the sums over the holders of shared weights, by the holders.
    """

    def __init__(
        self, replicas: Mapping[int, Replicas], sums: Mapping[tuple[int, ...], OrderedSums], *args: Any
    ) -> None:
        super().__init__(*args)
        self._replicas, self._sums = replicas, sums
        self._averaged: set[int] = set()
        self._earlier: dict[int, torch.Tensor] = {}
        self._shared = [weight for number in self._stages for weight in self._shared_by(number)]

    def begin(self) -> None:
        """Begin a step; gradients of earlier steps that are summed over ``pp`` already are kept aside."""
        self._averaged.clear()
        self._earlier.clear()
        for weight in self._shared if torch.is_grad_enabled() else ():
            if weight.grad is not None:
                self._earlier[id(weight)], weight.grad = weight.grad, None
        super().begin()

    def reduce(self, op: Op) -> None:
        """Sum shared weights over ``pp`` as the plan has it, and all gradients over ``dp`` as the script's wrappers do.

        FSDP keeps its own gradients until it scatters them; it scatters them before their shards are summed.
        """
        over_dp = str(op.axis) == "dp"
        if over_dp or self._replicas[op.stage].is_sharded:
            self._average(op.stage)
        if not over_dp:
            super().reduce(op)

    def _sum(self, op: Op, name: str) -> None:
        """Sum a shared weight over its holders. One that none of them used gets no gradient, as in one process."""
        weight = self._stages[op.stage].parameters[name]
        has_gradient = torch.full((1,), float(weight.grad is not None), device=weight.device)
        every = self._sums[self._plan.shared_weights.places(op.stage, name)].gathered(has_gradient)
        is_unused = weight.grad is None and not any(map(bool, every))  # only then does the host wait
        super()._sum(op, name)
        earlier = self._earlier.pop(id(weight), None)
        if is_unused:
            weight.grad = earlier
        elif earlier is not None:
            weight.grad = earlier.add_(weight.grad)

    def update(self, stage: int) -> None:
        """End a stage. FSDP over one rank also writes gradients out here, although the plan has no sum over ``dp``."""
        if self._replicas[stage].is_sharded:
            self._average(stage)
        super().update(stage)

    def _average(self, stage: int) -> None:
        if stage not in self._averaged:
            self._averaged.add(stage)
            self._replicas[stage].reduce()

    def _shared_by(self, number: int) -> Iterator[nn.Parameter]:
        """The weights of a stage that other ranks hold too."""
        for parameter in self._plan.weights_of(number, self._coords["pp"]):
            if len(self._plan.shared_weights.places(number, parameter.name)) > 1:
                yield self._stages[number].parameters[parameter.name]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a ``DTensor``, by reference; else the tensor."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def layout_of(tensor: torch.Tensor) -> str:
    """Type and shape of this rank's part, and how a ``DTensor`` is distributed."""
    placements = getattr(tensor, "placements", None)
    distributed = "" if placements is None else " " + "".join(map(str, placements))
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(local_part(tensor).shape)}{distributed}"


def groups_of(tensors: Sequence[torch.Tensor]) -> list[dist.ProcessGroup]:
    """The process groups over which any ``DTensor`` is distributed, in the order of first use, equal on their ranks."""
    groups: dict[str, dist.ProcessGroup] = {}
    for tensor in tensors:
        mesh: Any = getattr(tensor, "device_mesh", None)
        for dim in range(0 if mesh is None else mesh.ndim):
            group = mesh.get_group(dim)
            groups.setdefault(group.group_name, group)
    return list(groups.values())


def _is_ddp(module: nn.Module) -> bool:
    return type(module).__name__ == "DistributedDataParallel"


def _fsdp_module() -> Any:
    from torch.distributed.fsdp import FSDPModule

    return FSDPModule


def _fsdp_roots(module: nn.Module) -> list[Any]:
    if "torch.distributed.fsdp" not in sys.modules:  # its import takes a second
        return []
    if isinstance(module, _fsdp_module()):
        return [module]
    return [root for child in module.children() for root in _fsdp_roots(child)]


def _fsdp_parts(root: Any) -> Iterator[Any]:
    """The modules that ``fully_shard`` was applied to, of a module and all modules in it."""
    return (part for part in root.modules() if isinstance(part, _fsdp_module()))


def _reshards(part: Any) -> bool:
    """True if the script asked to shard the weights again after a forward; the default of FSDP leaves the choice."""
    state = part._get_fsdp_state()  # noqa: SLF001 - as torch.distributed.pipelining does
    is_default = state._auto_reshard_after_forward  # noqa: SLF001
    return not is_default and any(group.post_forward_mesh_info is not None for group in _groups_of(state))


def _groups_of(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def _num_replicas(group: Any) -> int:
    """Number of ranks over which a group is sharded and, with HSDP, replicated."""
    info = group.mesh_info
    return int(getattr(info, "shard_mesh_size", 1) * getattr(info, "replicate_mesh_size", 1))


def _finish_fsdp(root: Any) -> None:
    """Scatter the gradients of all micro-batches, and reshard the weights that stayed gathered for the step.

    Autograd does this after the last backward when it runs FSDP's hooks; a pipeline has many backwards.
    """
    root.set_is_last_backward(True)
    for part in _fsdp_parts(root):
        if not _reshards(part):
            part.set_reshard_after_backward(True, recurse=False)
    root.set_requires_gradient_sync(True)
    state = root._get_fsdp_state()  # noqa: SLF001 - as torch.distributed.pipelining does
    for inner in state._state_ctx.all_states:  # noqa: SLF001
        for group in _groups_of(inner):
            group.post_backward()
    state._root_post_backward_final_callback()  # noqa: SLF001


def _buckets(weights: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Weights of one type, in order, at most ``BUCKET_BYTES`` together unless one is larger.

    They do not depend on which weights have gradients, which may differ between the replicas.
    """
    by_type = grouped((weight.dtype, weight) for weight in weights)
    for same in by_type.values():
        bucket: list[nn.Parameter] = []
        for weight in same:
            if bucket and sum(local_part(x).nbytes for x in (*bucket, weight)) > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(weight)
        yield bucket


def average_gradients(bucket: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradients of a bucket; as with DDP, a replica without one counts as zero.

    The last elements count the replicas that have each gradient: a weight that none of them used gets none.
    """
    missing = [weight for weight in bucket if weight.grad is None]
    for weight in missing:
        weight.grad = torch.zeros_like(weight)
    gradients = [local_part(weight.grad) for weight in bucket]
    counts = gradients[0].new_ones(len(bucket))
    for position, weight in enumerate(bucket):
        if any(weight is other for other in missing):
            counts[position] = 0
    flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), counts])
    dist.all_reduce(flat, group=group)
    *sums, counts = flat.split([*(gradient.numel() for gradient in gradients), len(bucket)])
    torch._foreach_div_(sums, dist.get_world_size(group))
    torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(sums, gradients, strict=True)])
    if missing:  # only then does the host wait
        used = dict(zip(map(id, bucket), counts.tolist(), strict=True))
        for weight in missing:
            if not used[id(weight)]:
                weight.grad = None
