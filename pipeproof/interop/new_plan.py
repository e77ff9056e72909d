"""A new plan from a few answers: a model, a number of devices, the mesh and the batch, with a comment on each key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from pydantic import BaseModel

from pipeproof.analysis.tune.frameworks import FRAMEWORKS, Framework, FrameworkSchedule
from pipeproof.analysis.tune.layout_bounds import Bounds, even_stages
from pipeproof.analysis.tune.layout_plans import base_data, plan_data, require_tunable
from pipeproof.analysis.tune.layouts import Layout
from pipeproof.cost.devices import DEVICES
from pipeproof.diagnostics.problems import KeyPath
from pipeproof.diagnostics.yaml_tree import parse_text
from pipeproof.interop.importers.imported import Flags, plan_lines
from pipeproof.interop.importers.model_sizes import assume_model
from pipeproof.interop.importers.plan_builder import PlanBuilder
from pipeproof.interop.tune_models import tune_model
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict, with_settings
from pipeproof.specs.plan import PlanSpec

SMALL_MODEL = "small"
"""Name of a model whose sizes follow from the mesh, for a run on CPUs."""

_FIRST_BATCHES = {"kind": "1f1b", "num_micro_batches": 1, "micro_batch_size": 1}
_CPU_RUN = {"device": "cpu", "dtype": "float32", "steps": 5, "seed": 7, "learning_rate": 0.01}
_WIDTH = 100


class AnswerError(ValueError):
    """Answers that form no plan; ``name`` is the answer to change, as in ``Answers``."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class Answers:
    """Answers that a new plan is made from.

    ``model`` is ``SMALL_MODEL``, or a model for ``tune``. Without ``device``, the plan runs on CPUs. The other axes of
    the ``gpus`` devices (or processes) determine the data-parallel ranks. ``global_batch`` and ``micro_batch_size``
    are numbers of sequences. ``settings`` are values by key of the plan, which replace all others.
    """

    model: str
    gpus: int
    pp: int
    global_batch: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    micro_batch_size: int = 1
    schedule: str = "1f1b"
    chunks: int | None = None
    device: str | None = None
    framework: str = "megatron"
    settings: Mapping[KeyPath, object] = field(default_factory=dict)


