"""Schedules, cuts and settings that each framework has; ``tune`` offers no others.

A schedule is listed if the framework's own pipeline runs it: Megatron-LM's
``megatron/core/pipeline_parallel/schedules.py``, PyTorch's
``torch/distributed/pipelining/schedules.py`` as torchtitan names them, and the
classes of Paddle Fleet's ``meta_parallel/pipeline_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.specs.memory import Recompute
from pipeproof.specs.pipeline_checks import GENERATED_WITH_PAIRS
from pipeproof.specs.plan import PlanSpec

FrameworkName = Literal["megatron", "torch", "paddle", "any"]
"""A framework that launches trainings: Megatron-LM, PyTorch with torchtitan, Paddle with PaddleFormers; or any."""


@dataclass(frozen=True, slots=True)
class FrameworkSchedule:
    """A schedule of a framework: values of ``schedule.kind`` and ``schedule.variant``, and its conditions.

    The framework needs ``min_ranks`` pipeline ranks, ``min_chunks`` stages on each of them, and ``min_rounds`` times as
    many micro-batches as pipeline ranks, in addition to the conditions of the schedule itself. If it ``overlaps``, a
    forward and a backward may alternate (``schedule.overlap``); if it ``overlaps_alone``, on one pipeline rank.
    """

    kind: str
    variant: str | None = None
    min_ranks: int = 1
    min_chunks: int = 1
    min_rounds: int = 0
    overlaps: bool = False
    overlaps_alone: bool = False

    def fits(self, num_ranks: int, num_micro_batches: int) -> bool:
        """True if the framework runs it with these pipeline ranks and micro-batches."""
        return num_ranks >= self.min_ranks and num_micro_batches >= self.min_rounds * num_ranks

    def has_pairs(self, num_ranks: int, num_chunks: int) -> bool:
        """True if a forward and a backward may alternate with these pipeline ranks and stages of each."""
        return (self.overlaps and num_chunks > 1) or (self.overlaps_alone and num_ranks == 1)


@dataclass(frozen=True, slots=True)
class Framework:
    """Schedules, settings and fixed keys of a framework.

    ``free_cut`` is true if stages may have any numbers of blocks; otherwise only equal numbers. ``sharding`` are its
    values of ``memory.shard_optimizer``, ``sharding_with_experts`` its values with expert parallelism.
    ``sections`` are keys of a plan that a training in this framework has, unless the given plan has them;
    ``transport`` applies to trainings with several pipeline ranks.
    """

    name: FrameworkName
    title: str
    schedules: tuple[FrameworkSchedule, ...]
    recompute: tuple[Recompute, ...]
    sharding: tuple[str, ...]
    sharding_with_experts: tuple[str, ...]
    free_cut: bool
    sections: Mapping[str, Mapping[str, Any]]
    transport: Mapping[str, Any]

    @property
    def kinds(self) -> frozenset[str]:
        """Values of ``schedule.kind`` that it has."""
        return frozenset(schedule.kind for schedule in self.schedules)


_MIXED = {"device": "gpu", "dtype": "bfloat16", "main_grad_dtype": "float32", "clip_norm": 1.0}

_ALL = (
    Framework(
        "megatron",
        "Megatron-LM",
        (
            FrameworkSchedule("1f1b", overlaps_alone=True),
            FrameworkSchedule("interleaved", "megatron", min_ranks=2, overlaps=True),
        ),
        ("none", "selective", "full"),
        ("none", "dp"),
        ("none", "dp"),
        free_cut=True,
        sections=MappingProxyType(
            {
                "run": {"backend": "torch", **_MIXED},
                "loss": {"normalization": "mean_of_micro_batches"},
                "memory": {"cross_entropy": "in_place"},
                "schedule": {"reduce_gradients": "when_ready"},
            }
        ),
        transport=MappingProxyType({"connections": "lazy"}),
    ),
    Framework(
        "torch",
        "PyTorch (torchtitan)",
        (
            FrameworkSchedule("1f1b", min_rounds=1),
            FrameworkSchedule("gpipe", min_ranks=2, min_rounds=1),
            FrameworkSchedule("interleaved", "torch", min_ranks=2),
            FrameworkSchedule("looped_bfs", min_ranks=2, min_chunks=2),
            FrameworkSchedule("interleaved_zb", min_ranks=2),
            FrameworkSchedule("zb_v", min_ranks=2),
            FrameworkSchedule("dualpipe_v", min_ranks=2),
        ),
        ("none", "selective", "full"),
        ("none", "dp"),
        ("dp",),
        free_cut=True,
        sections=MappingProxyType({"run": {"backend": "torch", **_MIXED}}),
        transport=MappingProxyType({}),
    ),
    Framework(
        "paddle",
        "Paddle Fleet (PaddleFormers)",
        (
            FrameworkSchedule("1f1b"),
            FrameworkSchedule("interleaved", "fleet", min_ranks=3, min_rounds=2),
            FrameworkSchedule("interleaved", "fleet_balanced", min_ranks=3, min_rounds=1),
            FrameworkSchedule("interleaved", "fleet_fthenb", min_ranks=3, min_rounds=1),
            FrameworkSchedule("dualpipe_v", min_ranks=2, min_rounds=2),
        ),
        ("none", "full"),
        ("dp",),
        ("dp",),
        free_cut=False,
        sections=MappingProxyType({}),
        transport=MappingProxyType({"recv_order": "send_order", "connections": "lazy"}),
    ),
)

FRAMEWORKS: Mapping[str, Framework] = MappingProxyType({framework.name: framework for framework in _ALL})
"""By the name on the command line."""


def every_schedule() -> Framework:
    """Every schedule, for plans without a framework; it sets no keys."""
    schedules = tuple(FrameworkSchedule(kind, overlaps=kind in GENERATED_WITH_PAIRS) for kind in SCHEDULE_KINDS)
    nothing: Mapping[str, Any] = MappingProxyType({})
    return Framework("any", "any framework", schedules, (), (), (), free_cut=True, sections=nothing, transport=nothing)


def named_framework(spec: PlanSpec) -> Framework | None:
    """The framework that a plan names by ``schedule.framework`` or ``schedule.variant``; None without both."""
    name, variant = spec.schedule.framework, spec.schedule.variant
    if name is not None:
        return FRAMEWORKS[name]
    if variant is None:
        return None
    return FRAMEWORKS["paddle" if variant.startswith("fleet") else variant]


@dataclass(frozen=True)
class TuneModel:
    """A plan with the model to tune.

    ``framework``, ``device`` and ``global_batch`` are from the source, None if it has none; ``assumptions`` are
    sentences about missing values.
    """

    plan: LoadedPlan
    framework: str | None = None
    device: str | None = None
    global_batch: int | None = None
    assumptions: tuple[str, ...] = ()


def model_of_plan(loaded: LoadedPlan, framework: str | None = None) -> TuneModel:
    """Return the model of a plan; ``framework`` is by default from its schedule, else from ``run.backend``."""
    spec = loaded.spec
    named = named_framework(spec)
    if framework is None and named is not None:
        framework = named.name
    elif framework is None and "backend" in spec.run.model_fields_set:
        framework = spec.run.backend
    analytic, schedule = spec.cost.analytic, spec.schedule
    replicas = spec.topology.dp * spec.topology.ep
    return TuneModel(
        loaded,
        framework,
        None if analytic is None else analytic.device,
        replicas * schedule.num_micro_batches * schedule.micro_batch_size,
    )
