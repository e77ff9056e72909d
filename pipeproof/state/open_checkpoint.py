"""Opening a checkpoint of any origin, and finding all faults of its files. Only headers are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from pipeproof.diagnostics.finding import Finding
from pipeproof.foreign_text import MALFORMED, decode_json, read_foreign
from pipeproof.state.byte_ranges import require_whole
from pipeproof.state.checkpoint import FIX, SUFFIX, Checkpoint, HeldShard, require_tiled
from pipeproof.state.read_state import SavedState, checkpoint_of_index, find_state, header_of_size, require_no_more
from pipeproof.state.safetensors_header import StoredArray, read_header
from pipeproof.state.state_codes import StateError, is_file_name, reading
from pipeproof.state.state_index import (
    INDEX_FILE,
    MAX_BYTES,
    Shard,
    ShardFile,
    TensorEntry,
    TensorKind,
    read_provenance,
)
from pipeproof.state.state_layout import COUNTERS, MOMENTS, moment_name

OPEN_INDEX = "model.safetensors.index.json"
"""Index of a model's files in a Hugging Face directory: the file of each tensor."""
_OPEN_FILE = "model.safetensors"
_PICKLES = ("pytorch_model.bin", ".pdparams", "pytorch_model-*.bin")


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint of any kind at ``path``.

    That is a state or the newest one below ``path``, a safetensors file, a model's directory, or a checkpoint of
    Paddle's or PyTorch's.

    Raises:
        StateError: There is none of these, or it is incomplete, cut short, or contradicts itself.
    """
    opened = _opened(path.parent if path.name in (INDEX_FILE, OPEN_INDEX) else path)
    odd = next((name for name in opened.tensors if not name.isprintable()), None)
    if odd is not None:
        fix = "no tool writes such names, and a terminal may obey them: take the checkpoint from where it was saved"
        raise StateError(f"{path} has a tensor whose name is not printable: {odd!a}", fix)
    return opened


def _opened(path: Path) -> Checkpoint:
    if path.is_file():
        return _merged(path)
    if not (path / INDEX_FILE).exists():
        from pipeproof.state.flex.unified import is_unified, open_unified

        if is_unified(path):
            return open_unified(path, open_indexed)
        if (path / OPEN_INDEX).exists():
            return open_indexed(path, OPEN_INDEX)
        if (path / _OPEN_FILE).exists():
            return _merged(path / _OPEN_FILE)
        from pipeproof.state.dcp.dcp_checkpoint import is_dcp, open_dcp
        from pipeproof.state.flex.flex_metadata import is_flex, open_flex

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
    """Report missing files of a model's directory, rather than a missing state."""
    if (directory / INDEX_FILE).exists():
        return
    if any(directory.glob(f"*{SUFFIX}")):
        fix = f"name one of the files; several that make up a model need the {OPEN_INDEX} that was saved with them"
        raise StateError(f"{directory} has safetensors files, and no {OPEN_INDEX}", fix)
    pickles = next((file.name for end in _PICKLES for file in sorted(directory.glob(f"*{end}"))), None)
    if pickles is not None:
        fix = "save it as safetensors with the tool that wrote it: `save_pretrained(.., safe_serialization=True)`"
        raise StateError(f"{directory} has {pickles}, which is not a safetensors file", fix)


def _of_state(state: SavedState) -> Checkpoint:
    if len(state.files) != len(state.index.files):
        raise StateError(f"{state.directory / INDEX_FILE} names a file twice", FIX)
    return checkpoint_of_index(state.directory, "state", state.index, state.files)


def _merged(file: Path) -> Checkpoint:
    provenance = read_provenance(file)
    if provenance is not None and provenance.tensors:
        return checkpoint_of_index(file, "merged", provenance, {file: provenance.files[0]})
    return _of_whole_tensors(file, {file: None})


