"""Requests for Flight Recorder dumps over the pipes that PyTorch reads.

With ``TORCH_NCCL_DEBUG_INFO_PIPE_FILE=STEM`` each rank reads ``STEM<rank>.pipe``
about once in a second, and any byte in it makes the rank write its dump. The
rank needs no working main thread for that.
"""

from __future__ import annotations

import errno
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop.hang.flight_recorder import read_content, unreadable_dump
from pipeproof.system_calls import open_pipe

WAIT_S: Final = 30.0
"""Time in which ranks answer; a rank looks once in a second, and gives a dump 15 s by default."""
_POLL_S: Final = 0.25
_HELP: Final = (
    "start the job with TORCH_NCCL_DEBUG_INFO_PIPE_FILE=STEM and TORCH_FR_BUFFER_SIZE=2000, and name STEM here"
)

_Stamp = tuple[int, int]
"""Time of the last change in nanoseconds, and size."""


def request_dumps(stem: Path, directory: Path, wait_s: float = WAIT_S) -> tuple[frozenset[int], tuple[str, ...]]:
    """Ask all ranks of this host for their dumps, and wait until these are written.

    Args:
        stem: the value of ``TORCH_NCCL_DEBUG_INFO_PIPE_FILE`` of the job.
        directory: directory into which the ranks dump.
        wait_s: time limit in seconds.

    Returns:
        The ranks with a new dump, and a sentence about each other rank that has a pipe.

    Raises:
        PlanFileError: PP930, there is no pipe, it cannot be written, or no rank has answered.
    """
    pipes = _pipes(stem)
    before = {rank: _stamps(directory, rank) for rank in pipes}
    problems = {rank: problem for rank, pipe in pipes.items() if (problem := _ask(pipe))}
    asked = pipes.keys() - problems.keys()
    done: set[int] = set()
    end = time.monotonic() + wait_s
    while asked - done and time.monotonic() < end:
        time.sleep(_POLL_S)
        done |= {rank for rank in asked - done if _is_dumped(directory, rank, before[rank])}
    problems |= dict.fromkeys(asked - done, f"has written no whole dump to `{directory}` in {wait_s:g} s")
    texts = tuple(f"rank {rank} {problem}" for rank, problem in sorted(problems.items()))
    if not done:
        help_text = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE of the job names the files, and DIR is their directory"
        raise unreadable_dump(f"no rank of `{stem}` has answered: {'; '.join(texts)}", str(stem), help=help_text)
    return frozenset(done), texts


def _pipes(stem: Path) -> dict[int, Path]:
    pattern = re.compile(re.escape(stem.name) + r"(0|[1-9]\d*)\.pipe", re.ASCII)
    try:
        names = {match[1]: path for path in stem.parent.iterdir() if (match := pattern.fullmatch(path.name))}
        pipes = {int(rank): path for rank, path in names.items() if path.is_fifo()}
    except OSError as error:
        raise unreadable_dump(f"cannot read `{stem.parent}`: {error.strerror}", str(stem), help=_HELP) from error
    if not pipes:
        raise unreadable_dump(f"there is no pipe `{stem}<rank>.pipe` on this host", str(stem), help=_HELP)
    return dict(sorted(pipes.items()))


def _ask(pipe: Path) -> str:
    """Write a byte to a pipe; return the problem, empty without one."""
    try:
        descriptor = open_pipe(pipe)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return f"does not read `{pipe}`: its process has ended"
        return f"cannot be asked: `{pipe}`: {error.strerror}"
    try:
        os.write(descriptor, b"1")
    except OSError as error:
        return f"cannot be asked: `{pipe}`: {error.strerror}"
    finally:
        os.close(descriptor)
    return ""


def _is_dumped(directory: Path, rank: int, before: dict[str, _Stamp]) -> bool:
    """True for a rank with a dump that is new and can be read: ranks write their files in place."""
    for name, stamp in _stamps(directory, rank).items():
        if before.get(name) != stamp:
            with suppress(PlanFileError):
                read_content(directory / name)
                return True
    return False


def _stamps(directory: Path, rank: int) -> dict[str, _Stamp]:
    """Return the files whose name ends with the rank, each with its time and size."""
    pattern = re.compile(rf"(?:.*\D)?{rank}(?:\.(?:pkl|pickle|json|bin))?", re.ASCII | re.DOTALL)
    try:
        paths = [path for path in directory.iterdir() if pattern.fullmatch(path.name) and path.is_file()]
        return {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}
    except OSError:  # not there yet, or just replaced
        return {}
