"""Hosts of a job by evidence, and the directories of jobs on this one.

A launcher's count of hosts is not used: two containers of one machine share neither files nor process numbers, and two
agents of one machine may have separate temporary directories.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeproof.atomic_write import atomic_write
from pipeproof.exec.store.process_state import ProcessId, boot_id
from pipeproof.foreign_text import MALFORMED, decode_json, read_foreign


def own_host() -> tuple[str, str]:
    """Name of this host, and a text that is equal for processes that share its files and process numbers."""
    temporary = Path(tempfile.gettempdir()).stat()
    numbers = Path("/proc/self/ns/pid")
    namespace = str(numbers.stat().st_ino) if numbers.exists() else ""
    return socket.gethostname(), f"{boot_id()} {namespace} {temporary.st_dev}.{temporary.st_ino}"


@dataclass(frozen=True, slots=True)
class Host:
    """Ranks of one host in order."""

    name: str
    ranks: tuple[int, ...]


def hosts_of(machines: Sequence[tuple[str, str]]) -> tuple[Host, ...]:
    """Hosts by ``own_host`` of all ranks, in the order of their first ranks.

    Hosts of one name get its number among them, as in ``node.2``.
    """
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, machine in enumerate(machines):
        ranks.setdefault(machine, []).append(rank)
    named: dict[str, int] = {}
    hosts = []
    for (name, _), own in ranks.items():
        named[name] = named.get(name, 0) + 1
        hosts.append(Host(name if named[name] == 1 else f"{name}.{named[name]}", tuple(own)))
    return tuple(hosts)


_DIRECTORY = re.compile(r"pipeproof-[0-9a-f]{32}")
_PROCESS = "process.json"


def make_directory(directory: Path) -> None:
    """Make the directory of a job on this host; remove those of this user's jobs of which the process has ended.

    Raises:
        FileExistsError: another process made it first.
    """
    remove_left_directories(directory.parent)
    directory.mkdir(mode=0o700)
    with atomic_write(directory / _PROCESS) as new:
        new.write_text(json.dumps({"machine": own_host()[1], **asdict(ProcessId.own())}))


def remove_left_directories(parent: Path) -> None:
    """Remove the directories of this user's jobs on this machine of which the process has ended."""
    for left in parent.iterdir():
        if _DIRECTORY.fullmatch(left.name):
            _remove_if_left(left)


def _remove_if_left(directory: Path) -> None:
    with contextlib.suppress(OSError, *MALFORMED):  # not ours, or being made
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode) or (sys.platform != "win32" and found.st_uid != os.getuid()):
            return
        content = decode_json(read_foreign(directory / _PROCESS))
        process = ProcessId(int(content["pid"]), str(content["started"]))
        if content["machine"] == own_host()[1] and not process.is_alive:  # of another machine nobody knows the end here
            shutil.rmtree(directory, ignore_errors=True)
