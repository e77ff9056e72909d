"""``pipeproof import layers``: declarations of custom layers in a plan, from the built layers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeproof.atomic_write import write_output
from pipeproof.cli.completion import PlanFile
from pipeproof.cli.console import echo, note_kind, refusing_bad_plans
from pipeproof.cli.set_option import set_option

if TYPE_CHECKING:
    from pipeproof.diagnostics.problems import KeyPath
    from pipeproof.specs.load_plan import LoadedPlan

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*", re.ASCII)
_CONSTANTS = ("true", "false", "null")


@click.command("layers")
@click.argument("plan", metavar="PLAN", type=PlanFile())
@set_option
@click.option("--write", is_flag=True, help="Put the declarations into the plan file, in place of `model.layers`.")
def layers(plan: Path, settings: dict[KeyPath, object], write: bool) -> None:
    """Build a plan's custom layers, run one micro-batch, and print the `model.layers` that declares them.

    This loads and runs the file that `model.build` names. Names that the plan gives its layers are kept if their
    number is that of the layers.
    """
    with refusing_bad_plans("text", plan):
        from pipeproof.comm.lower import absolute_build, blaming_plan
        from pipeproof.diagnostics.source import read_text

        text = read_text(str(plan))
        loaded, names = _without_declarations(plan, text, settings)
        with blaming_plan(loaded):
            declared = _declared(loaded, absolute_build(loaded), names)
        block = ["layers:", *(f"  - {_flow(layer)}" for layer in declared)]
        if not write:
            click.echo("\n".join(block))
            return
        changed = with_layers(text, block)
        if changed is None or _data(changed, plan) != {**_data(text, plan), "model": _with(text, plan, declared)}:
            raise click.UsageError(
                f"{plan} has no section `model:` with a line for each key; without --write, the layers are printed"
            )
        write_output(plan, changed)
    echo(f"{len(declared)} layers declared in {plan}")


def _without_declarations(
    plan: Path, text: str, settings: Mapping[KeyPath, object]
) -> tuple[LoadedPlan, Sequence[str]]:
    """Return the plan with a placeholder for the declarations, and the names that it gives its layers."""
    from pipeproof.diagnostics.yaml_tree import parse_text
    from pipeproof.specs.load_plan import LoadedPlan, load_plan, plan_from_dict, with_settings

    tree = parse_text(text, str(plan))
    model = tree.data.get("model") if isinstance(tree.data, Mapping) else None
    if not tree.complete or tree.problems or not isinstance(model, Mapping):
        load_plan(plan, settings)  # which raises with the problems
    assert isinstance(model, Mapping)
    if model.get("kind") != "layers":
        note_kind(plan)
        raise click.UsageError(f"{plan} is of `model.kind: {model.get('kind')}`; custom layers are of kind layers")
    given = model.get("layers")
    names = [str(layer.get("name")) for layer in given if isinstance(layer, Mapping)] if isinstance(given, list) else []
    changed, problems = with_settings(_data(text, plan), settings)
    if problems or not isinstance(changed, dict) or not isinstance(changed.get("model"), Mapping):
        load_plan(plan, settings)  # which raises with the problems
    assert isinstance(changed, dict)
    data: dict[str, Any] = {**changed, "model": {**changed["model"], "layers": [{"name": "any"}]}}
    data.pop("stages", None)
    return LoadedPlan(plan_from_dict(data).spec, tree.source), names


def _declared(loaded: LoadedPlan, build: str, names: Sequence[str]) -> list[dict[str, Any]]:
    spec = loaded.spec.model_copy(update={"model": loaded.spec.custom.model_copy(update={"build": build})})
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle()
    from pipeproof.stages.custom.built_layers import BuiltModel
    from pipeproof.stages.custom.declaration import declaration

    return declaration(spec, BuiltModel(spec, names))


def _flow(value: object) -> str:
    """A value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _CONSTANTS:
        return value
    return json.dumps(value)


def with_layers(text: str, block: Sequence[str]) -> str | None:
    """Return a plan's text with ``block`` as ``layers:`` of its section ``model:``, at the old position or at the end.

    None if the section is not written with one line per key.
    """
    lines = text.splitlines()
    try:
        begin = next(i for i, line in enumerate(lines) if re.fullmatch(r"model:\s*(#.*)?", line)) + 1
    except StopIteration:
        return None
    end = begin
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith((" ", "#"))):
        end += 1
    while end > begin and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
        end -= 1
    keys = [i for i in range(begin, end) if lines[i].strip() and not lines[i].lstrip().startswith("#")]
    if not keys:
        return None
    indent = len(lines[keys[0]]) - len(lines[keys[0]].lstrip())
    top_keys = [
        i for i in keys if len(lines[i]) - len(lines[i].lstrip()) == indent and not lines[i].lstrip().startswith("-")
    ]
    first = next((i for i in top_keys if lines[i].lstrip().startswith("layers:")), end)
    after = next((i for i in top_keys if i > first), end)
    new = [" " * indent + line for line in block]
    return "\n".join([*lines[:first], *new, *lines[after:]]) + "\n"


def _data(text: str, plan: Path) -> dict[str, Any]:
    from pipeproof.diagnostics.yaml_tree import parse_text

    data = parse_text(text, str(plan)).data
    return dict(data) if isinstance(data, Mapping) else {}


def _with(text: str, plan: Path, declared: list[dict[str, Any]]) -> dict[str, Any]:
    model = _data(text, plan)["model"]
    return {**model, "layers": declared}
