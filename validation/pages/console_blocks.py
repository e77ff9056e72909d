"""Execution of the blocks of a page: write its files, run its commands, compare their output with the page.

A page has files, which are fenced blocks with a title (```` ```yaml title="plan.yaml" ````), and commands, which are
the lines of ``console`` blocks that begin with ``$ ``. The lines after a command, up to the next one, are its output.

- A line ``...`` represents any number of lines.
- Digests, times in seconds and milliseconds, and losses (nine decimals) match any other: they change with the rules,
  the machine and its processor. Spaces at the ends of lines are ignored.
- In a block where no command has output, the output is not compared: the commands must end with status 0 or 1, a
  verdict, and without a traceback.
- ``<!-- not run: REASON -->`` on the line before a block exempts it.
"""

from __future__ import annotations

import difflib
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 300
"""Time limit of a command: longer than any page asks a reader to wait."""

BLOCK = re.compile(
    r'^(?:<!-- not run: (?P<exempt>.+?) -->\n)?```(?P<kind>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<body>.*?)^```$',
    re.DOTALL | re.MULTILINE,
)

_VARIES = (
    (re.compile(r"\b[0-9a-f]{64}\b"), "<digest>"),
    (re.compile(r"(?<=digest )[0-9a-f]{12}\b"), "<digest>"),
    (re.compile(r"\b\d+\.\d{9}\b"), "<loss>"),
    (re.compile(r"\b\d+(\.\d+)? m?s\b|(?<=passed in )\d+\.\d\ds\b"), "<time>"),
    (re.compile(r"[ \t]+$", re.MULTILINE), ""),
    (re.compile(r"^(simulating layouts|checking rows): [\d,]+ of [\d,]+\n", re.MULTILINE), ""),  # every 10 s
)

# The shell of each command continues from the previous one: directory, environment, exit status.
_IN_SESSION = """
cd "$(cat "$2/directory")" && . "$2/environment"
(exit "$(cat "$2/status")")
eval "$1"
echo $? > "$2/status"
pwd > "$2/directory"
export -p > "$2/environment"
"""


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file that the reader of the page writes, with the line of the page."""

    line: int
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """A command, with the line of the page; ``output`` is None if its block shows no output."""

    line: int
    text: str
    output: str | None


class Mismatch(Exception):
    """A command that does not behave as the page shows."""


def steps_of(page: str) -> Iterator[PageFile | Command]:
    """Yield the steps of the page, in order."""
    for block in BLOCK.finditer(page):
        line = page.count("\n", 0, block.start("body"))
        if block["exempt"]:
            continue
        if block["title"]:
            yield PageFile(line, block["title"], block["body"])
        elif block["kind"] == "console":
            yield from _commands(block["body"], line + 1)


def _commands(body: str, first: int) -> Iterator[Command]:
    lines = body.splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith("$ ")]
    shows_output = len(starts) < len(lines)
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        output = "".join(f"{line}\n" for line in lines[start + 1 : end])
        yield Command(first + start, lines[start].removeprefix("$ "), output if shows_output else None)


class Session:
    """A shell in a directory; each command sees the changes of the previous ones."""

    def __init__(self, directory: Path, state: Path, environment: Mapping[str, str]) -> None:
        """Begin in ``directory``; ``state`` is another, empty directory for the session's own use."""
        self._directory = directory
        self._state = state
        self._environment = environment
        (state / "directory").write_text(f"{directory}\n")
        (state / "environment").write_text("")
        (state / "status").write_text("0\n")

    def follow(self, step: PageFile | Command) -> None:
        """Execute one step of the page.

        Raises:
            Mismatch: the command printed something else, or ended with another status.
        """
        if isinstance(step, PageFile):
            here = Path((self._state / "directory").read_text().strip())
            (here / step.name).write_text(step.text, encoding="utf-8")
            return
        printed = self._run(step)
        status = int((self._state / "status").read_text())
        if step.output is None:
            if status not in {0, 1} or "Traceback" in printed:
                raise Mismatch(f"line {step.line}: `{step.text}` ended with status {status}\n{printed}")
        elif not agrees(step.output, printed):
            shown, real = comparable(step.output).splitlines(), comparable(printed).splitlines()
            difference = "\n".join(difflib.unified_diff(shown, real, "the page", "printed", lineterm="", n=1))
            raise Mismatch(f"line {step.line}: `{step.text}` prints something else\n{difference}")

    def _run(self, command: Command) -> str:
        with subprocess.Popen(
            ["/bin/bash", "--norc", "-c", _IN_SESSION, "bash", command.text, str(self._state)],
            cwd=self._directory,
            env=dict(self._environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as shell:
            try:
                return shell.communicate(timeout=LIMIT_S)[0]
            except subprocess.TimeoutExpired as late:
                os.killpg(shell.pid, signal.SIGKILL)
                raise Mismatch(f"line {command.line}: `{command.text}` takes more than {LIMIT_S} s") from late


def agrees(shown: str, printed: str) -> bool:
    """Return whether a command printed the output that the page shows."""
    pattern = "".join(
        r"(?:.*\n)*?" if line == "..." else re.escape(line) + r"\n" for line in comparable(shown).splitlines()
    )
    text = comparable(printed)
    return re.fullmatch(pattern, text if text.endswith("\n") or not text else f"{text}\n") is not None


def comparable(output: str) -> str:
    """Return the output without the parts that vary between machines."""
    for varying, name in _VARIES:
        output = varying.sub(name, output)
    return output
