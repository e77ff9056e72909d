"""``pipeproof state aoa``: effect of AOA statements on a checkpoint, expansion and inverse, and writing them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeproof.cli.console import echo, format_option, opening_checkpoints, refusing_bad_plans
from pipeproof.cli.option_types import PLACE, is_plan, set_option
from pipeproof.cli.progress import showing_progress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeproof.cli.check_report import Form
    from pipeproof.diagnostics.problems import KeyPath
    from pipeproof.specs.model import ModelSpec
    from pipeproof.state.aoa.aoa_engine import AppliedProgram
    from pipeproof.state.aoa.statements import Program
    from pipeproof.state.aoa.tensor_families import TensorMeta


@click.command()
@click.argument("file", metavar="FILE", type=PLACE)
@click.option("--source", type=PLACE, metavar="PLACE",
              help="The checkpoint that statements read, or a plan whose runs save it.")  # fmt: skip
@click.option("--to", "target", type=PLACE, metavar="PLACE",
              help="The checkpoint or plan that needs the tensors; default: all that the statements make.")  # fmt: skip
@set_option
@click.option("--names", metavar="CONVENTION",
              help="Write statements from this naming convention to --to-names.")  # fmt: skip
@click.option("--to-names", metavar="CONVENTION",
              help="The target naming convention, with --names.")  # fmt: skip
@click.option("--expand", is_flag=True, help="Print the statements with every pattern replaced by names.")
@click.option("--inverse", "inverted", is_flag=True, help="Print the inverse statements, which restore the source.")
@format_option()
def aoa(
    file: Path, *, source: Path | None, target: Path | None, settings: dict[KeyPath, object], names: str | None,
    to_names: str | None, expand: bool, inverted: bool, form: Form,
) -> None:  # fmt: skip
    """Read AOA statements strictly and show the source of each tensor, or write statements between conventions.

    FILE has one statement per line, or is YAML or JSON with the list aoa_statements, as Paddle's aoa_config. Tensors
    are not read: checkpoint headers or plans are sufficient. With --names and --to-names, FILE is a plan or a state,
    and statements for its tensors are written. --set applies to plans only.
    """
    if settings and not any(
        path is not None and is_plan(path) for path in (source, target, None if names is None else file)
    ):
        raise click.UsageError("--set is for plans, and none is given")
    if names is not None or to_names is not None:
        if names is None or to_names is None or target is not None or source is not None or expand or inverted:
            raise click.UsageError(
                "--names and --to-names need each other and a plan, and allow only --format and --set"
            )
        _write_between(names, to_names, file, settings, form)
        return
    if source is None:
        raise click.UsageError("--source PLACE is missing: the checkpoint that statements read, or a plan")
    with refusing_bad_plans(form, file), showing_progress("applying statements"):
        from pipeproof.state.aoa.aoa_engine import apply_program
        from pipeproof.state.aoa.read_statements import read_file
        from pipeproof.state.aoa.statements import write_statements

        program = read_file(file)
        with opening_checkpoints():
            before, after = _metas(source, settings), None if target is None else _metas(target, settings)
        result = apply_program(program, before, after)
        shown = program
        if inverted:
            shown = _inverse_of(program, before, after, result, expand=expand)
        elif expand:
            shown = _without_patterns(result)
    if form == "json":
        from pipeproof.state.aoa.map_text import map_to_json

        lines = write_statements(shown).splitlines()
        content = {"aoa_statements": lines} | ({} if inverted or expand else map_to_json(result.state_map))
        click.echo(json.dumps(content, indent=2))
    elif inverted or expand:
        click.echo(write_statements(shown), nl=False)
    else:
        _show(program, before, result)


def _write_between(
    source: str, target: str, path: Path, settings: Mapping[KeyPath, object], form: Form
) -> None:  # fmt: skip
    with refusing_bad_plans(form, path):
        from pipeproof.state.names.convention_maps import statements_between

        with opening_checkpoints():
            statements = statements_between(source, target, _model(path, settings))
    if not statements:
        echo(
            f"`{source}` and `{target}` have the same names and layouts for this model: no statement is needed",
            err=True,
        )
    as_json = form == "json"
    content = {"aoa_statements": statements.splitlines()}
    click.echo(json.dumps(content, indent=2) if as_json else statements, nl=as_json)


def _model(path: Path, settings: Mapping[KeyPath, object]) -> ModelSpec:
    """Return the model of a plan, or of the plan that saved a state."""
    if is_plan(path):
        from pipeproof.specs.load_plan import load_plan

        return load_plan(path, settings).spec.gpt
    from pipeproof.state.names.convention_maps import model_of
    from pipeproof.state.open_checkpoint import open_checkpoint
    from pipeproof.state.reshard.reshard_targets import require_index

    fix = "name the plan of the model instead"
    return model_of(require_index(open_checkpoint(path), "names are given by the model", fix).values)


def _show(program: Program, before: dict[str, TensorMeta], result: AppliedProgram) -> None:
    from pipeproof.state.aoa.map_text import map_lines
    from pipeproof.state.region_text import counted

    statements, num_plain = counted(len(program.statements), "statement"), len(result.expanded.statements)
    they_make = f"{'it makes' if len(program.statements) == 1 else 'they make'} {len(result.state_map.tensors):,}"
    echo(f"{statements}, {num_plain:,} without patterns; of {counted(len(before), 'tensor')} {they_make}")
    for line in map_lines(result.state_map, {name: meta.shape for name, meta in before.items()}):
        click.echo(line)  # statements, which are not prose


def _inverse_of(
    program: Program,
    before: dict[str, TensorMeta],
    after: dict[str, TensorMeta] | None,
    result: AppliedProgram,
    *,
    expand: bool,
) -> Program:
    from pipeproof.state.aoa.aoa_engine import apply_program
    from pipeproof.state.aoa.inverse import inverse
    from pipeproof.state.aoa.tensor_families import TensorMeta

    back = inverse(program, before, after)
    if not expand:
        return back
    outputs = {name: TensorMeta(tensor.dtype, tensor.shape) for name, tensor in result.state_map.tensors.items()}
    weights = {name: meta for name, meta in before.items() if name not in result.state_map.removed}
    return _without_patterns(apply_program(back, after or outputs, weights))


def _without_patterns(result: AppliedProgram) -> Program:
    from pipeproof.state.aoa.statements import Program

    return Program(result.expanded.statements)


def _metas(path: Path, settings: Mapping[KeyPath, object]) -> dict[str, TensorMeta]:
    """Return the tensors of a checkpoint, or of the states that runs of a plan save."""
    from pipeproof.state.aoa.tensor_families import metas_of_checkpoint, metas_of_plan

    if is_plan(path):
        from pipeproof.comm.lower import lower_loaded
        from pipeproof.specs.load_plan import load_plan

        plan = lower_loaded(load_plan(path, settings))
        return metas_of_plan(plan)
    from pipeproof.state.open_checkpoint import open_checkpoint

    return metas_of_checkpoint(open_checkpoint(path))
