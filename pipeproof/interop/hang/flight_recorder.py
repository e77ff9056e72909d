"""Flight Recorder dumps: the operations of each rank on its communicators, in the order of issue."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, Final

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.foreign_text import MALFORMED, decode_json, open_foreign, open_foreign_text
from pipeproof.interop.hang.hang_codes import UNREADABLE_DUMP
from pipeproof.interop.hang.recorder_names import END_OF_BATCH, WITHOUT_PEER, num_elements, op_of
from pipeproof.interop.json_stream import JsonStream
from pipeproof.state.flex.pickles import ForeignNameError, UnreadablePickleError, unpickled


class State(IntEnum):
    """Progress of an operation."""

    SCHEDULED = 0
    """Issued by the host; the device has not started it."""
    STARTED = 1
    COMPLETED = 2


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: its name, its purpose, and its global ranks in the order of group ranks."""

    name: str
    desc: str
    ranks: tuple[int, ...]

    @property
    def title(self) -> str:
        """Name of the group in messages."""
        return f"group {self.name or '0'}" + (f" ({self.desc})" if self.desc not in ("", "undefined") else "")


@dataclass(frozen=True, slots=True)
class Channel:
    """Messages from one global rank to another in a group, with one tag; the k-th send matches the k-th receive."""

    group: Group
    src: int
    dst: int
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Entry:
    """One operation of one rank.

    ``index`` is its index among the rank's entries, and ``kind`` the recorded
    name. Sends and receives have a ``channel``, and ``number`` is the position
    on that channel; otherwise ``number`` is the group's count of collectives,
    which the collectives of one coalescing block share. Sizes are the shapes of
    all tensors.
    """

    rank: int
    index: int
    kind: str
    group: Group
    number: int
    channel: Channel | None
    batched: bool
    state: State
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    location: Location | None

    @property
    def op(self) -> str:
        """The operation, which several of PyTorch's functions issue."""
        return op_of(self.kind)

    @property
    def is_send(self) -> bool:
        """True at the sending end of a channel."""
        return self.kind == "send"

    @property
    def num_elements(self) -> int:
        """Number of elements of a message or of a collective's input; for an all-gather, of its output."""
        return num_elements(self.op, numel(self.input_sizes), numel(self.output_sizes))

    @property
    def text(self) -> str:
        """``send 0->1 #2`` with global ranks, or ``all_reduce #5``; counted from 0, like micro-batches."""
        if self.channel is None:
            return f"{self.op} #{self.number} of {self.group.title}"
        arrow = f"{self.channel.src}->{self.channel.dst}" if self.is_send else f"{self.channel.dst}<-{self.channel.src}"
        return f"{self.kind} {arrow} #{self.number}"

    @property
    def tensor_text(self) -> str:
        """Shapes and types, for messages."""
        sizes = self.input_sizes or self.output_sizes
        shapes = ", ".join("[" + ", ".join(map(str, size)) + "]" for size in sizes)
        return f"{shapes or 'no tensor'} {'/'.join(dict.fromkeys(self.dtypes))}".rstrip()


@dataclass(frozen=True)
class Launch:
    """Operations that are launched together: one, or all of a batch, which is done when all its operations are."""

    rank: int
    entries: tuple[Entry, ...]
    state: State
    queue: tuple[object, ...]
    """Launches of a rank with the same queue start in the order in which they were issued."""

    @property
    def pending(self) -> bool:
        """True while it is not done."""
        return self.state is not State.COMPLETED

    @property
    def text(self) -> str:
        """The operation, or the first of the batch and how many there are."""
        first = self.entries[0].text
        return first if len(self.entries) == 1 else f"batch of {len(self.entries)} ({first}, ..)"

    @property
    def at(self) -> str:
        """``train.py:11``, the line that issued it; empty where the dump has none."""
        location = self.entries[0].location
        return "" if location is None else f"{location.file}:{location.line}"


@dataclass(frozen=True)
class Dump:
    """Record of one rank; ``whole`` is False where its buffer was too short for all of it."""

    rank: int
    file: str
    version: str
    whole: bool
    launches: tuple[Launch, ...]

    @property
    def last(self) -> Launch | None:
        """The launch that blocks the rank, else the last one; None for a rank that issued nothing."""
        return (self.pending or self.launches[-1:] or (None,))[0]

    @cached_property
    def pending(self) -> tuple[Launch, ...]:
        """Launches that are not done, in the order of issue."""
        return tuple(launch for launch in self.launches if launch.pending)


