"""Kernel of this machine and state of its processes, from Linux's ``/proc``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PF_EXITING = 0x4
"""From Linux's include/linux/sched.h."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A unique process: its number is reused after its end, its start time is not."""

    pid: int
    started: str

    @classmethod
    def own(cls) -> ProcessId:
        """This process."""
        return cls(os.getpid(), _fields(os.getpid())[19])

    @property
    def is_alive(self) -> bool:
        """True until the process has ended."""
        fields = _fields(self.pid)
        return fields[0] not in ("", "Z", "X") and fields[19] == self.started


def boot_id() -> str:
    """Return the kernel's identity since its start, which containers of one host share; empty if it is unknown."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def is_stopped(pid: int) -> bool:
    """Return True if the process is stopped (SIGSTOP, a debugger); False if its state is unknown."""
    return _fields(pid)[0] in ("T", "t")


def is_ending(pid: int) -> bool:
    """Return True if the kernel is ending the process; False if its state is unknown."""
    return bool(int(_fields(pid)[6]) & _PF_EXITING)


def siblings(pid: int) -> list[int]:
    """Return the processes with the same parent as a process, itself included; empty without ``/proc``."""
    parent = _fields(pid)[1]
    try:
        every = sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal())
    except OSError:
        return []
    return [other for other in every if parent != "0" and _fields(other)[1] == parent]


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started; empty if it is unknown."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in raw.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs if name}


def _fields(pid: int) -> list[str]:
    """Fields of ``/proc/PID/stat`` from the third on: the state, at 1 the parent, at 6 the flags, at 19 the start.

    If there is no such process, the state is empty and the others are 0.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ["", *["0"] * 49]
    return stat.rpartition(")")[2].split()
