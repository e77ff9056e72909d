"""Dumps of all ranks as operations, with global ranks and places on their channels.

Fields are those of torch/csrc/distributed/c10d/FlightRecorder.hpp (versions 2.x
of the format). Operations of a batch are recorded one by one, with one sequence
number, and closed by an entry ``coalesced``, whose state is that of all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeproof.interop.hang.files import dump_files, read_content, refused
from pipeproof.interop.hang.records import Channel, Dump, Entry, Group, State, Unit
from pipeproof.specs.finding import Location

_NAME_AND_DESC: Final = 2
_STATES: Final = {"scheduled": State.SCHEDULED, "started": State.STARTED, "completed": State.COMPLETED}
_P2P: Final = re.compile(r"(?P<kind>send|recv) (?P<a>\d+)(?:->|<-)(?P<b>\d+)")
_FIELDS: Final = (
    "record_id", "process_group", "collective_seq_id", "p2p_seq_id", "profiling_name", "input_sizes", "output_sizes",
    "state", "is_p2p",
)  # fmt: skip
_OWN_CODE: Final = re.compile(r"[/\\](?:torch|site-packages|dist-packages)[/\\]|^<")


def read_dumps(directory: Path) -> tuple[Dump, ...]:
    """The dumps in a directory, by rank.

    Raises:
        PlanFileError: PP930, a file cannot be read, or is no dump of a version that is known.
    """
    files = dump_files(directory)
    contents = {rank: read_content(path) for rank, path in files.items()}
    users = _users(contents)
    return tuple(_dump(rank, path, contents[rank], users) for rank, path in files.items())


def _users(contents: Mapping[int, Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """For dumps that do not say who is in a group, as gloo's: all ranks for the default one, else those that use it."""
    found: dict[str, list[int]] = {}
    for rank, content in contents.items():
        entries = content.get("entries")
        for entry in entries if isinstance(entries, Sequence) else ():
            named = entry.get("process_group") if isinstance(entry, Mapping) else None
            if isinstance(named, Sequence) and len(named) == _NAME_AND_DESC:
                is_default = named[1] == "default_pg"
                found[str(named[0])] = list(contents) if is_default else [*found.get(str(named[0]), []), rank]
    return {name: tuple(sorted(set(ranks))) for name, ranks in found.items()}


def _dump(rank: int, path: Path, data: Mapping[str, Any], users: Mapping[str, tuple[int, ...]]) -> Dump:
    version = str(data["version"])
    if not re.fullmatch(r"2\.\d+", version):
        raise refused(f"`{path}` has version {version} of the format; 2.x is read", str(path))
    reader = _Reader(rank, str(path), _groups(data.get("pg_config"), str(path)), users, version)
    raw = data.get("entries") or []
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise refused(f"`{path}`: `entries` is no list", str(path))
    try:
        units = tuple(reader.units(raw))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise refused(f"`{path}`: an entry has a value of another type than dumps have: {error}", str(path)) from error
    return Dump(rank, str(path), version, not units or raw[0]["record_id"] == 0, units)


def _groups(config: Any, file: str) -> dict[str, Group]:
    if not isinstance(config, Mapping):
        raise refused(f"`{file}` has no `pg_config`, which says who is in which group", file)
    found = {}
    for name, about in config.items():
        try:
            ranks = about["ranks"]
            members = tuple(int(rank) for rank in (json.loads(ranks) if isinstance(ranks, str) else ranks))
        except (TypeError, KeyError, ValueError) as error:
            raise refused(f"`{file}`: the ranks of group {name} cannot be read", file) from error
        found[str(name)] = Group(str(name), str(about.get("desc", "")), members)
    return found


@dataclass
class _Raw:
    """An entry of the file, with the group that it belongs to."""

    index: int
    entry: Mapping[str, Any]
    group: Group
    kind: str
    channel: Channel | None

    @property
    def batch(self) -> tuple[Group, bool, int]:
        """What operations of one batch have in common."""
        is_p2p = bool(self.entry["is_p2p"])
        return self.group, is_p2p, self.entry["p2p_seq_id" if is_p2p else "collective_seq_id"]


