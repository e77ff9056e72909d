"""What ``pipeproof run`` is asked about state: where to save it, how often, and what to go on from."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipeproof.commands.line import writable


def kept_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command ``--save``, ``--save-every``, ``--save-format`` and ``--resume``, as one argument ``kept``."""

    @click.option("--save", type=click.Path(path_type=Path, file_okay=False), callback=writable, metavar="DIR",
                  help="Save the state below DIR after the last step, for --resume.")  # fmt: skip
    @click.option("--save-every", type=click.IntRange(min=1), metavar="N", help="Save it after each N-th step, too.")
    @click.option("--save-format", type=click.Choice(["pipeproof", "flex"]), default="pipeproof", show_default=True,
                  help="flex: Paddle's own checkpoint, written by Paddle, with our index.")  # fmt: skip
    @click.option("--resume", type=click.Path(path_type=Path), metavar="DIR",
                  help="Go on from a saved state, or from the newest one below DIR.")  # fmt: skip
    @functools.wraps(command)
    def collected(
        *, save: Path | None, save_every: int | None, save_format: str, resume: Path | None, **others: Any
    ) -> None:
        if save is None and save_every is not None:
            raise click.UsageError("--save-every says how often --save DIR writes")
        if save is None and save_format != "pipeproof":
            raise click.UsageError("--save-format says how --save DIR writes")
        from pipeproof.exec.kept import KeptState

        command(kept=KeptState(save, save_every, resume, by_paddle=save_format == "flex"), **others)

    return collected
