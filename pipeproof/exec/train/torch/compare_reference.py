"""Comparison of gradients with the unpartitioned module, which runs on one rank in the plan's order of sums."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from pipeproof.analysis.align.array_digests import Array, largest, max_relative, relative_difference
from pipeproof.comm.accumulation_order import sum_orders
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.comparison import Comparison, comparison_of, gradient_difference
from pipeproof.exec.train.torch.boundary_inference import unchanged_state
from pipeproof.exec.train.torch.module_stage import StepData
from pipeproof.exec.train.torch.record_layers import to_numpy
from pipeproof.exec.train.torch.stage_keywords import StepInputs
from pipeproof.exec.train.torch.start_phases import Settings
from pipeproof.exec.train.torch.step_loss import NUM_ITEMS, StepTerms, detached_metrics, divided, loss_terms
from pipeproof.exec.train.torch.step_runner import StepRunner

NameOf = Callable[[int, str], str]
"""The reference's name of a stage's parameter."""
Order = tuple[int, ...]


def default_names(reference: nn.Module) -> NameOf:
    """Stages whose parameters have the reference's names; else ``stage.name``, as in a list of the stages."""
    by_name = dict(reference.named_parameters(remove_duplicate=False))

    def name_of(stage: int, name: str) -> str:
        full_name = next((each for each in (name, f"{stage}.{name}") if each in by_name), None)
        if full_name is None:
            raise PipelineError(
                f"the reference has no parameter {name!r}, as stage {stage} calls it, nor {stage}.{name!r}: pass "
                "`name_of=` with the reference's name of each"
            )
        return full_name

    return name_of


def compare_step(
    runner: StepRunner,
    run: Callable[[], torch.Tensor | None],
    reference: nn.Module | None,
    name_of: NameOf | None,
    inputs: StepInputs,
) -> Comparison:
    """Run one step by ``run``, and compare it with the reference; all ranks return the same, see ``Pipeline.compare``.

    Raises:
        PipelineError: the first rank has no reference, or the reference raised.
    """
    ranks, gradients = runner.ranks, runner.gradients
    with runner.unchanged():
        loss = run()
        own = {
            "loss": None if loss is None else float(loss),
            "compiled": any(stage.split == "graph" for stage in runner.modules.values())
            and runner.settings.compiler == "inductor",
            "weights": gradients.copies("weights"),
            "gradients": gradients.copies("gradients"),
            "received": gradients.received(),
        }
    shards: list[Any] | None = [None] * ranks.num_ranks if ranks.rank == 0 else None
    dist.gather_object(own, shards, dst=ranks.global_ranks[0], group=ranks.group)

    plan = runner.signature.plan
    assert plan is not None

    def compared() -> dict[str, Any] | None:
        if shards is None:
            return None
        if reference is None:
            raise PipelineError("the first rank of the pipeline needs the reference module")
        data = runner.contract.whole_data(inputs, runner.signature.num_micro_batches, None)
        with unchanged_state([reference], runner.device):
            comparison = compare_with_reference(
                reference, plan.lowered, shards, data, runner.settings, name_of or default_names(reference),
                is_compiled=any(shard["compiled"] for shard in shards),
            )  # fmt: skip
        return asdict(comparison)

    return comparison_of(ranks.agreement.gather(f"comparison {runner.num_steps}", compared)[0])


def compare_with_reference(
    reference: nn.Module,
    plan: LoweredPlan,
    shards: Sequence[Mapping[str, Any]],
    data: StepData,
    settings: Settings,
    name_of: NameOf,
    *,
    is_compiled: bool,
) -> Comparison:
    """Load the pipeline's weights into the reference, run it, and compare.

    ``shards`` has for each rank the keys ``loss``, ``weights`` and ``gradients``, the last two by (stage, name), and
    ``received``, the (stage, name) of the weights with a gradient. ``data`` has the micro-batches of the step, and
    keyword arguments under 0. With ``is_compiled`` some operations ran in compiled graphs.
    """
    weights, gradients = ({k: v for shard in shards for k, v in shard[key].items()} for key in ("weights", "gradients"))
    parameters = dict(reference.named_parameters(remove_duplicate=False))
    first = {id(weight): name for name, weight in reference.named_parameters()}  # a tied weight has several names
    names = {key: first[id(parameters[name_of(*key)])] for key in weights}
    with torch.no_grad():
        for key, value in weights.items():
            parameters[names[key]].copy_(value)
    num = plan.spec.schedule.num_micro_batches
    targets = [None] * num if data.targets is None else data.targets
    runs = _Runs(reference, data.args, targets, data.kwargs[0], data.loss_kwargs, settings)
    orders = sum_orders(plan)
    differences = []
    num_stages = Counter(names.values())  # the sums of a weight of several stages are added per stage
    for (stage, name), gradient in sorted(gradients.items()):
        whole = names[stage, name]
        expected = runs.summed(orders.by_stage[stage])[whole]
        mine = gradient.to(expected.device)
        if torch.equal(mine, expected):
            continue
        (x, dtype), (y, _) = map(to_numpy, (mine, expected))
        noise = runs.noise(whole, y) if is_compiled else None
        cancellation = runs.cancellation(whole, y) if num_stages[whole] > 1 else None
        differences.append(
            gradient_difference(whole, stage, (x, y), dtype, noise=noise, cancellation=cancellation)
        )  # fmt: skip
    loss = next(shard["loss"] for shard in shards if shard["loss"] is not None)
    received = {names[key] for shard in shards for key in shard["received"]}
    without_gradient = tuple(sorted({*names.values()} - received))
    return Comparison(float(loss), float(runs.loss()), len(gradients), tuple(differences), without_gradient)


