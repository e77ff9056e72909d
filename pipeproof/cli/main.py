"""The ``pipeproof`` command. Subcommands import their libraries when they run, because ``check`` must start fast."""

from __future__ import annotations

import io
import json
import os
import sys
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pipeproof.cli.console import console_for, echo, output_closed, refused_by_system, wrapped
from pipeproof.cli.help_sections import LazyCommands, SectionedGroup
from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exit_status import ExitStatus
from pipeproof.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from pipeproof.diagnostics.finding import RuleDoc


def _explain(context: click.Context, parameter: click.Parameter, code: str | None) -> None:
    if code is None or context.resilient_parsing:
        return
    from pipeproof.cli.code_registry import all_docs

    doc = next((doc for doc in all_docs() if doc.code == code.upper()), None)
    if doc is None:
        from pipeproof.diagnostics.problems import listed

        codes = [doc.code for doc in all_docs()]
        family = [each for each in codes if each[:3] == code.upper()[:3]]
        near = get_close_matches(code.upper(), family, n=3, cutoff=0.0) or [codes[0]]
        raise click.BadParameter(f"no code {code!r}; did you mean {listed(sorted(near))}?")
    _render(doc, console_for())
    context.exit()


explain_option = click.option(
    "--explain", metavar="CODE", is_eager=True, expose_value=False, callback=_explain,
    help="Explain a code such as PP201, with a wrong and a right example, and exit.",
)  # fmt: skip


def _render(doc: RuleDoc, console: Console) -> None:
    """Print one code: its meaning, a wrong and a right example."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(f"[bold]{doc.code}[/] ({doc.severity}): {doc.title}\n")
    console.print(doc.explanation)
    for title, example in (("wrong", doc.wrong), ("right", doc.right)):
        console.print(f"\n[bold]{title}[/]")
        console.print(Padding(Text(example), (0, 2)))


def _print_schema(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from pipeproof.specs.plan import plan_json_schema

        click.echo(json.dumps(plan_json_schema(), indent=2))
        context.exit()


schema_option = click.option(
    "--schema", is_flag=True, is_eager=True, expose_value=False, callback=_print_schema,
    help="Print the JSON Schema of plan files, for editors, and exit.",
)  # fmt: skip


class _Commands(SectionedGroup):
    """The group of commands, with our own exit status after an interrupt or an error of the system."""

    def make_context(self, *arguments: Any, **others: Any) -> click.Context:
        try:
            return super().make_context(*arguments, **others)  # which runs options such as --schema
        except BrokenPipeError:
            output_closed()
        except KeyboardInterrupt:  # while the help imports all commands
            echo("interrupted", err=True)
            sys.exit(ExitStatus.INTERRUPTED)
        except click.UsageError as error:
            _wrong_usage(error)

    def invoke(self, ctx: click.Context) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="backslashreplace")  # file names may not be text, as on standard error
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            output_closed()
        except OSError as error:  # such as a path that is too long, before a command has begun
            refused_by_system(error)
        except KeyboardInterrupt:
            echo("interrupted", err=True)
            sys.exit(ExitStatus.INTERRUPTED)
        except click.UsageError as error:
            _wrong_usage(error)
        except (click.exceptions.Exit, click.Abort, click.ClickException):
            raise
        except Exception as error:  # noqa: BLE001 - the boundary: an error that escapes is reported without a traceback
            _unexpected(error)
        finally:
            # CPython ends `python -m` by SIGINT, with any status, if an interrupt was ever raised in code that was
            # executed from a string (dataclasses are made so), caught or not; executing another one resets that
            # (pythonrun.c, run_eval_code_obj).
            exec("")  # noqa: S102 - nothing


def _wrong_usage(error: click.UsageError) -> NoReturn:
    """Report wrong options or arguments in the form of every other error."""
    if type(error).__name__ == "NoArgsIsHelpError":  # of newer releases of click: the help itself
        raise error
    message = wrapped(error.format_message(), "error: ")
    echo(f"error: {message}", err=True)
    if error.ctx is not None and "--help" not in message:
        echo(f"  = help: `{error.ctx.command_path} --help` lists the options", err=True)
    sys.exit(ExitStatus.BAD_INPUT)


def _unexpected(error: Exception) -> NoReturn:
    """Report an error that no command foresaw, in three lines; ``PIPEPROOF_DEBUG=1`` shows its traceback.

    Findings that escaped are printed as such.
    """
    if os.environ.get("PIPEPROOF_DEBUG") == "1":
        raise error
    if isinstance(error, PipeproofError):
        echo(f"error: {error}", err=True)
        sys.exit(ExitStatus.BAD_INPUT)
    if isinstance(error, MemoryError):
        echo("error: out of memory\n  = help: use smaller sizes or files, or a machine with more memory", err=True)
        sys.exit(ExitStatus.BAD_INPUT)
    if type(error).__name__ == "SchemaError" and "KeyboardInterrupt" in str(error):  # pydantic wraps an interrupt
        echo("interrupted", err=True)
        sys.exit(ExitStatus.INTERRUPTED)
    calls = [(frame.f_code.co_filename, number) for frame, number in walk_tb(error.__traceback__)]
    line = f" at {Path(calls[-1][0]).name}:{calls[-1][1]}" if calls else ""
    text = " ".join(str(error).split())[:_MOST_ERROR_TEXT]
    echo(
        f"error: {type(error).__name__}: {text or 'without a text'}\n"
        f"  = help: pipeproof {__version__} did not expect this{line}: please report it with the command and files\n"
        "  = help: PIPEPROOF_DEBUG=1 shows the traceback",
        err=True,
    )
    sys.exit(ExitStatus.BAD_INPUT)


_MOST_ERROR_TEXT = 300
"""Characters of the text of an unexpected error that are shown."""


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@explain_option
@schema_option
@click.version_option(__version__, prog_name="pipeproof")
def main() -> None:
    """Prove, time and run a pipeline-parallel training plan.

    Exit status: 0 clean, 1 errors found or a run that does not match, 2 bad input or a missing backend,
    3 a worker died or hung, 130 interrupted, 141 the reader of the output closed it, 143 terminated.
    """


main.commands = LazyCommands(
    {
        "init": "init_command:init",
        "check": "check_command:check",
        "show": "show_command:show",
        "simulate": "simulate_command:simulate",
        "tune": "tune_command:tune",
        "sweep": "sweep_command:sweep",
        "compare": "compare_command:compare",
        "import": "import_command:import_group",
        "schedule": "schedule_command:schedule",
        "play": "play_command:play",
        "doctor": "doctor_command:doctor",
        "rehearse": "run_command:rehearse",
        "run": "run_command:run",
        "job": "hang_command:job",
        "state": "state_command:state",
    },
    {},
)
