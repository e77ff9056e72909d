"""Opening a checkpoint of any origin, and finding everything that is wrong with its files. Only headers are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pipeproof.diagnostics.finding import Finding
from pipeproof.state.array_files import require_whole
from pipeproof.state.checkpoint import SUFFIX, Checkpoint, StoredShard, require_tiled
from pipeproof.state.read_state import SavedState, find_state
from pipeproof.state.safetensors_header import Header, StoredArray, read_header, require_array
from pipeproof.state.state_codes import StateError, reading
from pipeproof.state.state_index import (
    INDEX_FILE,
    Shard,
    ShardFile,
    StateIndex,
    TensorEntry,
    TensorKind,
    provenance_file,
    read_provenance,
)
from pipeproof.state.state_layout import COUNTERS, MOMENTS, moment_name

_OPEN_INDEX = "model.safetensors.index.json"
"""Index of a model's files in a Hugging Face directory: the file of each tensor."""
_OPEN_FILE = "model.safetensors"
_PICKLES = ("pytorch_model.bin", ".pdparams", "pytorch_model-*.bin")
_FIX = "copy the checkpoint again from where it was saved, or name another one"


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint of any kind at ``path``.

    That is a state or the newest one below ``path``, a safetensors file, a model's directory, or a checkpoint of
    Paddle's or PyTorch's.

    Raises:
        StateError: There is none of these, or it is incomplete, cut short, or contradicts itself.
    """
    opened = _opened(path.parent if path.name in (INDEX_FILE, _OPEN_INDEX) else path)
    odd = next((name for name in opened.tensors if not name.isprintable()), None)
    if odd is not None:
        fix = "no tool writes such names, and a terminal may obey them: take the checkpoint from where it was saved"
        raise StateError(f"{path} has a tensor whose name is not printable: {odd!a}", fix)
    return opened


def _opened(path: Path) -> Checkpoint:
    if path.is_file():
        return _merged(path)
    if not (path / INDEX_FILE).exists():
        if (path / _OPEN_INDEX).exists():
            return _of_many(path)
        if (path / _OPEN_FILE).exists():
            return _merged(path / _OPEN_FILE)
        from pipeproof.state.dcp.dcp_checkpoint import is_dcp, open_dcp
        from pipeproof.state.flex.flex_checkpoint import is_flex, open_flex

        if is_dcp(path):
            return open_dcp(path)

        if is_flex(path):
            return open_flex(path)
    if not path.is_dir() and path.exists():
        fix = "copy it into a file first: tensors are read in any order"
        raise StateError(f"{path} is a pipe or a device, and no file", fix)
    if path.suffix == SUFFIX and not path.exists():
        raise StateError(f"there is no file {path}", "name an existing checkpoint")
    _require_no_other_files(path)
    return _of_state(find_state(path))


def _require_no_other_files(directory: Path) -> None:
    """Report what a model's directory lacks, rather than that there is no state."""
    if (directory / INDEX_FILE).exists():
        return
    if any(directory.glob(f"*{SUFFIX}")):
        fix = f"name one of the files; several that make up a model need the {_OPEN_INDEX} that was saved with them"
        raise StateError(f"{directory} has safetensors files, and no {_OPEN_INDEX}", fix)
    pickles = next((file.name for end in _PICKLES for file in sorted(directory.glob(f"*{end}"))), None)
    if pickles is not None:
        fix = "save it as safetensors with the tool that wrote it: `save_pretrained(.., safe_serialization=True)`"
        raise StateError(f"{directory} has {pickles}, which is no safetensors file", fix)


def _of_state(state: SavedState) -> Checkpoint:
    index = state.index
    files = {state.directory / file.name: file for file in index.files}
    if len(files) != len(index.files):
        raise StateError(f"{state.directory / INDEX_FILE} names a file twice", _FIX)
    return _of_index(state.directory, "state", index, state.directory / INDEX_FILE, files)