class _Runs:
    """Gradients of the reference, added up in several orders of micro-batches."""

    def __init__(
        self, module: nn.Module, args: Sequence[Any], targets: Sequence[Any], kwargs: Sequence[Mapping[str, Any]],
        loss_kwargs: Sequence[Mapping[str, Any]], settings: Settings,
    ) -> None:  # fmt: skip
        self._module, self._args, self._targets, self._kwargs = module, args, targets, kwargs
        self._loss_kwargs, self._settings = loss_kwargs, settings
        self._is_mean = settings.averages_losses and NUM_ITEMS not in loss_kwargs[0]
        self._by_order: dict[Order, dict[str, torch.Tensor]] = {}
        self._terms = StepTerms()
        self._exact: dict[str, torch.Tensor] | None = None

    def summed(self, orders: Sequence[Order]) -> dict[str, torch.Tensor]:
        """The gradients of all micro-batches: each order's sum, then these sums in turn, as copies of a stage do."""
        parts = [self._of(order) for order in orders]
        total = dict(parts[0])
        for part in parts[1:]:
            total = {name: total[name] + part[name] for name in total}
        if self._terms.counts:
            total = {name: divided(gradient, self._count()) for name, gradient in total.items()}
        return total

    def loss(self) -> torch.Tensor:
        """The loss of the step."""
        losses = self._terms.in_order()
        total = torch.stack(losses).sum()
        if self._terms.counts:
            return divided(total, self._count())
        return total / len(losses) if self._is_mean else total

    def _count(self) -> torch.Tensor:
        return torch.stack([*self._terms.counts.values()]).sum()

    def cancellation(self, name: str, gradient: Array) -> float:
        """Ratio of the largest sum of a gradient's addends' sizes, in float64, to its largest element."""
        sizes = sum(self._of((index,))[name].abs().double() for index in range(len(self._args)))
        scale = 1 / float(self._count()) if self._terms.counts else 1.0
        return max(1.0, relative_difference(float(torch.as_tensor(sizes).max()) * scale, largest(gradient)))

    def noise(self, name: str, gradient: Array) -> float:
        """The reference's own relative distance from float64: compiled operations round at other steps."""
        if self._exact is None:
            with torch.autocast(self._of((0,))[name].device.type, enabled=False):
                module = copy.deepcopy(self._module).double()
                args, targets, kwargs, loss_kwargs = map(
                    _exact, (self._args, self._targets, self._kwargs, self._loss_kwargs)
                )
                runs = _Runs(module, args, targets, kwargs, loss_kwargs, self._settings)
                self._exact = runs.summed([tuple(range(len(self._args)))])
        return max_relative(gradient, to_numpy(self._exact[name])[0])

    def _of(self, order: Order) -> dict[str, torch.Tensor]:
        if order not in self._by_order:
            self._module.zero_grad(set_to_none=True)
            for index in order:
                output = self._module(*self._args[index], **self._kwargs[index])
                loss_fn, source = self._settings.loss_fn, "the reference"
                returned = (
                    output if loss_fn is None else loss_fn(output, self._targets[index], **self._loss_kwargs[index])
                )
                terms = loss_terms(detached_metrics(returned), self._settings.normalize, source)
                self._terms.add(index, terms, source)
                (terms.loss / len(self._args) if self._is_mean else terms.loss).backward()
            self._by_order[order] = {
                name: torch.zeros_like(weight) if weight.grad is None else weight.grad
                for name, weight in self._module.named_parameters()
            }
            self._module.zero_grad(set_to_none=True)
        return self._by_order[order]


def _exact(values: Any) -> Any:
    """Values of micro-batches with all real numbers in float64."""
    return tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, values)
