"""A plan in Fleet's own settings, and the hooks by which Fleet tells what it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel.pipeline_parallel import PipelineParallelMicroStepLocations as At

from pipeproof.exec.fleet.watch import Watch
from pipeproof.specs.plan import PlanSpec


def strategy_of(spec: PlanSpec) -> Any:
    """The ``DistributedStrategy`` of a plan; what it does not name stays as Fleet has it."""
    strategy = fleet.DistributedStrategy()
    degrees = {"pp_degree": spec.topology.pp, "dp_degree": spec.topology.dp, "mp_degree": 1}
    order = list(strategy.hybrid_parallel_order)  # slowest first; a plan's is fastest first
    order.sort(key=lambda axis: -spec.topology.order.index(axis) if axis in ("pp", "dp") else 0)
    strategy.hybrid_configs = {
        **degrees,
        "order": order,
        "pp_configs": {"best_unbalanced_scheduler": _is_balanced(spec)},
    }
    strategy.pipeline_configs = {
        "micro_batch_size": spec.schedule.micro_batch_size,
        "accumulate_steps": spec.schedule.num_micro_batches,
    }
    return strategy


def _is_balanced(spec: PlanSpec) -> bool:
    return spec.schedule.variant == "fleet_balanced"


def hook_into(model: Any, watch: Watch) -> Callable[[], int]:
    """Let Fleet's own callbacks tell the watch; the answer says which virtual stage the model is at."""
    model.register_hook(At.FORWARD_BEGIN, watch.forward_begins)
    model.register_hook(At.FORWARD_END, watch.forward_ends)
    model.register_hook(At.BACKWARD_BEGIN, watch.backward_begins)
    model.register_hook(At.BACKWARD_END, watch.backward_ends)
    return lambda: int(getattr(model, "_virtual_pp_rank", 0) or 0)
