"""Stages of a model, written as the directory of Hugging Face that ``model.save_pretrained`` would write.

The files are planned from names, shapes and types of all ranks, with the library's own functions on tensors without
elements. Then each rank writes the elements of its own stages at their position, a block of the model at a time, so
that no rank has the whole model.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.dcp_files import Ranks
from pipeproof.exec.train.torch.dcp_state import require_equal_copies
from pipeproof.exec.train.torch.model_names import HeldTensor, model_names, outline_of
from pipeproof.exec.train.torch.pretrained_load import INDEX, WEIGHTS, known_tensors, models_of, whole_model
from pipeproof.state.safetensors_header import Header, make_header
from pipeproof.system_calls import sync

if TYPE_CHECKING:
    from pipeproof.exec.train.torch.pipeline import Pipeline

_Tensors = dict[str, torch.Tensor]


def save_pretrained(
    pipe: Pipeline | Mapping[int, nn.Module],
    directory: str | Path,
    *,
    max_shard_size: int | str | None = None,
    group: Any = None,
) -> None:
    """Write the weights of all stages as ``model.save_pretrained`` would: the same files with the same bytes.

    ``pipe`` is a ``Pipeline`` of stages of ``stages_of_transformers``, or the stages of this rank. Every rank of
    ``group`` calls it, with one file system. Of several ranks with a stage, one writes it; shards of ``fully_shard``
    are gathered one tensor at a time. ``max_shard_size`` is the library's, such as ``"5GB"``. Other files of the
    directory stay; weights that were in it are replaced when all new ones are written.

    Raises:
        PipelineError: on all ranks: a stage is missing, copies of a weight differ, or a file cannot be written.
    """
    stages = pipe if isinstance(pipe, Mapping) else pipe.stages
    ranks, path = Ranks(group), Path(directory).absolute()
    models = ranks.together(partial(models_of, dict(stages), ranks))
    whole = ranks.together(partial(whole_model, models))
    held = ranks.together(partial(known_tensors, whole, stages))
    owner = _owners(ranks, whole, held)
    tables = ranks.gather({entry.name: (tuple(entry.value.shape), entry.value.dtype) for entry in held})
    files = ranks.together(partial(_planned_files, whole, tables, max_shard_size))
    part = path / ".save_pretrained.part"
    ranks.together(lambda: None if ranks.rank else _begin(whole, files, part))
    own = [entry for entry in held if owner[entry.name][0] == entry.stage and entry.name in files.state]
    writes = {entry.name for entry in own if owner[entry.name][1] == ranks.rank}
    written = ranks.gather(ranks.together(partial(_write, whole, own, writes, files, part)))
    ranks.together(lambda: None if ranks.rank else _finish(files, written, part, path))


def _owners(ranks: Ranks, whole: Any, held: Sequence[HeldTensor]) -> dict[str, tuple[int, int]]:
    """The stage that each tensor is written from, and the rank that writes it: the first ones that have it."""
    outlines = ranks.gather(outline_of(held))
    owner, locations = dict[str, tuple[int, int]](), dict[str, set[tuple[int, str]]]()
    for rank, (names_by_stage, _) in enumerate(outlines):
        for stage, names in names_by_stage.items():
            for name in names:
                owner[name] = min((stage, rank), owner.get(name, (stage, rank)))
                locations.setdefault(whole.all_tied_weights_keys.get(name, name), set()).add((stage, name))
    model = ranks.together(partial(model_names, outlines, [sorted(same) for same in locations.values()], "model"))
    ranks.together(partial(require_equal_copies, ranks, held, model))
    return owner


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of a directory: headers by name, the file of each tensor, and the index if there are several files.

    ``state`` has the names of the model's tensors that are saved, and ``dtype`` is the model's.
    """

    state: frozenset[str]
    headers: Mapping[str, tuple[bytes, Header]]
    file_of: Mapping[str, str]
    index: str | None
    dtype: torch.dtype


