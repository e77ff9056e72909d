"""``pipeproof aoa``: what AOA statements make of a checkpoint, without patterns, and turned round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeproof.commands.line import refusing_bad_plans
from pipeproof.specs.finding import BadPlanError, PipeproofError

if TYPE_CHECKING:
    from pipeproof.state.aoa.engine import Mapped
    from pipeproof.state.aoa.meta import TensorMeta
    from pipeproof.state.aoa.syntax import Program

_PLANS = (".yaml", ".yml", ".json")
_Place = click.Path(path_type=Path)


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--source", required=True, type=_Place, metavar="PLACE",
              help="The checkpoint that statements read, or a plan whose runs save it.")  # fmt: skip
@click.option("--to", "target", type=_Place, metavar="PLACE",
              help="The checkpoint or plan whose tensors they make; without it, whatever they make.")  # fmt: skip
@click.option("--expand", is_flag=True, help="Print the statements with every pattern replaced by names.")
@click.option("--inverse", "turn_round", is_flag=True, help="Print the statements that make the source again.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def aoa(file: Path, *, source: Path, target: Path | None, expand: bool, turn_round: bool, as_json: bool) -> None:
    """Read AOA statements strictly, and say which tensor they make of what.

    FILE has a statement a line, or is YAML or JSON with the list aoa_statements, as Paddle's aoa_config has it. No
    tensor is read: headers of checkpoints, and plans, have what is to be known.
    """
    with refusing_bad_plans("json" if as_json else "text", file):
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
    if as_json:
        from pipeproof.state.aoa.show import map_to_json

        lines = write_statements(shown).splitlines()
        content = {"aoa_statements": lines} | ({} if turn_round or expand else map_to_json(result.state_map))
        click.echo(json.dumps(content, indent=2))
    elif turn_round or expand:
        click.echo(write_statements(shown), nl=False)
    else:
        _show(program, before, result)


def _show(program: Program, before: dict[str, TensorMeta], result: Mapped) -> None:
    from pipeproof.state.aoa.show import map_lines

    counts = (len(program.statements), len(result.expanded.statements), len(before), len(result.state_map.tensors))
    click.echo("{} statements, {} without patterns; of {} tensors they make {}".format(*counts))
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

    if place.suffix in _PLANS and not place.is_dir():
        from pipeproof.comm.loaded import lower_loaded
        from pipeproof.specs.load import load_plan
        from pipeproof.state.reshard.goals import require_gpt

        plan = lower_loaded(load_plan(place))
        require_gpt(plan)
        return metas_of_plan(plan)
    from pipeproof.state.checkpoint import open_checkpoint

    return metas_of_checkpoint(open_checkpoint(place))
