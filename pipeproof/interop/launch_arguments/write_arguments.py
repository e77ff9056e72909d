"""Launch arguments of a plan, proved by importing them again.

Arguments whose import is another plan are not written: the difference names what
the framework has no argument for.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeproof.analysis.tune.tune_result import TuneRow
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.interop.importers.check_imported import load_imported
from pipeproof.interop.importers.import_kinds import import_files
from pipeproof.interop.importers.imported import Flags
from pipeproof.interop.launch_arguments.megatron_arguments import megatron_script
from pipeproof.interop.launch_arguments.model_config import model_config
from pipeproof.interop.launch_arguments.paddle_arguments import paddle_arguments
from pipeproof.interop.launch_arguments.torchtitan_job import torchtitan_job
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.model_family import stage_layers

_NOT_LAUNCHED = ("pipeproof", "cost", "suppress", "buffers")
"""Sections that have no part in a launch."""

_NOT_IN_MEMORY = (
    "budget_gib", "overhead_gib", "dtype", "attention", "gradient_dtype", "optimizer_bytes", "optimizer_ranks",
    "offload_blocks", "product_inputs", "fragmentation", "sequence_parallel_activations",
)  # fmt: skip
"""Keys of ``memory`` that a simulation needs and a launch does not, or that no argument changes: Megatron-LM always
gathers sequence-parallel activations again."""


class NoArgumentsError(ValueError):
    """A plan that a framework has no arguments for; the message has the keys."""


@dataclass(frozen=True)
class Launch:
    """The files that launch a plan, by name; the first one is the file to import."""

    kind: str
    files: Mapping[str, str]


def launch_of(spec: PlanSpec, framework: str, name: str) -> Launch:
    """The files that launch a plan; ``name`` begins their names. Importing them gives the same plan.

    Raises:
        NoArgumentsError: the framework has no arguments for a key of the plan.
    """
    if framework == "megatron":
        launch = Launch("megatron", {f"{name}.sh": megatron_script(spec)})
    elif framework == "torch":
        config = json.dumps(model_config(spec), indent=2) + "\n"
        launch = Launch("torchtitan", {f"{name}.toml": torchtitan_job(spec), f"{name}.config.json": config})
    else:
        launch = Launch("paddleformers", {f"{name}.args.yaml": paddle_arguments(spec)})
    differing = [*differences(spec, imported_again(launch, spec.topology.num_ranks))]
    if differing:
        raise NoArgumentsError(f"no arguments of {launch.kind} give {', '.join(differing)}")
    return launch


def imported_again(launch: Launch, world_size: int) -> PlanSpec:
    """The plan that the importer reads from the files of a launch.

    Raises:
        NoArgumentsError: the importer refuses the files.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for name, text in launch.files.items():
            paths.append(Path(folder) / name)
            paths[-1].write_text(text, encoding="utf-8")
        config = next((path for path in paths if path.name.endswith(".config.json")), None)
        try:
            return load_imported(import_files(launch.kind, paths[:1], Flags({}, config, world_size))).spec
        except BadPlanError as error:
            raise NoArgumentsError(f"{launch.kind} refuses it: {error.findings[0].message}") from error


def differences(spec: PlanSpec, other: PlanSpec) -> Iterator[str]:
    """Yield the keys in which two plans differ as launches, with both values; cuts are compared by their layers."""
    yield from _differing("", _launched(spec), _launched(other))


def _launched(spec: PlanSpec) -> dict[str, Any]:
    data = {key: value for key, value in spec.model_dump(mode="json").items() if key not in _NOT_LAUNCHED}
    data["memory"] = {key: value for key, value in data["memory"].items() if key not in _NOT_IN_MEMORY}
    data["schedule"].pop("framework")  # only `advise` and `tune` read it
    data["stages"] = [list(names) for names in stage_layers(spec)]
    model = data["model"]
    if model["dropout"] is None:
        model["dropout"] = {"embedding": 0.0, "attention": 0.0, "hidden": 0.0}
    return data


def _differing(path: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one | other:
            yield from _differing(f"{path}.{key}" if path else str(key), one.get(key), other.get(key))
    elif one != other:
        yield f"`{path}: {_short(one)}` (they give {_short(other)})"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def launch_of_row(row: TuneRow, framework: str) -> Launch:
    """The files that launch a row, whose names begin with its number.

    Raises:
        NoArgumentsError: the framework has no arguments for a key of the plan.
    """
    return launch_of(plan_from_dict(row.plan).spec, framework, f"{row.rank:02d}")


def plan_file(row: TuneRow) -> dict[str, str]:
    """The plan file of a row, by its name."""
    return {f"{row.rank:02d}.yaml": yaml.safe_dump(dict(row.plan), sort_keys=False)}