def _planned_files(
    whole: Any, tables: Sequence[Mapping[str, tuple[tuple[int, ...], torch.dtype]]], max_shard_size: int | str | None
) -> _Files:
    """Plan the files as ``save_pretrained`` of the library does."""
    from huggingface_hub import split_state_dict_into_shards_factory
    from transformers.core_model_loading import revert_weight_conversion

    all_of = {name: entry for table in tables for name, entry in table.items()}
    state = _Tensors()
    for name in whole.state_dict():
        if whole.all_tied_weights_keys.get(name) in all_of or name in whole._keys_to_ignore_on_save:  # noqa: SLF001
            continue
        if name not in all_of:
            raise PipelineError(
                f"no rank has {name} of {type(whole).__name__}: save all stages, on the ranks of one group"
            )
        shape, dtype = all_of[name]
        state[name] = torch.empty(shape, dtype=dtype, device="meta")
    stored = revert_weight_conversion(whole, state)
    default = signature(type(whole).save_pretrained).parameters["max_shard_size"].default
    split = split_state_dict_into_shards_factory(
        stored,
        get_storage_size=lambda x: x.untyped_storage().nbytes(),
        get_storage_id=lambda x: x.untyped_storage()._cdata,  # noqa: SLF001 - parts of one storage stay in one file
        filename_pattern=WEIGHTS.replace(".", "{suffix}.", 1),
        max_shard_size=default if max_shard_size is None else max_shard_size,
    )
    try:
        headers = {
            file: make_header({name: _form(stored[name]) for name in names}, {"format": "pt"})
            for file, names in split.filename_to_tensors.items()
        }
    except KeyError as error:
        raise PipelineError(f"safetensors have no type {error.args[0]}") from None
    index = None
    if split.is_sharded:
        metadata = {"total_parameters": whole.num_parameters(), **split.metadata}
        index = json.dumps({"metadata": metadata, "weight_map": split.tensor_to_filename}, indent=2, sort_keys=True)
    first = next(name for name, weight in whole.named_parameters() if weight.is_floating_point())
    return _Files(frozenset(state), headers, split.tensor_to_filename, index, all_of[first][1])


def _form(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PipelineError(
            f"{path} cannot be written: {error.strerror}: all ranks need this directory on one file system, with space"
        ) from error


def _begin(whole: Any, files: _Files, part: Path) -> None:
    """Write configurations as the library does, and headers of files that have their sizes."""
    from transformers.utils import logging

    with _writing(part):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        shows_progress = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        whole.to(files.dtype).save_pretrained(part, state_dict={})
        if shows_progress:
            logging.enable_progress_bar()
        for name, (first, header) in files.headers.items():
            with (part / name).open("wb") as file:
                file.write(first)
                file.truncate(header.size_bytes)
        if files.index is not None:
            (part / INDEX).write_text(files.index + "\n", encoding="utf-8")


_BLOCK = re.compile(r".*?\.\d+(?=\.)")
"""The name of a block in the name of its tensor."""


def _write(whole: Any, own: Sequence[HeldTensor], writes: set[str], files: _Files, part: Path) -> list[str]:
    """Write the tensors of this rank, one block after the other, and return their names in the files.

    All ranks that have a shard of a tensor take part, and one of them writes it.
    """
    from transformers.core_model_loading import revert_weight_conversion

    blocks, written = dict[str, list[HeldTensor]](), list[str]()
    for entry in own:
        block = _BLOCK.match(entry.name)
        blocks.setdefault(entry.name.rpartition(".")[0] if block is None else block[0], []).append(entry)
    for entries in blocks.values():
        state = {entry.name: value for entry in entries if (value := _whole(entry, writes)) is not None}
        for name, value in revert_weight_conversion(whole, state).items():
            header = files.headers[files.file_of[name]][1] if name in files.file_of else None
            if header is None or _form(value) != (header.arrays[name].dtype, header.arrays[name].shape):
                raise PipelineError(f"{name} is made of several blocks of {type(whole).__name__}: use save_dcp")
            file = part / files.file_of[name]
            with _writing(file), file.open("r+b") as stream:
                stream.seek(header.arrays[name].start)
                stream.write(value.contiguous().view(-1).view(torch.uint8).numpy().data)
            written.append(name)
    for file_name in sorted({files.file_of[name] for name in written}):
        with _writing(part / file_name):
            sync(part / file_name)
    return written


def _whole(entry: HeldTensor, writes: set[str]) -> torch.Tensor | None:
    """The whole tensor on the CPU where this rank writes it."""
    value = entry.value.detach()
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.cpu() if entry.name in writes else None


def _finish(files: _Files, written: Sequence[Sequence[str]], part: Path, path: Path) -> None:
    """Give the files their names, and remove weights of an earlier save."""
    missing = sorted(files.file_of.keys() - {name for names in written for name in names})
    if missing:
        raise PipelineError(f"no rank wrote {missing[0]} and {len(missing) - 1} more: use save_dcp")
    with _writing(path):
        for file in sorted(part.iterdir(), key=lambda file: file.name == INDEX):
            file.replace(path / file.name)
        old = [file for file in path.iterdir() if _WEIGHTS.fullmatch(file.name)]
        for file in old:
            if file.name not in files.headers and not (file.name == INDEX and files.index is not None):
                file.unlink()
        part.rmdir()
        sync(path)


_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