class _Reader:
    """Turns a rank's entries into units, and counts along its channels."""

    def __init__(
        self, rank: int, file: str, groups: Mapping[str, Group], users: Mapping[str, tuple[int, ...]], version: str
    ) -> None:
        self._rank = rank
        self._file = file
        self._groups = groups
        self._users = users
        self._version = version
        self._counts: dict[tuple[Channel, str], int] = {}

    def units(self, entries: Sequence[Any]) -> list[Unit]:
        """The entries in order; those of a batch as one."""
        raws = [self._raw(index, entry) for index, entry in enumerate(entries)]
        closed = {raw.batch: raw for raw in raws if raw.kind == "coalesced"}
        found: list[Unit] = []
        open_: dict[tuple[Group, bool, int], list[Entry]] = {}
        for raw in raws:
            closing = closed.get(raw.batch)
            if closing is None:
                entry = self._entry(raw, self._state(raw.entry), batched=False)
                found.append(Unit(self._rank, (entry,), entry.state, _queue(entry)))
            elif raw.kind != "coalesced":
                entry = self._entry(raw, self._state(closing.entry), batched=True)
                open_.setdefault(raw.batch, []).append(entry)
            elif members := open_.pop(raw.batch, None):
                found.append(Unit(self._rank, tuple(members), members[0].state, (raw.group, "group")))
        return found

    def _raw(self, index: int, entry: Any) -> _Raw:
        missing = [name for name in _FIELDS if not isinstance(entry, Mapping) or name not in entry]
        if missing:
            raise refused(
                f"`{self._file}`: entry {index} has no `{missing[0]}` (version {self._version} of the format)",
                self._file,
                help="write the dumps with a newer PyTorch",
            )
        backend, _, name = str(entry["profiling_name"]).partition(":")
        group = self._group(entry["process_group"])
        if not backend or not name:
            raise refused(f"`{self._file}`: entry {index} is named `{entry['profiling_name']}`", self._file)
        match = _P2P.fullmatch(name)
        if match is None:
            return _Raw(index, entry, group, name, None)
        ends = int(match["a"]), int(match["b"])
        if max(ends) >= len(group.ranks):
            raise refused(f"`{self._file}`: `{name}` names a rank outside of {group.title}", self._file)
        src, dst = ends if match["kind"] == "send" else ends[::-1]
        return _Raw(index, entry, group, match["kind"], Channel(group, group.ranks[src], group.ranks[dst]))

    def _group(self, named: Any) -> Group:
        name, desc = (str(part) for part in named)
        group = self._groups.get(name)
        if group is not None:
            return group
        if "" not in self._groups:
            raise refused(f"`{self._file}`: `pg_config` does not have group {name} ({desc})", self._file)
        return Group(name, desc, self._users[name])

    def _state(self, entry: Mapping[str, Any]) -> State:
        state = _STATES.get(str(entry["state"]))
        if state is None:
            raise refused(f"`{self._file}`: `{entry['state']}` is no state", self._file)
        # Gloo has no events: an operation that is done is only taken off the list.
        is_gloo = str(entry["profiling_name"]).startswith("gloo:")
        return State.COMPLETED if is_gloo and entry.get("retired") else state

    def _entry(self, raw: _Raw, state: State, *, batched: bool) -> Entry:
        number = int(raw.entry["collective_seq_id"])
        if raw.channel is not None:
            key = (raw.channel, raw.kind)
            number = self._counts.get(key, 0)
            self._counts[key] = number + 1
        return Entry(
            self._rank, raw.index, raw.kind, raw.group, number, raw.channel, batched, state,
            _sizes(raw.entry["input_sizes"]), _sizes(raw.entry["output_sizes"]),
            tuple(map(str, raw.entry.get("input_dtypes") or raw.entry.get("output_dtypes") or ())),
            _place(raw.entry.get("frames") or ()),
        )  # fmt: skip


def _queue(entry: Entry) -> tuple[object, ...]:
    """Unbatched transfers between two ranks have a communicator, and so a stream, for the pair of them."""
    if entry.channel is None:
        return entry.group, "group"
    return entry.group, min(entry.channel.src, entry.channel.dst), max(entry.channel.src, entry.channel.dst)


def _sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(size) for size in shape) for shape in value or ())


def _place(frames: Sequence[Mapping[str, Any]]) -> Location | None:
    """The innermost line of the user's own code."""
    for frame in frames:
        file, line = str(frame.get("filename", "")), frame.get("line")
        if file and isinstance(line, int) and line > 0 and not _OWN_CODE.search(file):
            return Location(file, line, 1)
    return None