def numel(sizes: Iterable[Sequence[int]]) -> int:
    """The number of elements of tensors."""
    return sum(prod(size) for size in sizes)


MAX_BYTES: Final = 2**28
"""Largest dump of a rank."""

_MOST_SPACES: Final = 2**12
"""Bytes in which a dump in JSON begins."""

_RANK: Final = re.compile(r"(?P<prefix>.*?)(?P<rank>\d+)(?:\.(?:pkl|pickle|json|bin))?", re.DOTALL)


def files_by_rank(
    directory: Path, pattern: re.Pattern[str], is_one: Callable[[Path], bool] = Path.is_file
) -> dict[int, Path]:
    """Return the file of each rank in a directory, among the names that ``is_one`` accepts.

    Raises:
        PlanFileError: PP930, two files are of one rank, or the directory cannot be read.
    """
    try:
        paths = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
        matches = [(path, match) for path in paths if (match := pattern.fullmatch(path.name)) and is_one(path)]
    except OSError as error:
        raise unreadable_directory(directory, error) from error
    files: dict[int, Path] = {}
    for path, match in matches:
        other = files.setdefault(int(match["rank"]), path)
        if other is not path:
            message = f"`{other.name}` and `{path.name}` are both of rank {int(match['rank'])}"
            raise unreadable_dump(message, str(directory), help="give a directory with the files of one hang")
    return dict(sorted(files.items()))


def _dump_files(directory: Path) -> dict[int, Path]:
    files = files_by_rank(directory, _RANK)
    if not files:
        raise unreadable_dump(
            f"no dump in `{directory}`: the name of each ends with its rank, such as nccl_trace_rank_0",
            str(directory),
            help="set TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_NCCL_DEBUG_INFO_TEMP_FILE=DIR/nccl_trace_rank_ in the run",
        )
    return files


def _read_content(path: Path) -> dict[str, Any]:
    try:
        with open_foreign(path, MAX_BYTES) as stream:
            is_json = stream.read(_MOST_SPACES).lstrip()[:1] == b"{"
        data = _json_content(path) if is_json else unpickled(path, allows=lambda _: False)
    except OSError as error:
        raise unreadable_dump(f"cannot read `{path}`: {error.strerror}", str(path)) from error
    except ForeignNameError as error:
        message = f"`{path}` is not a Flight Recorder dump: it asks for `{error}`, and a dump has plain values only"
        raise unreadable_dump(message, str(path)) from error
    except (UnreadablePickleError, UnicodeDecodeError) as error:
        message = f"`{path}` is not a Flight Recorder dump, or is cut short: {error or type(error).__name__}"
        raise unreadable_dump(message, str(path)) from error
    if not isinstance(data, dict) or "version" not in data:
        raise unreadable_dump(f"`{path}` is not a Flight Recorder dump: it has no version", str(path))
    if isinstance(data.get("entries"), list | tuple):
        data["entries"] = list(map(_without_library_frames, data["entries"]))
    return data


def _json_content(path: Path) -> dict[str, Any]:
    """Read a dump in JSON, entry by entry."""

    def refusal(message: str) -> PlanFileError:
        return unreadable_dump(f"`{path}` is not a Flight Recorder dump, or is cut short: {message}", str(path))

    data: dict[str, Any] = {}
    with open_foreign_text(path) as text:
        stream = JsonStream(text, refusal, MAX_BYTES)
        for key in stream.members():
            is_list = key == "entries" and stream.peek() == "["
            data[key] = list(map(_without_library_frames, stream.items())) if is_list else stream.value()
    return data


def _without_library_frames(entry: Any) -> Any:
    """Return an entry with only its reported frame: frames are most of a dump."""
    if not isinstance(entry, dict) or not isinstance(entry.get("frames"), list | tuple):
        return entry
    return {**entry, "frames": [frame for frame in entry["frames"] if _is_of_user(frame)][:1]}


def unreadable_directory(directory: Path, error: OSError) -> PlanFileError:
    """Return the error for a directory of dumps, stacks or rings that cannot be listed."""
    fix = "name the directory of the job's dumps (from `TORCH_NCCL_DEBUG_INFO_TEMP_FILE`) or rings (from `watch`)"
    return unreadable_dump(f"cannot read `{directory}`: {error.strerror}", str(directory), fix)


def unreadable_dump(message: str, file: str, help: str | None = None) -> PlanFileError:
    """Return the error for a file that cannot be used."""
    return PlanFileError(UNREADABLE_DUMP.finding(message, Location(file), help))


