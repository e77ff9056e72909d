"""Paths between ranks as NCCL chose them, from its log of one process.

NCCL prints a line for each connection that it opens. The formats are those of NCCL 2.4 to 2.30 (src/transport/p2p.cc,
shm.cc, net.cc):

    HOST:PID:TID [0] NCCL INFO Ring 00 : 0 -> 1 [send] via NET/Socket/0                      until 2.4
    HOST:PID:TID [0] NCCL INFO Channel 00 : 0[47000] -> 1[4e000] via P2P/IPC                 bus ids
    HOST:PID:TID [0] NCCL INFO Channel 00 : 0[47000] -> 1[4e000] via direct shared memory    until 2.13
    HOST:PID:TID [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read                from 2.18: device numbers
    HOST:PID:TID [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0(3)/GDRDMA     through GPU 3

Ranks are those of the communicator, and a line does not name the communicator. A rehearsal opens one after the other,
and ``NcclLog`` divides the log at these moments. Channels of a ring without ``via`` are its order, not connections.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

_CHANNEL = re.compile(r"NCCL INFO (?:Channel|Ring) \d+(?:/\d+)? :(?P<rest>.*)")
_END = r"(\d+)(?:\[[0-9a-f]+\])?"
_CONNECTION = re.compile(rf" *{_END} -> {_END}(?: \[(?:send|receive)\])? via (\S.*?) *")
_ORDER = re.compile(r"[\d ]+|[ \d]+(?:-> *\d+ *){2}")
"""Ranks of a ring in its order, or a rank between its neighbours."""

_VARIABLES = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")


def nccl_paths(text: str) -> dict[tuple[int, int], tuple[str, ...]]:
    """Return the transports from a rank to its peer by a log, ranks of one communicator, in the order of the lines.

    Raises:
        ValueError: the format of a channel's line is unknown.
    """
    paths: dict[tuple[int, int], dict[str, None]] = defaultdict(dict)
    for number, line in enumerate(text.splitlines(), 1):
        channel = _CHANNEL.search(line)
        if channel is None or _ORDER.fullmatch(channel["rest"]):
            continue
        connection = _CONNECTION.fullmatch(channel["rest"])
        if connection is None:
            raise ValueError(f"line {number} of NCCL's log has an unknown format: {line[:200]!r}")
        source, target, transport = connection.groups()
        paths[int(source), int(target)][transport] = None
    return {pair: tuple(transports) for pair, transports in paths.items()}


@dataclass
class NcclLog:
    """NCCL's log of this process in a file, with its size at the beginning of each phase."""

    file: Path
    _phases: list[tuple[str, int]] = field(default_factory=list)

    @classmethod
    def start(cls, file: Path, environment: MutableMapping[str, str]) -> NcclLog | None:
        """Make NCCL log connections to ``file``; None if the user has set any of these variables.

        NCCL reads the variables when it makes its first communicator.
        """
        if any(name in environment for name in _VARIABLES):
            return None
        escaped = str(file).replace("%", "%%")
        environment.update(zip(_VARIABLES, ("INFO", "P2P,SHM,NET", escaped), strict=True))
        return cls(file)

    def begin(self, phase: str) -> None:
        """Attribute the lines from now on to this phase."""
        self._phases.append((phase, self.file.stat().st_size if self.file.exists() else 0))

    def transports(self, phases: Iterable[str]) -> dict[str, str]:
        """Return the transports of each phase that opened connections, joined; a phase of unknown lines is left out."""
        content = self.file.read_bytes() if self.file.exists() else b""
        ends = [start for _, start in self._phases[1:]] + [len(content)]
        wanted, result = set(phases), {}
        for (phase, start), end in zip(self._phases, ends, strict=True):
            if phase not in wanted:
                continue
            try:
                paths = nccl_paths(content[start:end].decode(errors="replace"))
            except ValueError:
                continue
            if paths:
                result[phase] = ", ".join(dict.fromkeys(name for names in paths.values() for name in names))
        return result
