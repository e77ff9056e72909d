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


def printed(*arguments, status=0):
    """Output of the commands on both streams; they end with this status."""
    result = invoke(*arguments)
    assert result.exit_code == status, result.output
    return result.output


def process(*arguments, **environment):
    """Run the commands in a process of their own."""
    return python("-m", "pipeproof", *arguments, environment=environment)


def python(*words, environment=None, **options):
    """Run Python on this checkout in a process of its own; ``options`` of ``subprocess.run``."""
    streams = {} if "stdout" in options else {"capture_output": True}
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(environment or {})},
        **{"text": True, "timeout": 120, "check": False, **streams, **options},
    )