_NAME_AND_DESC: Final = 2
_STATES: Final = {"scheduled": State.SCHEDULED, "started": State.STARTED, "completed": State.COMPLETED}
_P2P: Final = re.compile(r"(?P<kind>send|recv) (?P<a>\d+)(?:->|<-)(?P<b>\d+)")
_FIELDS: Final = (
    "record_id", "process_group", "collective_seq_id", "p2p_seq_id", "profiling_name", "input_sizes", "output_sizes",
    "state", "is_p2p",
)  # fmt: skip
_LIBRARY_CODE: Final = re.compile(r"[/\\](?:torch|site-packages|dist-packages)[/\\]|^<")


def read_dumps(directory: Path) -> tuple[Dump, ...]:
    """Read the dumps in a directory, ordered by rank.

    Raises:
        PlanFileError: PP930, a file cannot be read, or is not a dump of a known version.
    """
    files = _dump_files(directory)
    contents = {rank: _read_content(path) for rank, path in files.items()}
    members_by_group = _members_from_entries(contents)
    return tuple(_dump(rank, path, contents[rank], members_by_group) for rank, path in files.items())


def _members_from_entries(contents: Mapping[int, Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Return the members of each group for dumps that do not list them (gloo's).

    The default group has all ranks, another group the ranks that use it.
    """
    ranks_by_group: dict[str, list[int]] = {}
    for rank, content in contents.items():
        entries = content.get("entries")
        for entry in entries if isinstance(entries, Sequence) else ():
            name_and_desc = entry.get("process_group") if isinstance(entry, Mapping) else None
            if isinstance(name_and_desc, Sequence) and len(name_and_desc) == _NAME_AND_DESC:
                name, is_default = str(name_and_desc[0]), name_and_desc[1] == "default_pg"
                ranks_by_group[name] = list(contents) if is_default else [*ranks_by_group.get(name, []), rank]
    return {name: tuple(sorted(set(ranks))) for name, ranks in ranks_by_group.items()}


def _dump(rank: int, path: Path, data: Mapping[str, Any], members_by_group: Mapping[str, tuple[int, ...]]) -> Dump:
    version = str(data["version"])
    if not re.fullmatch(r"2\.\d+", version):
        raise unreadable_dump(f"`{path}` has version {version} of the format; 2.x is read", str(path))
    reader = _Reader(rank, str(path), _groups(data.get("pg_config"), str(path)), members_by_group, version)
    raw = data.get("entries") or []
    if not isinstance(raw, Sequence) or isinstance(raw, str):
        raise unreadable_dump(f"`{path}`: `entries` is not a list", str(path))
    try:
        launches = tuple(reader.launches(raw))
    except MALFORMED as error:
        raise unreadable_dump(f"`{path}`: an entry has a value of a wrong type: {error}", str(path)) from error
    return Dump(rank, str(path), version, not launches or raw[0]["record_id"] == 0, launches)


def _groups(config: Any, file: str) -> dict[str, Group]:
    if not isinstance(config, Mapping):
        raise unreadable_dump(f"`{file}` has no `pg_config`, the table of the members of each group", file)
    groups = {}
    for name, record in config.items():
        try:
            ranks = record["ranks"]
            members = tuple(int(rank) for rank in (decode_json(ranks) if isinstance(ranks, str) else ranks))
        except MALFORMED as error:
            raise unreadable_dump(f"`{file}`: the ranks of group {name} cannot be read", file) from error
        groups[str(name)] = Group(str(name), str(record.get("desc", "")), members)
    return groups


@dataclass
class _RawEntry:
    """An entry of the file, with the group that it belongs to."""

    index: int
    entry: Mapping[str, Any]
    group: Group
    kind: str
    channel: Channel | None

    @property
    def batch(self) -> tuple[Group, bool, int]:
        """Key that the operations of one batch share."""
        is_p2p = bool(self.entry["is_p2p"])
        return self.group, is_p2p, self.entry["p2p_seq_id" if is_p2p else "collective_seq_id"]


@dataclass
class _Reader:
    """Converts a rank's entries into launches, and counts along its channels."""

    rank: int
    file: str
    groups: Mapping[str, Group]
    members_by_group: Mapping[str, tuple[int, ...]]
    version: str
    counts: defaultdict[tuple[Channel, str], Iterator[int]] = field(default_factory=lambda: defaultdict(count))

    def launches(self, entries: Sequence[Any]) -> list[Launch]:
        """Return the launches in the order of the entries; the entries of a batch are one launch."""
        every = (self._raw(index, entry) for index, entry in enumerate(entries))
        raws = [raw for raw in every if raw.channel is not None or raw.kind not in WITHOUT_PEER]
        closed = {raw.batch: raw for raw in raws if raw.kind == END_OF_BATCH}
        launches: list[Launch] = []
        open_: dict[tuple[Group, bool, int], list[Entry]] = {}
        for raw in raws:
            closing = closed.get(raw.batch)
            if closing is None:
                entry = self._entry(raw, self._state(raw.entry), batched=False)
                launches.append(Launch(self.rank, (entry,), entry.state, _queue(entry)))
            elif raw.kind != END_OF_BATCH:
                entry = self._entry(raw, self._state(closing.entry), batched=True)
                open_.setdefault(raw.batch, []).append(entry)
            elif members := open_.pop(raw.batch, None):
                launches.append(Launch(self.rank, tuple(members), members[0].state, (raw.group, "group")))
        return launches

    def _raw(self, index: int, entry: Any) -> _RawEntry:
        missing = [name for name in _FIELDS if not isinstance(entry, Mapping) or name not in entry]
        if missing:
            raise unreadable_dump(
                f"`{self.file}`: entry {index} has no `{missing[0]}` (version {self.version} of the format)",
                self.file,
                help="write the dumps with a newer PyTorch",
            )
        backend, _, name = str(entry["profiling_name"]).partition(":")
        group = self._group(entry["process_group"])
        if not backend or not name:
            raise unreadable_dump(f"`{self.file}`: entry {index} is named `{entry['profiling_name']}`", self.file)
        match = _P2P.fullmatch(name)
        if match is None:
            return _RawEntry(index, entry, group, name, None)
        ends = int(match["a"]), int(match["b"])
        if max(ends) >= len(group.ranks):
            raise unreadable_dump(f"`{self.file}`: `{name}` names a rank outside of {group.title}", self.file)
        src, dst = ends if match["kind"] == "send" else ends[::-1]
        return _RawEntry(index, entry, group, match["kind"], Channel(group, group.ranks[src], group.ranks[dst]))

    def _group(self, name_and_desc: Any) -> Group:
        name, desc = (str(part) for part in name_and_desc)
        group = self.groups.get(name)
        if group is not None:
            return group
        if "" not in self.groups:
            raise unreadable_dump(f"`{self.file}`: `pg_config` does not have group {name} ({desc})", self.file)
        return Group(name, desc, self.members_by_group[name])

    def _state(self, entry: Mapping[str, Any]) -> State:
        state = _STATES.get(str(entry["state"]))
        if state is None:
            raise unreadable_dump(f"`{self.file}`: `{entry['state']}` is not a state", self.file)
        # Gloo has no events: an operation that is done is only marked as retired.
        is_gloo = str(entry["profiling_name"]).startswith("gloo:")
        return State.COMPLETED if is_gloo and entry.get("retired") else state

    def _entry(self, raw: _RawEntry, state: State, *, batched: bool) -> Entry:
        number = int(raw.entry["collective_seq_id"])
        if raw.channel is not None:
            number = next(self.counts[raw.channel, raw.kind])
        return Entry(
            self.rank, raw.index, raw.kind, raw.group, number, raw.channel, batched, state,
            _sizes(raw.entry["input_sizes"]), _sizes(raw.entry["output_sizes"]),
            tuple(map(str, raw.entry.get("input_dtypes") or raw.entry.get("output_dtypes") or ())),
            _user_location(raw.entry.get("frames") or ()),
        )  # fmt: skip


def _queue(entry: Entry) -> tuple[object, ...]:
    """Return the queue of an entry: unbatched transfers of two ranks have their own communicator and stream."""
    if entry.channel is None:
        return entry.group, "group"
    return entry.group, min(entry.channel.src, entry.channel.dst), max(entry.channel.src, entry.channel.dst)


def _sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(size) for size in shape) for shape in value or ())


def _user_location(frames: Sequence[Mapping[str, Any]]) -> Location | None:
    """Return the innermost line of the user's code."""
    return next((Location(str(frame["filename"]), frame["line"], 1) for frame in frames if _is_of_user(frame)), None)


def _is_of_user(frame: Any) -> bool:
    if not isinstance(frame, Mapping):
        return False
    file, line = str(frame.get("filename", "")), frame.get("line")
    return bool(file) and isinstance(line, int) and line > 0 and not _LIBRARY_CODE.search(file)
