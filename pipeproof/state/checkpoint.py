"""Arrays on disk, of whatever origin: what there is, and where each part of each tensor stands. It reads headers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from pipeproof.state.codes import StateError, reading
from pipeproof.state.header import Header, StoredArray, read_header, require_array
from pipeproof.state.index import INDEX_FILE, Shard, ShardFile, StateIndex, TensorEntry, parse_index
from pipeproof.state.load import SavedState, find_state
from pipeproof.state.seal import seal_in

SUFFIX = ".safetensors"
INDEX_KEY = "pipeproof_state"
"""Under which a merged file's metadata has the index of the state that it holds."""
_OPEN_INDEX = "model.safetensors.index.json"
"""Beside the files of a model, in the directories of Hugging Face; it has by tensor the file."""
_OPEN_FILE = "model.safetensors"
_PICKLES = ("pytorch_model.bin", ".pdparams", "pytorch_model-*.bin")
_MEND = "copy the checkpoint anew from where it was saved, or name another one"


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Which part of which tensor stands where. ``start`` is the byte of the file where its first element is."""

    shard: Shard
    file: Path
    key: str
    """Its name in that file."""
    start: int
    rank: int | None
    """Who wrote it, where that is known."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a person named, opened."""

    place: Path
    kind: str
    """``state``, ``merged`` (whole tensors in one file or some) or ``flex`` (Paddle's)."""
    tensors: Mapping[str, TensorEntry]
    """Whole tensors by name."""
    parts: Mapping[str, tuple[StoredPart, ...]]
    """By tensor."""
    files: Mapping[Path, ShardFile | None]
    """Every file, and what the index says of it, where there is one."""
    index: StateIndex | None
    """Of a state; of a merged file the one that its metadata has, if any."""
    seals: Mapping[Path, str] = field(default_factory=lambda: MappingProxyType({}))
    """By file the SHA-256 that it has of itself, see ``seal``: of merged files that were written here."""

    def has_sha256(self, file: Path) -> bool:
        """Whether there is anything to hold the content of a file against."""
        return self.files[file] is not None or file in self.seals


def open_checkpoint(place: Path) -> Checkpoint:
    """A state or the newest below ``place``, a safetensors file, a model's directory, or Paddle's checkpoint.

    Raises:
        StateError: nothing of these is there, or it is incomplete, cut short, or says two things.
    """
    opened = _opened(place.parent if place.name in (INDEX_FILE, _OPEN_INDEX) else place)
    odd = next((name for name in opened.tensors if not name.isprintable()), None)
    if odd is not None:
        mend = "no tool writes such names, and a terminal may obey them: take the checkpoint from where it was saved"
        raise StateError(f"{place} has a tensor whose name is not printable: {odd!a}", mend)
    return opened


def _opened(place: Path) -> Checkpoint:
    if place.is_file():
        return _merged(place)
    if not (place / INDEX_FILE).exists():
        if (place / _OPEN_INDEX).exists():
            return _of_many(place)
        if (place / _OPEN_FILE).exists():
            return _merged(place / _OPEN_FILE)
        from pipeproof.state.flex import is_flex, open_flex

        if is_flex(place):
            return open_flex(place)
    if not place.is_dir() and place.exists():
        mend = "copy it into a file first: tensors are read from wherever they stand in it"
        raise StateError(f"{place} is a pipe or a device, and no file", mend)
    if place.suffix == SUFFIX and not place.exists():
        raise StateError(f"there is no file {place}", "name a checkpoint that is there")
    _require_no_other_files(place)
    return _of_state(find_state(place))


def _require_no_other_files(place: Path) -> None:
    """Say what is missing of a model's directory, in place of that there is no state."""
    if (place / INDEX_FILE).exists():
        return
    if any(place.glob(f"*{SUFFIX}")):
        mend = f"name one of the files; several that make up a model need the {_OPEN_INDEX} that was saved with them"
        raise StateError(f"{place} has safetensors files, and no {_OPEN_INDEX}", mend)
    pickles = next((file.name for end in _PICKLES for file in sorted(place.glob(f"*{end}"))), None)
    if pickles is not None:
        mend = "save it as safetensors with the tool that wrote it: `save_pretrained(.., safe_serialization=True)`"
        raise StateError(f"{place} has {pickles}, which is no safetensors file", mend)


