"""Model FLOPs utilization (MFU) of a step: what the model's products need over what the devices could compute.

As defined for PaLM, arXiv:2204.02311, section 4.1, with the FLOPs of the
products and of causal attention as they are computed; those of a recomputation
do not count.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from pipeproof.cost.devices import DEVICES
from pipeproof.specs.cost import AnalyticSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import work_item_sizes
from pipeproof.stages.describe.model_family import stage_layers
from pipeproof.stages.describe.op_work import product_flops

_FLOPS_PER_US = 10**6
"""FLOPs per microsecond at one TFLOP/s."""


def model_flops_utilization(plan: PlanSpec, makespan_us: Fraction) -> float | None:
    """Return the MFU of a step, a share of 1; None for custom layers and for plans without ``cost.analytic``.

    ``plan`` is the plan as it was read: a lowered one has given times in place
    of its device. The peak is that of the type of the model's products.
    """
    analytic = plan.cost.analytic
    if analytic is None or plan.is_custom or not makespan_us:
        return None
    sizes, by_work_item = work_item_sizes(plan)
    schedule = plan.schedule
    numbers = Counter(by_work_item) or {0: schedule.num_micro_batches * schedule.num_sequence_splits}
    flops = sum(
        number * sum(product_flops(plan, names, sizes[size]).values())
        for names in stage_layers(plan)
        for size, number in numbers.items()
    )
    peak = peak_tflops(analytic, plan.run.dtype)
    return float(flops / (plan.topology.pp * makespan_us)) / (peak * _FLOPS_PER_US)


def peak_tflops(analytic: AnalyticSpec, run_dtype: str) -> float:
    """Return the peak of the device for the type of the model's products, in TFLOP/s; ``run_dtype`` is the default."""
    device = DEVICES[analytic.device]
    if analytic.matmul_dtype is not None:
        return device.peak(analytic.matmul_dtype)
    return device.bfloat16 if (analytic.dtype or run_dtype) == "bfloat16" else device.float32
