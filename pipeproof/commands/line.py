"""What the commands share: the console, where output may go, and how what is refused is shown."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

import click

from pipeproof.exit_status import ExitStatus
from pipeproof.specs.finding import BadPlanError, PipeproofError

if TYPE_CHECKING:
    from rich.console import Console

    from pipeproof.commands.check import Form


_PICTURES = (".png", ".svg", ".pdf")
_MENDS = MappingProxyType(
    {
        errno.ENOSPC: "make room on the disk that is written to, or name another",
        errno.ENAMETOOLONG: "name it shorter",
        errno.EACCES: "give this user leave, or name another place",
        errno.EROFS: "name a place on a disk that may be written to",
    }
)
"""By number of the system's error what helps."""


def writable(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse an output that cannot be written before any work is done for it; the callback of such an option."""
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


def console_for(*, stderr: bool = False, color: str = "auto") -> Console:
    """The terminal, or the pipe, that people read; ``color`` is ``auto``, ``always`` or ``never``."""
    from rich.console import Console

    if color == "always":  # the option was typed: it is stronger than NO_COLOR and than a terminal without colours
        return Console(stderr=stderr, highlight=False, force_terminal=True, no_color=False, color_system="standard")
    return Console(stderr=stderr, highlight=False, no_color=True if color == "never" else None)


@contextmanager
def refusing_bad_plans(form: Form, file: Path, color: str = "auto") -> Iterator[None]:
    """Print the findings of a refused plan and exit with its status; nothing is shown as a traceback."""
    try:
        yield
    except PipeproofError as error:
        from pipeproof.commands.check import show_refusal

        status = ExitStatus.BAD_INPUT if isinstance(error, BadPlanError) else ExitStatus.FAILED
        show_refusal(error, form, file, status, lambda: console_for(stderr=True, color=color))
        sys.exit(status)
    except BrokenPipeError:
        raise  # whoever read our output has gone: click ends quietly
    except OSError as error:
        refused_by_system(error)


def refused_by_system(error: OSError) -> NoReturn:
    """Say what the system did not do, and exit as for bad input."""
    click.echo(f"error: {_said(error)}", err=True)
    sys.exit(ExitStatus.BAD_INPUT)


def _said(error: OSError) -> str:
    """What the system did not do, where, and what helps, if that is known; not the number of the error."""
    if error.strerror is None:
        return str(error)
    place = "" if error.filename is None else f"`{error.filename}`: "
    mend = _MENDS.get(error.errno or 0)
    return f"{place}{error.strerror}" + (f"\n  = help: {mend}" if mend else "")


share_gpus = click.option(
    "--share-gpus", is_flag=True,
    help="Deal ranks out over fewer GPUs, several on one: NCCL takes its sockets, and times mean nothing.",
)  # fmt: skip
"""The option of commands that start ranks."""


def picture_file(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a picture that cannot be made before any work is done."""
    if value is not None and value.suffix.lower() not in _PICTURES:
        raise click.BadParameter(f"{str(value)!r}: pictures end with {', '.join(_PICTURES)}")
    if value is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.BadParameter("pictures need matplotlib: pip install 'pipeproof[plot]'")
    return writable(context, parameter, value)
