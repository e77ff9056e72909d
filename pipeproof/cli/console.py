"""Shared parts of commands: consoles, checks of output files, and the output of refused inputs."""

from __future__ import annotations

import errno
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from pipeproof.diagnostics.finding import BadPlanError, PipeproofError
from pipeproof.exit_status import ExitStatus

if TYPE_CHECKING:
    from rich.console import Console

    from pipeproof.cli.check_report import Form

_Function = TypeVar("_Function", bound=Callable[..., Any])

_FIXES = MappingProxyType(
    {
        errno.ENOSPC: "make room on that disk, or name another",
        errno.EMFILE: "let this process have more open files (`ulimit -n`)",
        errno.ENAMETOOLONG: "use a shorter name",
        errno.EACCES: "give this user permission, or name another path",
        errno.EROFS: "name a path on a writable disk",
    }
)
"""Suggested fixes by the number of the system's error."""


def writable(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse an output that cannot be written before any work is done; the callback of such an option."""
    if value is None:
        return None
    existing = next(path for path in (value, *value.absolute().parents) if path.exists())
    is_directory = isinstance(parameter.type, click.Path) and not parameter.type.file_okay
    may_be_made = is_directory or existing in (value, value.absolute().parent)
    if existing != value and not (may_be_made and existing.is_dir()):
        raise click.BadParameter(f"{str(value)!r}: there is no directory {str(value.parent)!r}")
    if not os.access(existing, os.W_OK):
        raise click.BadParameter(f"{str(value)!r}: {str(existing)!r} is not writable")
    return value


def require_separate_outputs(files_of: Callable[[Path], Iterable[Path]] = lambda path: (path,)) -> None:
    """Refuse an output file that is also an input or another output of the command that runs.

    Output files are options with a check of their own, such as ``writable``. ``files_of`` returns the files of an
    input that may name several.

    Raises:
        click.UsageError: a file would be replaced.
    """
    context = click.get_current_context()
    seen: dict[Path, click.Parameter] = {}
    pairs = [
        (parameter, path)
        for parameter in sorted(context.command.params, key=_is_output)  # inputs first
        if isinstance(parameter.type, click.Path)
        for value in _paths(context.params.get(parameter.name or ""))
        for path in ((value,) if _is_output(parameter) else files_of(value))
    ]
    for parameter, path in pairs:
        file = Path(os.path.realpath(path))
        if file.exists() and not file.is_file():
            continue  # directories have several files, and devices replace nothing
        if _is_output(parameter) and file in seen:
            names = " and ".join(each.get_error_hint(context) for each in (seen[file], parameter))
            raise click.UsageError(f"{names} are one file, {str(path)!r}, which would be replaced")
        seen[file] = parameter


def _is_output(parameter: click.Parameter) -> bool:
    """True for the option of a file that is written."""
    kind = parameter.type
    return isinstance(kind, click.Path) and not kind.dir_okay and parameter.callback is not None


def _paths(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


def format_option(*others: str) -> Callable[[_Function], _Function]:
    """Give a command ``form``: text, JSON, or one of ``others``."""
    forms = click.Choice(["text", "json", *others])
    return click.option("--format", "form", type=forms, default="text", show_default=True)


def not_nan(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """Refuse NaN, which is within every range; the callback of a number."""
    if math.isnan(value):
        raise click.BadParameter("nan is not a number")
    return value


def console_for(*, stderr: bool = False) -> Console:
    """Return the console of standard output or error."""
    from pipeproof.cli.wrapping_console import WrappingConsole

    class _Console(WrappingConsole):
        def on_broken_pipe(self) -> None:
            output_closed()

    return _Console(stderr=stderr, highlight=False)


@contextmanager
def refusing_bad_plans(form: Form, file: Path, noted: Sequence[Path] = ()) -> Iterator[None]:
    """Print the findings of a refused plan, not a traceback, and exit with its status.

    Note which command reads the file, or one of the others that were given.
    """
    try:
        yield
    except PipeproofError as error:
        from pipeproof.cli.check_report import show_refusal

        status = ExitStatus.BAD_INPUT if isinstance(error, BadPlanError) else ExitStatus.FAILED
        show_refusal(error, form, file, status, partial(console_for, stderr=True))
        if status is ExitStatus.BAD_INPUT:
            for path in dict.fromkeys((*noted, file)):
                note_kind(path)
        sys.exit(status)
    except BrokenPipeError:
        raise  # the reader of our output has closed it: click exits quietly
    except OSError as error:
        refused_by_system(error)


def note_kind(file: Path) -> None:
    """Print on standard error the kind of a refused file and the commands that read it, if it is recognised."""
    from pipeproof.cli.file_kinds import note_of_kind

    note = note_of_kind(file)
    if note is not None:
        echo(f"note: {note}", err=True)


@contextmanager
def opening_checkpoints() -> Iterator[None]:
    """Convert errors: a checkpoint that cannot be opened is bad input, as a plan that cannot be read."""
    try:
        yield
    except BadPlanError:
        raise
    except PipeproofError as error:
        raise BadPlanError(*error.findings) from error


def output_closed() -> NoReturn:
    """Exit where the reader of our output has closed it, as ``head`` does: nothing failed, and nothing was proved."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would fail to flush at its exit
    sys.exit(ExitStatus.OUTPUT_CLOSED)


def refused_by_system(error: OSError) -> NoReturn:
    """Print an error of the system, and exit as for bad input."""
    with suppress(OSError):  # standard error may be on the same full disk
        print_error(_error_text(error))
    sys.exit(ExitStatus.BAD_INPUT)


def wrapped(text: str, label: str = "", *, err: bool = True) -> str:
    """Return prose wrapped for standard error or output, where it will follow a label."""
    from pipeproof.diagnostics.text_output import prose_width, wrapped_text

    stream = sys.stderr if err else sys.stdout
    width = None if stream is None else prose_width(stream)  # it may have been closed
    return wrapped_text(label + text, width).removeprefix(label)


def echo(text: str, *, err: bool = False) -> None:
    """Print prose without styles and control characters on standard output or error, wrapped as consoles wrap it."""
    from pipeproof.diagnostics.text_output import printable_lines

    click.echo(wrapped(printable_lines(text), err=err), err=err)


def print_error(text: str) -> None:
    """Print an error on standard error."""
    echo(f"error: {text}", err=True)


def _error_text(error: OSError) -> str:
    """The error and its path, with a suggested fix if one is known; without the number of the error."""
    if error.strerror is None:
        return str(error)
    if error.errno == errno.ENOENT and error.filename is None:
        return "the current directory has been removed\n  = help: change to a directory that exists"
    path = "" if error.filename is None else f"`{error.filename}`: "
    fix = _FIXES.get(error.errno or 0)
    return f"{path}{error.strerror}" + (f"\n  = help: {fix}" if fix else "")
