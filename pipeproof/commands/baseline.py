"""What ``pipeproof check`` is asked about findings that are known: which file has them, or is to have them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipeproof.commands.line import writable


def baseline_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--baseline``, ``--write-baseline`` (as ``new_baseline``) and ``--reason``."""

    @click.option("--baseline", type=click.Path(path_type=Path), metavar="FILE",
                  help="Findings that this file has are known: they are shown, and do not fail the check.")  # fmt: skip
    @click.option("--write-baseline", "new_baseline", type=click.Path(path_type=Path, dir_okay=False),
                  callback=writable, metavar="FILE",
                  help="Write all that is found to this file; reasons that it has are kept.")  # fmt: skip
    @click.option("--reason", metavar="TEXT", help="Why the findings that --write-baseline adds may stay.")
    @functools.wraps(command)
    def checked(*, baseline: Path | None, new_baseline: Path | None, reason: str | None, **others: Any) -> None:
        if baseline is not None and new_baseline is not None:
            raise click.UsageError("give one of --baseline and --write-baseline")
        if reason is not None and (new_baseline is None or not reason.strip()):
            raise click.UsageError("--reason says in words why what --write-baseline FILE writes may stay")
        command(baseline=baseline, new_baseline=new_baseline, reason=reason, **others)

    return checked
