"""Follow a page to the letter: a copy of the checkout, a fresh virtual environment, every command of the page.

``python validation/pages/follow_tutorial.py [PAGE.md]`` follows the tutorial, or another page of ``docs/`` that begins
with an installation, and prints the seconds of each command. Only the Python of the current environment is used. Needs
a few minutes and a package index.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from console_blocks import Command, Mismatch, Session, steps_of
from pages import ROOT

NOT_COPIED = (".*", "build", "dist", "tests", "benchmarks", "__pycache__", "*.egg-info")
"""Files that are not part of a wheel."""


def main() -> int:
    """Follow the page; return 1 at the first command that does not behave as the page shows."""
    name = sys.argv[1] if len(sys.argv) > 1 else "tutorial.md"
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="tutorial-") as made:
        checkout, state = Path(made, "checkout"), Path(made, "state")
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(*NOT_COPIED))
        state.mkdir()
        session = Session(checkout, state, environment())
        for step in steps_of(page):
            started = time.monotonic()
            try:
                session.follow(step)
            except Mismatch as mismatch:
                sys.stderr.write(f"docs/{name}, {mismatch}\n")
                return 1
            if isinstance(step, Command):
                sys.stdout.write(f"{time.monotonic() - started:6.1f} s  {step.text}\n")
                sys.stdout.flush()
        used = os.times()
        sys.stdout.write(f"processor time of all commands: {used.children_user + used.children_system:.1f} s\n")
    return 0


def environment() -> dict[str, str]:
    """Return the environment of a new user's shell: package sources, but nothing of Python or of this project."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name in {"HOME", "LANG"} or name.startswith("PIP_") or name.lower().endswith("_proxy")
    }
    outside = [entry for entry in os.environ["PATH"].split(":") if not Path(entry, "..", "pyvenv.cfg").exists()]
    path = f"{Path(sys.base_prefix, 'bin')}:{':'.join(outside)}"
    # pip's warnings concern the machine, not the tutorial
    return {**inherited, "PATH": path, "PIP_QUIET": "2"}


if __name__ == "__main__":
    raise SystemExit(main())
