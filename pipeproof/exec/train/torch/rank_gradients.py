"""Weights and gradients of one rank's stages: their common norm, overflows, and copies on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.train.torch.data_parallel import groups_of, local_part
from pipeproof.exec.train.torch.module_stage import ModuleStage, trained
from pipeproof.exec.train.torch.script_groups import ScriptGroup


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
        """Make gradients that are not finite on one rank so on all, without waiting for the device."""
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
        found: dict[tuple[int, str], torch.Tensor] = {}
        for number, stage in self._modules.items():
            for name, weight in trained(stage.module).items():
                tensor = weight if what == "weights" else weight.grad
                if tensor is None:
                    tensor = torch.zeros_like(weight)
                whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                found[number, name] = whole.detach().cpu().clone()
        return found

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
