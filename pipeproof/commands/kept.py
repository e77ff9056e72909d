"""What ``pipeproof run`` is asked about state: where to save it, how often, and what to go on from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipeproof.commands.line import writable


def kept_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--save``, ``--save-every`` and ``--resume``, as one argument ``kept``."""

    @click.option("--save", type=click.Path(path_type=Path, file_okay=False), callback=writable, metavar="DIR",
                  help="Save the state below DIR after the last step, for --resume.")  # fmt: skip
    @click.option("--save-every", type=click.IntRange(min=1), metavar="N", help="Save it after each N-th step, too.")
    @click.option("--resume", type=click.Path(path_type=Path), metavar="DIR",
                  help="Go on from a saved state, or from the newest one below DIR.")  # fmt: skip
    @functools.wraps(command)
    def collected(*, save: Path | None, save_every: int | None, resume: Path | None, **others: Any) -> None:
        if save is None and save_every is not None:
            raise click.UsageError("--save-every says how often --save DIR writes")
        from pipeproof.exec.kept import KeptState

        command(kept=KeptState(save, save_every, resume), **others)

    return collected