def _of_state(state: SavedState) -> Checkpoint:
    index, parts = state.index, dict[str, list[StoredPart]]()
    index_file = state.directory / INDEX_FILE
    files = {state.directory / file.name: file for file in index.files}
    if len(files) != len(index.files):
        raise StateError(f"{index_file} names a file twice", _MEND)
    for path, file in files.items():
        header = _header_of_size(path, file)
        for shard in file.shards:
            entry = index.tensors.get(shard.tensor)
            if entry is None:
                raise StateError(f"{path} is to hold {shard.tensor}, and the index has no tensor of that name", _MEND)
            if len(shard.extents) != len(entry.shape):
                message = f"{index_file}: the part of {shard.tensor} in {file.name} has {len(shard.extents)} dims"
                raise StateError(f"{message}, and the tensor {len(entry.shape)}", _MEND)
            key = file.key_of(shard.tensor)
            array = require_array(path, header, key, entry.dtype, shard.shape, _MEND)
            parts.setdefault(shard.tensor, []).append(StoredPart(shard, path, key, array.start, file.rank))
        _require_no_more(path, header, [file.key_of(shard.tensor) for shard in file.shards])
    return Checkpoint(state.directory, "state", index.tensors, _in_order(parts), files, index)


def _merged(file: Path) -> Checkpoint:
    header = read_header(file)
    tensors = {name: _weight(array) for name, array in header.arrays.items()}
    index = None
    if INDEX_KEY in header.metadata:
        index = parse_index(header.metadata[INDEX_KEY], f"`{INDEX_KEY}` in the metadata of {file}", _MEND)
        for name, entry in index.tensors.items():
            require_array(file, header, name, entry.dtype, entry.shape, _MEND)
        _require_no_more(file, header, index.tensors)
        tensors = dict(index.tensors)
    parts = {name: (_whole(name, entry, file, header.arrays[name]),) for name, entry in tensors.items()}
    return Checkpoint(file, "merged", tensors, parts, {file: None}, index, _seals({file: header}))


def _of_many(place: Path) -> Checkpoint:
    """A directory as Hugging Face has it: the index gives for each tensor its file."""
    file = place / _OPEN_INDEX
    with reading(file, _MEND):
        content = file.read_bytes()
    try:
        by_name = _weight_map(json.loads(content))
        names_of = dict[str, list[str]]()
        for name, file_name in by_name.items():
            names_of.setdefault(_file_name(file_name), []).append(name)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"{file} is no index of safetensors files: {error}", _MEND) from error
    tensors, parts = dict[str, TensorEntry](), dict[str, tuple[StoredPart, ...]]()
    headers = dict[Path, Header]()
    for file_name, names in sorted(names_of.items()):
        path = place / file_name
        header = headers[path] = read_header(path)
        for name in names:
            if name not in header.arrays:
                raise StateError(f"{path} is to hold {name}, and it is not there", _MEND)
            tensors[name] = _weight(header.arrays[name])
            parts[name] = (_whole(name, tensors[name], path, header.arrays[name]),)
        _require_no_more(path, header, names)
    return Checkpoint(place, "merged", tensors, parts, dict.fromkeys(headers), None, _seals(headers))


def _seals(headers: Mapping[Path, Header]) -> dict[Path, str]:
    found = {path: seal_in(header.metadata, path) for path, header in headers.items()}
    return {path: seal for path, seal in found.items() if seal is not None}


def _weight_map(content: dict[str, dict[str, str]]) -> dict[str, str]:
    if "weight_map" not in content:
        raise ValueError("it has no `weight_map`")
    return content["weight_map"]


def _file_name(text: str) -> str:
    if Path(text).name != text or not text.endswith(SUFFIX):
        raise ValueError(f"{text!r} is no name of a safetensors file beside it")
    return text


def _header_of_size(path: Path, file: ShardFile) -> Header:
    header = read_header(path)
    if header.size_bytes != file.size_bytes:
        message = f"{path} has {header.size_bytes} bytes, and the index says {file.size_bytes}"
        raise StateError(message, _MEND)
    return header


def _require_no_more(path: Path, header: Header, names: Iterable[str]) -> None:
    """Refuse what no index speaks of: it would be lost without a word. Nor may an index speak of one key twice."""
    listed = list(names)
    more = sorted(header.arrays.keys() - set(listed))
    if more:
        shown = more[0] + (f" and {len(more) - 1} more" if len(more) > 1 else "")
        raise StateError(f"{path} holds {shown}, and the index does not say so", _MEND)
    if len(listed) > len(header.arrays):
        twice = next(name for name in listed if listed.count(name) > 1)
        raise StateError(f"the index has two parts of {twice} in {path}, which holds one", _MEND)


def _weight(array: StoredArray) -> TensorEntry:
    """What a tensor is that nobody says anything of."""
    return TensorEntry(kind="weight", dtype=array.dtype, shape=array.shape)


def _whole(name: str, entry: TensorEntry, file: Path, array: StoredArray) -> StoredPart:
    shard = Shard(tensor=name, offsets=(0,) * len(entry.shape), extents=entry.shape)
    return StoredPart(shard, file, name, array.start, None)


def _in_order(parts: Mapping[str, Iterable[StoredPart]]) -> dict[str, tuple[StoredPart, ...]]:
    return {name: tuple(of_one) for name, of_one in parts.items()}