def _of_index(
    path: Path, kind: str, index: StateIndex, index_file: Path, files: Mapping[Path, ShardFile]
) -> Checkpoint:
    shards = dict[str, list[StoredShard]]()
    for path_of_file, file in files.items():
        header = _header_of_size(path_of_file, file)
        for shard in file.shards:
            entry = index.tensors.get(shard.tensor)
            if entry is None:
                message = f"{path_of_file} must hold {shard.tensor}, and the index has no tensor of that name"
                raise StateError(message, _FIX)
            if len(shard.extents) != len(entry.shape):
                message = f"{index_file}: the shard of {shard.tensor} in {file.name} has {len(shard.extents)} dims"
                raise StateError(f"{message}, and the tensor {len(entry.shape)}", _FIX)
            key = file.key_of(shard.tensor)
            array = require_array(path_of_file, header, key, entry.dtype, shard.shape, _FIX)
            rank = file.rank if kind == "state" else None
            shards.setdefault(shard.tensor, []).append(StoredShard(shard, path_of_file, key, array.start, rank))
        _require_no_more(path_of_file, header, [file.key_of(shard.tensor) for shard in file.shards])
    return Checkpoint(path, kind, index.tensors, _in_order(shards), files, index)


def _merged(file: Path) -> Checkpoint:
    """Open a file of whole tensors; a provenance file without tensors has but the size and SHA-256."""
    provenance = read_provenance(file)
    entry = None if provenance is None else provenance.files[0]
    if provenance is not None and entry is not None and provenance.tensors:
        return _of_index(file, "merged", provenance, provenance_file(file), {file: entry})
    header = read_header(file) if entry is None else _header_of_size(file, entry)
    tensors = {name: _entry_of(name, array) for name, array in header.arrays.items()}
    shards = {name: (_whole(name, tensors[name], file, array),) for name, array in header.arrays.items()}
    return Checkpoint(file, "merged", tensors, shards, {file: entry}, None)


def _of_many(directory: Path) -> Checkpoint:
    """Open a directory of Hugging Face: its index gives the file of each tensor."""
    file = directory / _OPEN_INDEX
    with reading(file, _FIX):
        content = file.read_bytes()
    try:
        by_name = _weight_map(json.loads(content))
        names_of = dict[str, list[str]]()
        for name, file_name in by_name.items():
            names_of.setdefault(_file_name(file_name), []).append(name)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise StateError(f"{file} is no index of safetensors files: {error}", _FIX) from error
    tensors, shards = dict[str, TensorEntry](), dict[str, tuple[StoredShard, ...]]()
    files = dict[Path, ShardFile | None]()
    for file_name, names in sorted(names_of.items()):
        path = directory / file_name
        provenance, header = read_provenance(path), read_header(path)
        files[path] = None if provenance is None else provenance.files[0]
        for name in names:
            if name not in header.arrays:
                raise StateError(f"{path} must hold {name}, and it is missing", _FIX)
            tensors[name] = _entry_of(name, header.arrays[name])
            shards[name] = (_whole(name, tensors[name], path, header.arrays[name]),)
        _require_no_more(path, header, names)
    return Checkpoint(directory, "merged", tensors, shards, files, None)


def _weight_map(content: dict[str, dict[str, str]]) -> dict[str, str]:
    if "weight_map" not in content:
        raise ValueError("it has no `weight_map`")
    return content["weight_map"]


def _file_name(text: str) -> str:
    if Path(text).name != text or not text.endswith(SUFFIX):
        raise ValueError(f"{text!r} is no name of a safetensors file next to it")
    return text


def _header_of_size(path: Path, file: ShardFile) -> Header:
    header = read_header(path)
    if header.size_bytes != file.size_bytes:
        message = f"{path} has {header.size_bytes} bytes, and {file.size_bytes} in the index"
        raise StateError(message, _FIX)
    return header


def _require_no_more(path: Path, header: Header, names: Iterable[str]) -> None:
    """Refuse arrays that no index lists, because they would be lost silently. Nor may an index list a key twice."""
    names_list = list(names)
    extra = sorted(header.arrays.keys() - set(names_list))
    if extra:
        shown = extra[0] + (f" and {len(extra) - 1} more" if len(extra) > 1 else "")
        raise StateError(f"{path} holds {shown}, which the index does not list", _FIX)
    if len(names_list) > len(header.arrays):
        twice = next(name for name in names_list if names_list.count(name) > 1)
        raise StateError(f"the index has two shards of {twice} in {path}, which holds one", _FIX)


