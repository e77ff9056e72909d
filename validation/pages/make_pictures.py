"""Write the terminal pictures of the README, ``docs/images/*.svg``, from the output of the real commands.

``python validation/pages/make_pictures.py`` writes the pictures of ``check`` and ``simulate``, and the pictures that
``reshard`` and ``simulate`` draw. With ``--run`` it also writes the picture of ``run``, which starts real Paddle
processes. The other commands print the same on every machine.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from pages import DOCS, ROOT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

IMAGES = DOCS / "images"
COMMANDS = {
    "check": ("check", "examples/gpt_pp2_tp2_sp_partial.yaml"),
    "simulate": ("simulate", "examples/gpt_pp4.yaml"),
    "run": ("run", "examples/gpt_pp4.yaml"),
}
"""The command of each picture, by the picture's name."""

COLUMNS = 120
"""Width of the terminal; longer lines wrap, as in a terminal, in the middle of a word if necessary."""

FONT_LINKS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Rich's pictures link to remote fonts; these pictures must load nothing."""


def output_of(name: str) -> str:
    """Return the output of the picture's command on a colour terminal, with prompt line and escape codes."""
    arguments = COMMANDS[name]
    terminal = {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "0", "TERM": "xterm-256color", "COLUMNS": str(COLUMNS)}
    hidden = ("NO_COLOR", "COLORTERM", "LINES")
    done = subprocess.run(
        [sys.executable, "-m", "pipeproof", *arguments],
        cwd=ROOT,
        env={**{k: v for k, v in os.environ.items() if k not in hidden}, **terminal},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return f"\x1b[1m$ pipeproof {' '.join(arguments)}\x1b[0m\n{done.stdout}"


def picture(name: str, output: str) -> str:
    """Return the SVG of a terminal with this output."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    for line in Text.from_ansi(output).split("\n"):
        for part in line.divide(range(COLUMNS, len(line), COLUMNS)):
            console.print(part, no_wrap=True)
    drawn = console.export_svg(title="pipeproof", theme=MONOKAI, unique_id=f"pipeproof-{name}")
    return FONT_LINKS.sub("", drawn)


def write(name: str) -> Path:
    """Write one picture and return its path."""
    path = IMAGES / f"{name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(picture(name, output_of(name)), encoding="utf-8")
    return path


if __name__ == "__main__":
    match sys.argv[1:]:
        case []:
            names = ["check", "simulate"]
        case ["--run"]:
            names = [*COMMANDS]
        case _:
            sys.exit("usage: python validation/pages/make_pictures.py [--run]")
    for each in names:
        write(each)
