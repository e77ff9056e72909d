"""Stacks of ranks by py-spy: from ``py-spy dump``, as text or JSON, or asked now of processes of this host.

py-spy reads the memory of another process, which needs the same user and, in
many containers, the capability SYS_PTRACE. Where that is refused there is a
note in place of a stack.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeproof.foreign_text import MALFORMED, decode_json, open_foreign, read_foreign
from pipeproof.interop.hang.flight_recorder import files_by_rank, unreadable_dump

MAX_BYTES: Final = 2**24
"""Largest dump of a rank's stacks."""
_TIMEOUT_S: Final = 5.0
_NAME: Final = re.compile(r".*?(?P<rank>\d+)(?:\.(?:txt|json|stack|log))?", re.DOTALL | re.ASCII)
_PROCESS: Final = re.compile(r"Process (?P<pid>\d+)\b.*")
_THREAD: Final = re.compile(r"Thread (?P<id>\S+) \((?P<state>[^)]*)\)(?:: \"(?P<name>.*)\")?")
_FRAME: Final = re.compile(r" {4}(?P<function>\S.*) \((?P<file>.*?)(?::(?P<line>\d+))?\)")
_LIBRARY: Final = re.compile(r"[/\\](?:site-packages|dist-packages)[/\\]|[/\\]lib[/\\]python3|^<")
_MOST_CALLS: Final = 3
"""Calls of the program that a line shows."""
_FRAMEWORKS: Final = frozenset({"torch", "paddle", "pipeproof", "numpy"})


@dataclass(frozen=True, slots=True)
class StackFrame:
    """A call of a stack; ``line`` is 0 where it is unknown."""

    function: str
    file: str
    line: int

    @property
    def is_library(self) -> bool:
        """True for Python's standard library, and for installed packages; text has their short names only."""
        if Path(self.file).is_absolute() or self.file.startswith("<"):
            return bool(_LIBRARY.search(self.file))
        first = re.split(r"[/\\]", self.file)[0].removesuffix(".py")
        return first in _FRAMEWORKS or first in sys.stdlib_module_names

    @property
    def text(self) -> str:
        """``function (file:line)``, with the file's name from the working directory."""
        file = self.file.removeprefix(str(Path.cwd()) + os.sep)
        return f"{self.function} ({file}{f':{self.line}' if self.line else ''})"


@dataclass(frozen=True, slots=True)
class Stack:
    """The main thread of a process, innermost call first; ``is_active`` if it used a processor."""

    pid: int
    is_active: bool
    frames: tuple[StackFrame, ...]

    @property
    def own(self) -> tuple[StackFrame, ...]:
        """The calls of the program itself."""
        return tuple(frame for frame in self.frames if not frame.is_library)

    @property
    def is_communicating(self) -> bool:
        """True if the program is in a call of a framework's ``distributed`` package."""
        inner = self.frames[: self.frames.index(self.own[0])] if self.own else self.frames
        return any("distributed" in re.split(r"[/\\]", frame.file) for frame in inner)

    @property
    def text(self) -> str:
        """The innermost call of the program, its callers, and the call of a library that it is in."""
        own, inner = self.own, next(iter(self.frames), None)
        if not own or inner is None:
            return "no Python code" if inner is None else inner.text
        callers = ", ".join(frame.text for frame in own[1:_MOST_CALLS])
        called = "" if inner is own[0] else f"; in {inner.function} of {Path(inner.file).name}"
        return f"{own[0].text}{', called by ' if callers else ''}{callers}{called}"


def stack_files(directory: Path) -> dict[int, Path]:
    """Return the stack file of each rank in a directory, by the number that its name ends with.

    Raises:
        PlanFileError: PP930, two files are of one rank, or the directory cannot be read.
    """
    return files_by_rank(directory, _NAME, _begins_as_stack)


