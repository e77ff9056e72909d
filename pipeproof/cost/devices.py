"""Data sheets of common accelerators: dense peaks, without sparsity, bandwidths in one direction; and a step's MFU.

The MFU (model FLOPs utilization) is the FLOPs of the model's products over the peak FLOPs of the devices, as defined
for PaLM, arXiv:2204.02311, section 4.1, with the FLOPs of products and of causal attention as they are computed;
recomputation does not count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from pipeproof.specs.cost import AnalyticSpec, MatmulDtype
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import work_item_sizes
from pipeproof.stages.describe.model_family import stage_layers
from pipeproof.stages.describe.op_work import product_flops


@dataclass(frozen=True, slots=True)
class Device:
    """Data-sheet figures: peaks in TFLOP/s (10^12), bandwidths in GB/s (10^9 bytes).

    ``float8`` is None if a device has no such products, ``float32`` is
    without TF32. ``link`` is the bandwidth to all other devices of the node
    together, ``peer`` to one of them, ``network`` the device's share of
    the node's network cards, ``host`` the copies by its PCIe x16 link to or from
    host memory (generation 4 of A100, 5 of all others: the hosts of a DGX B200
    have no later one); each in one direction. ``memory_gib`` is the memory of a
    device: stacks have whole GiB, and the GB of data sheets are GiB here.
    """

    float8: float | None
    bfloat16: float
    float32: float
    memory: int
    link: int
    peer: int
    network: float
    host: int
    ranks_per_node: int
    memory_gib: int
    source: str
    recv_slowdown: Fraction | None = None
    float4: float | None = None

    def peak(self, dtype: MatmulDtype) -> float:
        """TFLOP/s of products in a type that the plan was checked to have on this device."""
        peak = self.float4 if dtype == "float4" else self.float8
        assert peak is not None
        return peak


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "a100": Device(
            float8=None, bfloat16=312, float32=19.5, memory=2039, link=300, peer=300, network=25, ranks_per_node=8,
            host=32,
            memory_gib=80,
            source="NVIDIA A100 data sheet (80 GB SXM: NVLink 600 GB/s both ways); DGX A100 data sheet (a 200 Gb/s "
            "port per GPU)",
        ),
        "h100": Device(
            float8=1978.9, bfloat16=989.4, float32=66.9, memory=3350, link=450, peer=450, network=50, ranks_per_node=8,
            host=64,
            memory_gib=80,
            source="NVIDIA H100 Tensor Core GPU Architecture white paper (SXM5; NVLink 900 GB/s both ways); DGX H100 "
            "data sheet (a 400 Gb/s port per GPU)",
        ),
        "h200": Device(
            float8=1979, bfloat16=989, float32=67, memory=4800, link=450, peer=450, network=50, ranks_per_node=8,
            host=64,
            memory_gib=141,
            source="NVIDIA H200 data sheet (SXM; sparse peaks halved; NVLink 900 GB/s both ways); DGX H200 data sheet",
            recv_slowdown=Fraction(14, 100),
        ),
        "h800": Device(
            float8=1978.9, bfloat16=989.4, float32=66.9, memory=3350, link=200, peer=200, network=50, ranks_per_node=8,
            host=64,
            memory_gib=80,
            source="as H100 but for NVLink, 400 GB/s both ways; cluster of arXiv:2412.19437, section 3.1, with network "
            "cards of 400 Gb/s as arXiv:2505.09343 has them",
        ),
        "b200": Device(
            float8=4500, bfloat16=2250, float32=80, memory=8000, link=900, peer=900, network=50, ranks_per_node=8,
            host=64, float4=9000,
            memory_gib=180,
            source="NVIDIA Blackwell architecture technical brief (HGX B200; sparse peaks halved; NVLink 1.8 TB/s both "
            "ways); DGX B200 data sheet (a 400 Gb/s port per GPU)",
        ),
        "gb200": Device(
            float8=5000, bfloat16=2500, float32=80, memory=8000, link=900, peer=900, network=50, ranks_per_node=64,
            host=64, float4=10000,
            memory_gib=186,
            source="NVIDIA GB200 NVL72 data sheet (a GPU's part of a rack; sparse peaks halved; NVLink 1.8 TB/s both "
            "ways); a 400 Gb/s port per GPU; 64 of a rack's 72 GPUs, which meshes of powers of two use",
        ),
        "b300": Device(
            float8=4500, bfloat16=2250, float32=80, memory=8000, link=900, peer=900, network=100, ranks_per_node=8,
            host=64, float4=13500,
            memory_gib=270,
            source="NVIDIA HGX B300 data sheet (sparse peaks halved; NVLink 1.8 TB/s both ways; float32 of B200); DGX "
            "B300 data sheet (an 800 Gb/s port per GPU)",
        ),
        "gb300": Device(
            float8=5000, bfloat16=2500, float32=80, memory=8000, link=900, peer=900, network=100, ranks_per_node=64,
            host=64, float4=15000,
            memory_gib=279,
            source="NVIDIA GB300 NVL72 data sheet (a GPU's part of a rack; sparse peaks halved; NVLink 1.8 TB/s both "
            "ways; float32 of GB200); an 800 Gb/s port per GPU; 64 of a rack's 72 GPUs, as GB200",
        ),
        "mi300x": Device(
            float8=2614.9, bfloat16=1307.4, float32=163.4, memory=5300, link=448, peer=64, network=50, ranks_per_node=8,
            host=64,
            memory_gib=192,
            source="AMD Instinct MI300X data sheet (seven Infinity Fabric links of 128 GB/s both ways, one to each "
            "other device); a 400 Gb/s port per GPU assumed",
        ),
    }
)  # fmt: skip
"""By the name that a plan gives."""

_FLOPS_PER_US = 10**6
"""FLOPs per microsecond at one TFLOP/s."""


def model_flops_utilization(plan: PlanSpec, makespan_us: Fraction) -> float | None:
    """Return the MFU of a step, a share of 1; None for custom layers and for plans without ``cost.analytic``.

    ``plan`` is the plan as it was read: a lowered one has given times in place
    of its device. The peak is for the type of the model's products.
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
