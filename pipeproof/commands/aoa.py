"""``pipeproof aoa``: what AOA statements make of a checkpoint, without patterns, turned round; and writing them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeproof.commands.complete import PLACE
from pipeproof.commands.line import refusing_bad_plans
from pipeproof.commands.reshard_asked import is_plan
from pipeproof.specs.finding import BadPlanError, PipeproofError

if TYPE_CHECKING:
    from pipeproof.commands.check import Form
    from pipeproof.specs.model import ModelSpec
    from pipeproof.state.aoa.engine import Mapped
    from pipeproof.state.aoa.meta import TensorMeta
    from pipeproof.state.aoa.syntax import Program


@click.command()
@click.argument("file", metavar="FILE", type=PLACE)
@click.option("--source", type=PLACE, metavar="PLACE",
              help="The checkpoint that statements read, or a plan whose runs save it.")  # fmt: skip
@click.option("--to", "target", type=PLACE, metavar="PLACE",
              help="The checkpoint or plan whose tensors they make; without it, whatever they make. With --from, the "
              "other convention.")  # fmt: skip
@click.option("--from", "convention", metavar="CONVENTION",
              help="Write the statements from this convention of names to another, --to.")  # fmt: skip
@click.option("--expand", is_flag=True, help="Print the statements with every pattern replaced by names.")
@click.option("--inverse", "turn_round", is_flag=True, help="Print the statements that make the source again.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
def aoa(
    file: Path, *, source: Path | None, target: Path | None, convention: str | None, expand: bool, turn_round: bool,
    form: Form,
) -> None:  # fmt: skip
    """Read AOA statements strictly, and say which tensor they make of what; or write them between conventions.

    FILE has a statement a line, or is YAML or JSON with the list aoa_statements, as Paddle's aoa_config has it. No
    tensor is read: headers of checkpoints, and plans, have what is to be known. With --from CONVENTION --to CONVENTION
    it is the plan of a model, or a state, for whose tensors statements are to be written.
    """
    if convention is not None:
        if target is None or source is not None or expand or turn_round:
            raise click.UsageError("--from CONVENTION goes with --to CONVENTION and a plan, and --format alone beside")
        _write_between(convention, str(target), file, form)
        return
    if source is None:
        raise click.UsageError("--source PLACE is missing: the checkpoint that statements read, or a plan")
    with refusing_bad_plans(form, file):
        from pipeproof.state.aoa.engine import mapped
        from pipeproof.state.aoa.read import read_file
        from pipeproof.state.aoa.write import write_statements

        program = read_file(file)
        try:
            before, after = _metas(source), None if target is None else _metas(target)
        except BadPlanError:
            raise
        except PipeproofError as error:  # what cannot be opened is bad input, too
            raise BadPlanError(*error.findings) from error
        result = mapped(program, before, after)
        shown = program
        if turn_round:
            shown = _turned_round(program, before, after, result, expand=expand)
        elif expand:
            shown = _without_patterns(result)
    if form == "json":
        from pipeproof.state.aoa.show import map_to_json

        lines = write_statements(shown).splitlines()
        content = {"aoa_statements": lines} | ({} if turn_round or expand else map_to_json(result.state_map))
        click.echo(json.dumps(content, indent=2))
    elif turn_round or expand:
        click.echo(write_statements(shown), nl=False)
    else:
        _show(program, before, result)


def _write_between(one: str, other: str, place: Path, form: Form) -> None:
    with refusing_bad_plans(form, place):
        from pipeproof.state.names.statements import statements_between

        try:
            statements = statements_between(one, other, _model(place))
        except PipeproofError as error:
            raise BadPlanError(*error.findings) from error
    if not statements:
        click.echo(
            f"`{one}` and `{other}` have the same names and layouts for this model: no statement is needed", err=True
        )
    as_json = form == "json"
    content = {"aoa_statements": statements.splitlines()}
    click.echo(json.dumps(content, indent=2) if as_json else statements, nl=as_json)


def _model(place: Path) -> ModelSpec:
    """The model of a plan, or of the plan that saved a state."""
    if is_plan(place):
        from pipeproof.specs.load import load_plan

        return load_plan(place).spec.model
    from pipeproof.state.checkpoint import open_checkpoint
    from pipeproof.state.names.convention import model_of
    from pipeproof.state.reshard.goals import require_index

    mend = "name the plan of the model in its place"
    return model_of(require_index(open_checkpoint(place), "names are given by the model", mend).values)


def _show(program: Program, before: dict[str, TensorMeta], result: Mapped) -> None:
    from pipeproof.state.aoa.show import map_lines
    from pipeproof.state.reshard.words import counted

    statements, num_plain = counted(len(program.statements), "statement"), len(result.expanded.statements)
    they_make = f"{'it makes' if len(program.statements) == 1 else 'they make'} {len(result.state_map.tensors):,}"
    click.echo(f"{statements}, {num_plain:,} without patterns; of {counted(len(before), 'tensor')} {they_make}")
    for line in map_lines(result.state_map, {name: meta.shape for name, meta in before.items()}):
        click.echo(line)


def _turned_round(
    program: Program,
    before: dict[str, TensorMeta],
    after: dict[str, TensorMeta] | None,
    result: Mapped,
    *,
    expand: bool,
) -> Program:
    from pipeproof.state.aoa.engine import mapped
    from pipeproof.state.aoa.inverse import inverse
    from pipeproof.state.aoa.meta import TensorMeta

    back = inverse(program, before, after)
    if not expand:
        return back
    made = {name: TensorMeta(tensor.dtype, tensor.shape) for name, tensor in result.state_map.tensors.items()}
    weights = {name: meta for name, meta in before.items() if name not in result.state_map.removed}
    return _without_patterns(mapped(back, after or made, weights))


def _without_patterns(result: Mapped) -> Program:
    from pipeproof.state.aoa.syntax import Program

    return Program(result.expanded.statements)


def _metas(place: Path) -> dict[str, TensorMeta]:
    """The tensors of a checkpoint, or of what runs of a plan save."""
    from pipeproof.state.aoa.meta import metas_of_checkpoint, metas_of_plan

    if is_plan(place):
        from pipeproof.comm.loaded import lower_loaded
        from pipeproof.specs.load import load_plan
        from pipeproof.state.reshard.goals import require_one_of_each

        plan = lower_loaded(load_plan(place))
        require_one_of_each(plan)
        return metas_of_plan(plan)
    from pipeproof.state.checkpoint import open_checkpoint

    return metas_of_checkpoint(open_checkpoint(place))