def new_plan(answers: Answers) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The plan of the answers, as in a plan file, and sentences about values without an answer.

    Raises:
        AnswerError: the answers do not go together.
        BadPlanError: there is no such model, or its plan has keys that depend on a layout.
    """
    framework = FRAMEWORKS[answers.framework]
    if answers.device is None:
        framework = replace(framework, transport={})
    layout = _layout(answers, framework)
    spec, assumptions = _model(answers, layout)
    require_tunable(spec)
    base = _cpu_base(spec, framework) if answers.device is None else base_data(spec, framework, answers.device)
    if spec.gpt.num_layers + 2 < layout.num_stages:
        raise AnswerError("pp", f"{spec.gpt.num_layers} blocks do not fill {layout.num_stages} stages")
    stages = Bounds(base, spec).stages_of(layout)
    data = plan_data(base, framework, layout, None if even_stages(stages) else stages)
    if answers.device is None:
        del data["schedule"]["framework"]  # our own executor runs every schedule
    changed, problems = with_settings(data, answers.settings)
    if problems or not isinstance(changed, dict):
        plan_from_dict(data, answers.settings)  # which reports them
    assert isinstance(changed, dict)
    return changed, assumptions


def new_plan_text(plan: Mapping[str, Any], answers: Answers, file: str) -> str:
    """The plan as YAML text; a comment explains each key.

    Raises:
        PlanFileError: it is not a valid plan.
    """
    spec = plan_from_dict(plan).spec
    on = "processes on CPUs" if answers.device is None else answers.device
    lines = [f"# {answers.model} on {answers.gpus} {on}, written by `pipeproof init`. What to do with it:"]
    for command, purpose in _commands(answers, file):
        lines.append(f"#   pipeproof {command}  {purpose}")
    for line in plan_lines(plan, lambda path: _comment(spec, path)):
        lines += _wrapped(line)
    if answers.device is not None and spec.memory.budget_gib is None and "memory:" in lines:
        memory = float(DEVICES[answers.device].memory_gib)
        budget = f"  # budget_gib: {memory:g}  # with this line, check refuses a plan that needs more"
        lines.insert(lines.index("memory:") + 1, budget)
    return "\n".join(lines) + "\n"


def _commands(answers: Answers, file: str) -> Iterator[tuple[str, str]]:
    yield f"check {file}", "proves its communication"
    yield f"simulate {file}", "predicts its step time and memory"
    if answers.device is None:
        yield f"run {file}", "trains it on real processes"
    else:
        sizes = f"--gpus {answers.gpus} --device {answers.device} --global-batch {answers.global_batch}"
        yield f"tune {file} {sizes}", "finds faster layouts"


def _layout(answers: Answers, framework: Framework) -> Layout:
    others = answers.tp * answers.cp * answers.ep * answers.pp
    if answers.gpus % others:
        raise AnswerError("gpus", f"{answers.gpus} does not divide by tp x cp x ep x pp = {others}")
    dp = answers.gpus // others
    replicas = dp * answers.ep * answers.micro_batch_size
    if answers.global_batch % replicas:
        message = f"{answers.global_batch} does not divide by dp x ep x the micro-batch size = {replicas}"
        raise AnswerError("global_batch", message)
    num_micro_batches = answers.global_batch // replicas
    own = _schedule(answers, framework, num_micro_batches)
    kind = SCHEDULE_KINDS[answers.schedule]
    fewest = max(kind.min_chunks, own.min_chunks, 2 if answers.schedule == "interleaved" else 1)
    chunks = answers.chunks or fewest
    if chunks < max(kind.min_chunks, own.min_chunks) or (kind.max_chunks is not None and chunks > kind.max_chunks):
        most = "more" if kind.max_chunks is None else f"at most {kind.max_chunks}"
        raise AnswerError("chunks", f"{answers.schedule} has at least {kind.min_chunks} and {most} stages on a rank")
    sharding = framework.sharding if answers.ep == 1 else framework.sharding_with_experts
    is_sharded = answers.device is not None and dp > 1 and "dp" in sharding
    return Layout(
        answers.pp, chunks, answers.tp, answers.cp, answers.ep, dp, answers.micro_batch_size, num_micro_batches,
        answers.schedule, own.variant, "even", "none", "dp" if is_sharded else "none",
    )  # fmt: skip


def _schedule(answers: Answers, framework: Framework, num_micro_batches: int) -> FrameworkSchedule:
    """The schedule in the framework; on CPUs, where our own executor runs it, any."""
    if answers.device is None:
        return FrameworkSchedule(answers.schedule)
    named = [schedule for schedule in framework.schedules if schedule.kind == answers.schedule]
    if not named:
        choices = ", ".join(sorted(framework.kinds))
        raise AnswerError("schedule", f"{framework.title} has no {answers.schedule}; it has {choices}")
    fitting = [schedule for schedule in named if schedule.fits(answers.pp, num_micro_batches)]
    if not fitting:
        least = min(named, key=lambda schedule: (schedule.min_ranks, schedule.min_rounds))
        raise AnswerError(
            "schedule",
            f"{framework.title} runs {answers.schedule} with at least {least.min_ranks} pipeline ranks and "
            f"{max(1, least.min_rounds * answers.pp)} micro-batches, found {answers.pp} and {num_micro_batches}",
        )
    return fitting[0]


def _model(answers: Answers, layout: Layout) -> tuple[PlanSpec, tuple[str, ...]]:
    settings = {path: value for path, value in answers.settings.items() if path[:1] == ("model",)}
    if answers.model != SMALL_MODEL:
        source = tune_model(answers.model, flags=Flags(settings))
        return source.plan.spec, source.assumptions
    plan = PlanBuilder("init", Flags(settings))
    for axis in ("tp", "cp", "ep"):
        plan.set(("topology", axis), getattr(layout, axis), f"--{axis}")
    assume_model(plan, layout.num_stages)
    model = plan.imported("--model", ()).plan["model"]
    return plan_from_dict({"pipeproof": 1, "model": model, "topology": {}, "schedule": _FIRST_BATCHES}).spec, ()


def _cpu_base(spec: PlanSpec, framework: Framework) -> dict[str, Any]:
    """The sections of a plan for real processes on CPUs; its times are the same for all stages."""
    model = spec.model_dump(mode="json", exclude_unset=True)["model"]
    backend = "paddle" if framework.name == "paddle" else "torch"
    cost = {"forward_us": 100, "backward_us": 200, "p2p_latency_us": 0}
    return {"model": model, "schedule": {}, "memory": {}, "cost": cost, "run": {"backend": backend, **_CPU_RUN}}


def _comment(spec: PlanSpec, path: KeyPath) -> str:
    """The first sentence of the description of a key; nothing of a key that the plan's file does not have."""
    section: Any = spec
    for key in path[:-1]:
        section = getattr(section, str(key), None)
    fields = type(section).model_fields if isinstance(section, BaseModel) else {}
    description = getattr(fields.get(str(path[-1])), "description", None) or ""
    return description.split(". ")[0].rstrip(".")


def _wrapped(line: str) -> Iterator[str]:
    """A line, with its comment above it if both together are too long."""
    code, mark, comment = line.partition("  # ")
    if not mark or len(line) <= _WIDTH:
        yield line
        return
    indent = " " * (len(code) - len(code.lstrip()))
    yield from (f"{indent}# {text}" for text in wrap(comment, _WIDTH - len(indent) - 2, break_on_hyphens=False))
    yield code


def load_new(plan: Mapping[str, Any], path: Path, text: str) -> LoadedPlan:
    """Load the text as from its file: findings have its lines.

    Raises:
        PlanFileError: it is not a valid plan.
    """
    tree = parse_text(text, str(path))
    return plan_from_dict(plan, source=tree.source)