def read_stacks(directory: Path) -> dict[int, Stack]:
    """Read the stacks of ranks in a directory.

    Raises:
        PlanFileError: PP930, there is none, a file cannot be read, or two are of one rank.
    """
    files = stack_files(directory)
    if not files:
        raise unreadable_dump(
            f"no stack of py-spy in `{directory}`: the name of each file ends with its rank, such as rank_0.txt",
            str(directory),
            "py-spy dump --pid PID > DIR/rank_N.txt, for each rank",
        )
    return {rank: read_stack(path) for rank, path in files.items()}


def read_stack(path: Path) -> Stack:
    """Read a dump of py-spy, text or JSON.

    Raises:
        PlanFileError: PP930, it cannot be read, or is not a dump.
    """
    try:
        text = read_foreign(path, MAX_BYTES).decode(errors="replace")
    except OSError as error:
        raise unreadable_dump(f"cannot read `{path}`: {error.strerror}", str(path)) from error
    try:
        return _from_json(text) if text.lstrip().startswith("[") else _from_text(text)
    except MALFORMED as error:
        raise unreadable_dump(f"`{path}` is not a dump of py-spy, or is cut short: {error}", str(path)) from error


def ask_py_spy(pid: int) -> Stack | str:
    """Ask py-spy for the stack of a process of this host; return the reason if there is none.

    The process is not paused: a rank may hang in a call that must not be interrupted.
    """
    program = shutil.which("py-spy")
    if program is None:
        return "py-spy is not installed"
    try:
        done = subprocess.run(
            [program, "dump", "--json", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True,
            timeout=_TIMEOUT_S, check=False, errors="replace",
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"py-spy did not answer within {_TIMEOUT_S:g} s"
    except OSError as error:
        return f"py-spy cannot be started: {error.strerror}"
    if done.returncode == 0:
        try:
            return _from_json(done.stdout)
        except MALFORMED as error:
            return f"py-spy did not print stacks: {error}"
    if "permission" in done.stderr.lower():
        return (
            f"py-spy is not permitted to read PID {pid}: as root run `py-spy dump --pid {pid}`; a container needs "
            "the capability SYS_PTRACE"
        )
    first = next(iter(done.stderr.strip().splitlines()), f"exit status {done.returncode}")
    return f"py-spy cannot read PID {pid}: {first.removeprefix('Error: ')}"


def _begins_as_stack(path: Path) -> bool:
    with open_foreign(path) as file:
        start = file.read(4096).lstrip()
    return start.startswith(b"[") or bool(re.match(rb"(?:Process \d+|Thread \S+ \()", start))


def _from_json(text: str) -> Stack:
    threads = decode_json(text)
    if not isinstance(threads, list) or not threads:
        raise ValueError("it has no threads")
    main = _main([(thread["os_thread_id"], thread["thread_name"], thread) for thread in threads], threads[0]["pid"])
    frames = tuple(
        StackFrame(str(frame["name"]), str(frame["filename"]), int(frame["line"] or 0)) for frame in main["frames"]
    )
    return Stack(int(main["pid"]), bool(main["active"]), frames)


def _from_text(text: str) -> Stack:
    pid = 0
    threads: list[tuple[Any, Any, tuple[str, list[StackFrame]]]] = []
    for line in text.splitlines():
        if process := _PROCESS.fullmatch(line):
            pid = pid or int(process["pid"])
        elif thread := _THREAD.fullmatch(line.rstrip()):
            number = int(thread["id"]) if thread["id"].isdecimal() else None
            threads.append((number, thread["name"], (thread["state"], [])))
        elif (frame := _FRAME.fullmatch(line.rstrip())) and threads:
            threads[-1][2][1].append(StackFrame(frame["function"], frame["file"], int(frame["line"] or 0)))
    if not threads:
        raise ValueError("it has no threads")
    state, frames = _main(threads, pid)
    return Stack(pid, state.startswith("active"), tuple(frames))


def _main(threads: Sequence[tuple[Any, Any, Any]], pid: int) -> Any:
    """Return the main thread of (number, name, thread): by its number, else by its name, else the first."""
    by_number = (thread for number, _, thread in threads if number == pid)
    by_name = (thread for _, name, thread in threads if name == "MainThread")
    return next(by_number, next(by_name, threads[0][2]))
