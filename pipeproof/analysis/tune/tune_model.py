"""The model that ``tune`` is given, with the framework, device and batch of its source."""

from __future__ import annotations

from dataclasses import dataclass

from pipeproof.analysis.tune.frameworks import named_framework
from pipeproof.specs.load_plan import LoadedPlan


@dataclass(frozen=True)
class TuneModel:
    """A plan with the model to tune.

    ``framework``, ``device`` and ``global_batch`` are those of the source, None where it has none; ``assumptions`` are
    sentences about values that it does not have.
    """

    plan: LoadedPlan
    framework: str | None = None
    device: str | None = None
    global_batch: int | None = None
    assumptions: tuple[str, ...] = ()


def model_of_plan(loaded: LoadedPlan, framework: str | None = None) -> TuneModel:
    """Return the model of a plan; ``framework`` is by default that of its schedule, else that of ``run.backend``."""
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