_OPTIMIZER_KINDS: Mapping[str, TensorKind] = {
    **{slot: "moment" for slots in MOMENTS.values() for slot in slots},
    **{slot: "counter" for by_backend in COUNTERS.values() for slots in by_backend.values() for slot in slots},
}


def _entry_of(name: str, array: StoredArray) -> TensorEntry:
    """Return the entry of a tensor that no index describes: by its name an optimizer state of a weight, or a weight."""
    for slot, kind in _OPTIMIZER_KINDS.items():
        weight = name.removeprefix(moment_name("", slot))
        if weight != name:
            return TensorEntry(kind=kind, dtype=array.dtype, shape=array.shape, weight=weight)
    return TensorEntry(kind="weight", dtype=array.dtype, shape=array.shape)


def _whole(name: str, entry: TensorEntry, file: Path, array: StoredArray) -> StoredShard:
    shard = Shard(tensor=name, offsets=(0,) * len(entry.shape), extents=entry.shape)
    return StoredShard(shard, file, name, array.start, None)


def _in_order(shards: Mapping[str, Iterable[StoredShard]]) -> dict[str, tuple[StoredShard, ...]]:
    return {name: tuple(stored) for name, stored in shards.items()}


_HASHED_AT_ONCE = 4
_Check = Callable[[], object]


def file_findings(path: Path) -> tuple[Finding, ...]:
    """Return everything that is wrong with the files of a checkpoint, not only the first fault.

    Files are compared with the index, SHA-256 included, or merged files with their provenance, and the shards of each
    tensor must make it up. Where there is neither, as in checkpoints of other tools, only headers are checked.
    """
    try:
        checkpoint = open_checkpoint(path)
    except StateError as error:
        return _faults_of_state(path) or error.findings
    tiling_checks: list[_Check] = [partial(require_tiled, checkpoint, name) for name in sorted(checkpoint.tensors)]
    crc_checks = _crc_checks(checkpoint)
    whole_file_checks = _whole_file_checks(checkpoint.files, checkpoint.tensors)
    return _faults([*whole_file_checks, *crc_checks, *tiling_checks])


def _crc_checks(checkpoint: Checkpoint) -> list[_Check]:
    from pipeproof.state.dcp.dcp_checkpoint import require_crc

    tensors = checkpoint.tensors
    return [partial(require_crc, held, tensors[held.shard.tensor].dtype, crc) for held, crc in checkpoint.crcs.items()]


def require_crcs(checkpoint: Checkpoint) -> None:
    """Check the content of all shards that have a CRC-32 in their files.

    Raises:
        StateError: One was changed, or cannot be read.
    """
    faults = _faults(_crc_checks(checkpoint))
    if faults:
        error = StateError(faults[0].message, _FIX)
        error.findings = faults
        raise error


def num_checksummed(checkpoint: Checkpoint) -> int:
    """Return the number of files that have a SHA-256 or CRCs to compare with."""
    if checkpoint.crcs:
        return len(checkpoint.files)
    return sum(map(checkpoint.has_sha256, checkpoint.files))


def _faults_of_state(path: Path) -> tuple[Finding, ...]:
    """Return the faults of all files of a state; opening ends at the first one."""
    try:
        state = find_state(path)
    except StateError:
        return ()
    return _faults(
        _whole_file_checks({state.directory / file.name: file for file in state.index.files}, state.index.tensors)
    )


def _whole_file_checks(files: Mapping[Path, ShardFile | None], tensors: Mapping[str, TensorEntry]) -> list[_Check]:
    return [partial(require_whole, path, file, tensors) for path, file in files.items() if file is not None]


def _faults(checks: Iterable[_Check]) -> tuple[Finding, ...]:
    """Return the findings in the order of the checks; hashing lets other threads run."""

    def found(check: _Check) -> tuple[Finding, ...]:
        try:
            check()
        except StateError as error:
            return error.findings
        return ()

    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        return tuple(finding for findings in pool.map(found, checks) for finding in findings)
