"""Settings of the pipeline in ``fleet.init``: its ranks, its micro-batches, and how Fleet scales losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer import HybridParallelOptimizer
from paddle.distributed.fleet.meta_parallel import PipelineLayer
from paddle.distributed.fleet.utils import hybrid_parallel_util as hybrid

from pipeproof.exec.train.train_errors import PipelineError


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
        PipelineError: this rank is not in the group, or Fleet overlaps what the plan orders.
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


def is_fleet_optimizer(optimizer: Any) -> bool:
    """True if ``fleet.distributed_optimizer`` made it: it sums over replicas, and clips over all ranks."""
    return isinstance(optimizer, HybridParallelOptimizer)
