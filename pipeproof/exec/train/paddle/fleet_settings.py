"""Fleet around the pipeline's steps: the settings of ``fleet.init``, equal starts of replicas, and optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import paddle
import paddle.distributed as dist
from paddle import nn
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import HybridParallelOptimizer
from paddle.distributed.fleet.meta_parallel import PipelineLayer
from paddle.distributed.fleet.utils import hybrid_parallel_util as hybrid

from pipeproof.exec.store.train_errors import PipelineError


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Settings of the pipeline. ``ranks`` are the global ranks of its members, in their order."""

    ranks: tuple[int, ...]
    accumulate_steps: int | None = None
    micro_batch_size: int | None = None
    delay_scale_loss: bool = False
    release_gradients: bool = False
    is_best_unbalanced: bool = False


def pipeline_settings(group: Any) -> FleetSettings:
    """Settings of the pipeline over ``group``; None means Fleet's pipeline group, or the world without Fleet.

    Raises:
        PipelineError: this rank is not in the group, or Fleet overlaps operations that the plan orders.
    """
    topology = _topology()
    if topology is None:
        if group is None:
            return FleetSettings(tuple(range(dist.get_world_size())))
        return FleetSettings(_members(group))
    strategy = fleet.fleet._user_defined_strategy  # noqa: SLF001 - where Fleet's own classes read it
    configs, pipeline = strategy.hybrid_configs["pp_configs"], strategy.pipeline_configs
    for name in ("dp_comm_overlap", "sharding_comm_overlap"):
        if getattr(configs, name):
            raise PipelineError(f"pp_configs.{name} sums gradients inside of the pipeline's step: set it to False")
    return FleetSettings(
        _members(topology.get_pipe_parallel_group() if group is None else group),
        int(pipeline["accumulate_steps"]),
        int(pipeline["micro_batch_size"]),
        bool(configs.delay_scale_loss),
        bool(configs.release_gradients),
        bool(configs.best_unbalanced_scheduler),
    )


def _topology() -> Any:
    """Fleet's communication topology; None before ``fleet.init``."""
    return getattr(fleet.fleet, "_hcg", None)


def _members(group: Any) -> tuple[int, ...]:
    ranks = tuple(int(rank) for rank in group.ranks) or (dist.get_rank(),)
    if dist.get_rank() not in ranks:
        raise PipelineError("this rank is not a member of the group")
    return ranks


def fleet_schedule(layers: PipelineLayer, settings: FleetSettings, num_micro_batches: int) -> dict[str, Any]:
    """The keys of ``schedule`` for the class with which Fleet would run a ``PipelineLayer``."""
    if layers._use_dualpipev:  # noqa: SLF001
        return {"kind": "dualpipe_v"}
    num_chunks, num_ranks = layers.get_num_virtual_stages(), len(settings.ranks)
    if num_chunks == 1:
        return {"kind": "1f1b"}
    variant = "fleet_fthenb"
    if num_micro_batches >= 2 * num_ranks:
        variant = "fleet"
    elif settings.is_best_unbalanced:
        variant = "fleet_balanced"
    return {"kind": "interleaved", "num_chunks": num_chunks, "variant": variant}


def share_parameters(layers: Any) -> None:
    """Give replicas the same start, as Fleet's ``PipelineParallel`` does: over mp, sep, sharding and dp."""
    topology = _topology()
    if topology is None:
        return
    steps = (
        (topology.get_model_parallel_world_size, hybrid.broadcast_mp_parameters),
        (topology.get_sep_parallel_world_size, hybrid.broadcast_sep_parameters),
        (topology.get_sharding_parallel_world_size, hybrid.broadcast_sharding_parameters),
        (topology.get_data_parallel_world_size, hybrid.broadcast_dp_parameters),
    )
    for size, share in steps:
        if size() > 1:
            share(layers, topology)


def require_optimizer(optimizer: Any, num_ranks: int) -> None:
    """Refuse a clip by the norm of all weights that would only see this rank's weights.

    Raises:
        PipelineError: Fleet's optimizer, which clips over all ranks and sums over replicas, does not wrap it.
    """
    clip, is_fleets = getattr(optimizer, "_grad_clip", None), isinstance(optimizer, HybridParallelOptimizer)
    if num_ranks > 1 and isinstance(clip, nn.ClipGradByGlobalNorm) and not is_fleets:
        raise PipelineError(
            "ClipGradByGlobalNorm would see the weights of one rank alone: wrap the optimizer with "
            "fleet.distributed_optimizer"
        )


def update_weights(
    layers: nn.Layer, settings: FleetSettings, num_micro_batches: int, optimizer: Any, lr_scheduler: Any, scaler: Any
) -> None:
    """Update the weights in Fleet's order: scaler, optimizer, gradients, learning rate."""
    if settings.delay_scale_loss:
        for weight in layers.parameters():
            if getattr(weight, "main_grad", None) is not None:
                weight.main_grad = weight.main_grad.scale(1.0 / num_micro_batches)
            elif weight.grad is not None:
                weight.grad = weight.grad.scale(1.0 / num_micro_batches)
    if scaler is not None:
        if len(settings.ranks) > 1 and scaler.is_enable() and "_unscale" not in vars(scaler):
            _share_overflow(layers)
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    optimizer.clear_grad(set_to_zero=not settings.release_gradients)
    if lr_scheduler is not None:
        lr_scheduler.step()


def _share_overflow(layers: nn.Layer) -> None:
    """Spread non-finite gradients of one rank to all ranks: all then skip the same steps.

    ``fleet.distributed_scaler`` does this itself.
    """
    gradients = [weight.grad for weight in layers.parameters() if weight.grad is not None]
    is_bad = any(not bool(paddle.isfinite(gradient).all()) for gradient in gradients)
    overflow = paddle.to_tensor([int(is_bad)], dtype="int32")
    dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
    if overflow.item() and gradients and not is_bad:
        with paddle.no_grad():
            gradients[0].set_value(paddle.full_like(gradients[0], float("inf")))