def _of_whole_tensors(path: Path, names_of: Mapping[Path, list[str] | None]) -> Checkpoint:
    """Open files of whole tensors; ``names_of`` has the tensors of each file that an index lists, None for all."""
    tensors, shards = dict[str, TensorEntry](), dict[str, tuple[HeldShard, ...]]()
    files = dict[Path, ShardFile | None]()
    for file, names in names_of.items():
        provenance = read_provenance(file)
        files[file] = entry = None if provenance is None else provenance.files[0]
        header = read_header(file) if entry is None else header_of_size(file, entry, is_merged=True)
        for name in header.arrays if names is None else names:
            if name not in header.arrays:
                raise StateError(f"{file} must hold {name}, and it is missing", FIX)
            tensors[name] = _entry_of(name, header.arrays[name])
            shards[name] = (_whole(name, tensors[name], file, header.arrays[name]),)
        if names is not None:
            require_no_more(file, header, names)
    return Checkpoint(path, "merged", tensors, shards, files, None)


def open_indexed(directory: Path, index: str) -> Checkpoint:
    """Open files of whole tensors in a directory; ``index`` gives the file of each, as Hugging Face's does.

    Raises:
        StateError: The index or a file is damaged, or they contradict each other.
    """
    file = directory / index
    with reading(file, FIX):
        content = read_foreign(file, MAX_BYTES)
    try:
        names_of = dict[str, list[str]]()
        for name, file_name in _weight_map(decode_json(content)).items():
            names_of.setdefault(_file_name(file_name), []).append(name)
    except MALFORMED as error:
        raise StateError(f"{file} is not an index of safetensors files: {error}", FIX) from error
    return _of_whole_tensors(directory, {directory / name: names for name, names in sorted(names_of.items())})


def _weight_map(content: dict[str, dict[str, str]]) -> dict[str, str]:
    if "weight_map" not in content:
        raise ValueError("it has no `weight_map`")
    return content["weight_map"]


def _file_name(text: str) -> str:
    if not is_file_name(text) or not text.endswith(SUFFIX):
        raise ValueError(f"{text!r} does not name a safetensors file next to it")
    return text


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


def _whole(name: str, entry: TensorEntry, file: Path, array: StoredArray) -> HeldShard:
    return HeldShard(Shard(tensor=name, offsets=(0,) * len(entry.shape), extents=entry.shape), None, file, array.start)


_HASHED_AT_ONCE = 4
_Check = Callable[[], object]


def file_findings(path: Path) -> tuple[Finding, ...]:
    """Return all faults of a checkpoint's files, not only the first.

    Files are compared with the index, SHA-256 included, or merged files with their provenance, and the shards of each
    tensor must make it up. Without both, as in checkpoints of other tools, only headers are checked.
    """
    try:
        checkpoint = open_checkpoint(path)
    except StateError as error:
        return _faults_of_state(path) or error.findings
    tiling_checks = (partial(require_tiled, checkpoint, name) for name in sorted(checkpoint.tensors))
    whole_file_checks = _whole_file_checks(checkpoint.files, checkpoint.tensors)
    return _faults([*whole_file_checks, *_archive_checks(checkpoint), *tiling_checks])


def _archive_checks(checkpoint: Checkpoint) -> list[_Check]:
    from pipeproof.state.dcp.dcp_checkpoint import require_loaded

    shards = (held for of_tensor in checkpoint.shards.values() for held in of_tensor)
    return [partial(require_loaded, held) for held in shards if held.archive is not None]


def num_checksummed(checkpoint: Checkpoint) -> int:
    """Return the number of files that have a SHA-256 or CRCs to compare with."""
    if checkpoint.kind == "dcp":
        return len(checkpoint.files)
    return sum(map(checkpoint.has_sha256, checkpoint.files))


def _faults_of_state(path: Path) -> tuple[Finding, ...]:
    """Return the faults of all files of a state; opening ends at the first one."""
    try:
        state = find_state(path)
    except StateError:
        return ()
    return _faults(_whole_file_checks(state.files, state.index.tensors))


def _whole_file_checks(files: Mapping[Path, ShardFile | None], tensors: Mapping[str, TensorEntry]) -> list[_Check]:
    return [partial(require_whole, path, file, tensors) for path, file in files.items() if file is not None]


def _faults(checks: Iterable[_Check]) -> tuple[Finding, ...]:
    """Return the findings in the order of the checks; hashing lets other threads run."""

    def findings_of(check: _Check) -> tuple[Finding, ...]:
        try:
            check()
        except StateError as error:
            return error.findings
        return ()

    with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
        return tuple(finding for findings in pool.map(findings_of, checks) for finding in findings)
