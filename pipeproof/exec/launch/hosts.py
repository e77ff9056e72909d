"""Hosts of a job by evidence: processes that see each other and each other's temporary files.

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeproof.atomic_write import atomic_write
from pipeproof.exec.store.process_state import ProcessId, boot_id
from pipeproof.foreign_text import decode_json, read_foreign

_LONGEST_NAME = 255
"""Characters of a host's name, as in DNS."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Place and number of one rank's process; ``machine`` is equal for processes that share files and numbers."""

    host: str
    machine: str
    process: ProcessId

    @classmethod
    def own(cls) -> Identity:
        """This process."""
        temporary = Path(tempfile.gettempdir()).stat()
        numbers = Path("/proc/self/ns/pid")
        evidence = (
            boot_id(),
            str(numbers.stat().st_ino) if numbers.exists() else "",
            f"{temporary.st_dev}.{temporary.st_ino}",
        )
        return cls(socket.gethostname()[:_LONGEST_NAME], " ".join(evidence), ProcessId.own())

    def content(self) -> dict[str, Any]:
        """Return a JSON value."""
        return asdict(self)

    @classmethod
    def of(cls, content: Any) -> Identity:
        """Read what ``content`` made.

        Raises:
            ValueError: it is something else.
        """
        try:
            process = ProcessId(int(content["process"]["pid"]), str(content["process"]["started"]))
            return cls(_printable(content["host"]), str(content["machine"]), process)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the store has no identity of a process: {error}") from None


@dataclass(frozen=True, slots=True)
class Host:
    """Ranks of one host in order; the first leads the others."""

    name: str
    ranks: tuple[int, ...]

    @property
    def leader(self) -> int:
        """Rank that makes the host's directory and runs its reference."""
        return self.ranks[0]

    def __str__(self) -> str:
        return f"{self.name} ({ranks_text(self.ranks)})"


def hosts_of(identities: Sequence[Identity]) -> tuple[Host, ...]:
    """Hosts by the identities of all ranks, in the order of their first ranks.

    Hosts of one name get its number among them, as in ``node.2``.
    """
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, identity in enumerate(identities):
        ranks.setdefault((identity.host, identity.machine), []).append(rank)
    named: dict[str, int] = {}
    hosts = []
    for (name, _), own in ranks.items():
        named[name] = named.get(name, 0) + 1
        hosts.append(Host(name if named[name] == 1 else f"{name}.{named[name]}", tuple(own)))
    return tuple(hosts)


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as ranges: ``ranks 0 to 3, 8``."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [str(a) if a == b else f"{a} to {b}" for a, b in ranges]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"


def hosts_content(hosts: Sequence[Host]) -> list[Mapping[str, Any]]:
    """Hosts as a JSON value."""
    return [asdict(host) for host in hosts]


def hosts_from(content: Any, num_ranks: int) -> tuple[Host, ...]:
    """Read what ``hosts_content`` made.

    Raises:
        ValueError: it is something else, or does not have each rank once.
    """
    try:
        hosts = tuple(Host(_printable(each["name"]), tuple(map(int, each["ranks"]))) for each in content)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the store has no table of hosts: {error}") from None
    if sorted(rank for host in hosts for rank in host.ranks) != [*range(num_ranks)] or not all(
        host.ranks for host in hosts
    ):
        raise ValueError(f"the store's table of hosts does not have each of {num_ranks} ranks once")
    return hosts


def host_of(hosts: Sequence[Host], rank: int) -> Host:
    """Host of a rank."""
    return next(host for host in hosts if rank in host.ranks)


def _printable(name: Any) -> str:
    text = str(name)
    if not text.isprintable() or len(text) > _LONGEST_NAME + len(".10000"):
        raise ValueError("the store has a host's name that is not printable, or too long")
    return text


_DIRECTORY = re.compile(r"pipeproof-[0-9a-f]{32}\.\d+")
_PROCESSES = "processes.json"


def make_directory(directory: Path, local: Mapping[int, Identity]) -> None:
    """Make the directory of a job on this host; remove those of this user's jobs of which every process has ended.

    Raises:
        PermissionError: another user made it first.
    """
    remove_left_directories(directory.parent)
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or not _is_own(found) or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(f"{directory} is not a directory of this user alone")
    with atomic_write(directory / _PROCESSES) as new:
        new.write_text(json.dumps([identity.content() for identity in local.values()]))


def remove_left_directories(parent: Path) -> None:
    """Remove the directories of this user's jobs on this machine of which every process has ended."""
    for left in parent.iterdir():
        if _DIRECTORY.fullmatch(left.name):
            _remove_if_left(left)


def _is_own(status: os.stat_result) -> bool:
    return sys.platform == "win32" or status.st_uid == os.getuid()


def _remove_if_left(directory: Path) -> None:
    with contextlib.suppress(OSError, ValueError):  # not ours, or being made
        if not _is_own(directory.lstat()):
            return
        identities = list(map(Identity.of, decode_json(read_foreign(directory / _PROCESSES))))
        own = Identity.own().machine  # of another machine's processes, which may write here, nobody knows the end here
        if all(identity.machine == own and not identity.process.is_alive for identity in identities):
            shutil.rmtree(directory, ignore_errors=True)
