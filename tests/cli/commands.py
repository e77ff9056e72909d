"""Runs the commands, in this process or in one of their own."""

import os
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from pipeproof.cli import main as cli

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
BROKEN = sorted((REPOSITORY / "tests" / "specs" / "broken").glob("*.yaml"))


def invoke(*arguments):
    """Run the commands in this process; anything but an exit fails the test."""
    result = CliRunner().invoke(cli.main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def process(*arguments, **environment):
    """Run the commands in a process of their own."""
    return subprocess.run(
        [sys.executable, "-m", "pipeproof", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
    )
