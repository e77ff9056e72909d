"""Stages of a model, written as the directory of Hugging Face that ``model.save_pretrained`` would write.

Each rank writes the tensors of its own stages into a file. The first rank maps these files into its memory, and gives
them to the library.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.dcp_files import Ranks
from pipeproof.exec.train.torch.dcp_state import require_equal_copies
from pipeproof.exec.train.torch.model_names import HeldTensor, model_names, outline_of
from pipeproof.exec.train.torch.pretrained_load import INDEX, known_tensors, models_of, whole_model
from pipeproof.system_calls import sync

if TYPE_CHECKING:
    from pipeproof.exec.train.torch.pipeline import Pipeline


def save_pretrained(
    pipe: Pipeline | Mapping[int, nn.Module],
    directory: str | Path,
    *,
    max_shard_size: int | str | None = None,
    group: Any = None,
) -> None:
    """Write the weights of all stages as ``model.save_pretrained`` would: the same files with the same bytes.

    ``pipe`` is a ``Pipeline`` of stages of ``stages_of_transformers``, or the stages of this rank. Every rank of
    ``group`` calls it, with one file system that has space for the weights twice. Of several ranks with a stage, one
    writes it; shards of ``fully_shard`` are gathered one tensor at a time. ``max_shard_size`` is the library's, such as
    ``"5GB"``. Other files of the directory stay; weights that were in it are replaced when all new ones are written.

    Raises:
        PipelineError: on all ranks: a stage is missing, copies of a weight differ, or a file cannot be written.
    """
    stages = pipe if isinstance(pipe, Mapping) else pipe.stages
    ranks, path = Ranks(group), Path(directory).absolute()
    models = ranks.together(partial(models_of, dict(stages), ranks))
    whole = ranks.together(partial(whole_model, models))
    held = ranks.together(partial(known_tensors, whole, stages))
    owner = _owners(ranks, whole, held)
    names = ranks.together(partial(_saved_names, whole, owner))
    part = path / ".save_pretrained.part"
    ranks.together(lambda: None if ranks.rank else _begin(part))
    own = [entry for entry in held if entry.name in names and owner[entry.name][0] == entry.stage]
    writes = {entry.name for entry in own if owner[entry.name][1] == ranks.rank}
    ranks.together(partial(_write, own, writes, part / f"rank{ranks.rank}.pt"))
    ranks.together(lambda: None if ranks.rank else _finish(whole, names, part, path, max_shard_size))


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


def _saved_names(whole: Any, owner: Mapping[str, object]) -> list[str]:
    """The names of the model's tensors that are saved, in its order."""
    names = []
    for name in whole.state_dict():
        if whole.all_tied_weights_keys.get(name) in owner or name in whole._keys_to_ignore_on_save:  # noqa: SLF001
            continue
        if name not in owner:
            raise PipelineError(
                f"no rank has {name} of {type(whole).__name__}: save all stages, on the ranks of one group"
            )
        names.append(name)
    return names


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library's and PyTorch's have no common kind
        raise PipelineError(
            f"{path} cannot be written: {error}: all ranks need this directory on one file system, with space"
        ) from error


def _begin(part: Path) -> None:
    with _writing(part):
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)


def _write(own: Sequence[HeldTensor], writes: set[str], file: Path) -> None:
    """Write tensors of this rank. All ranks that have a shard of a tensor take part, and one of them writes it."""
    tensors = {}
    for entry in own:
        value = entry.value.detach()
        value = value.full_tensor() if isinstance(value, DTensor) else value
        if entry.name in writes:
            tensors[entry.name] = value.cpu().clone(memory_format=torch.contiguous_format)
    with _writing(file):
        torch.save(tensors, file)


def _finish(whole: Any, names: Sequence[str], part: Path, path: Path, max_shard_size: int | str | None) -> None:
    """Have the library write the files, give them their names, and remove weights of an earlier save."""
    from transformers.utils import logging

    with _writing(path):
        tensors: dict[str, torch.Tensor] = {}
        for file in part.glob("rank*.pt"):
            tensors |= torch.load(file, mmap=True, weights_only=True)
        state = {name: tensors[name] for name in names}
        first = next(name for name, weight in whole.named_parameters() if weight.is_floating_point())
        shows_progress = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        sizes = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        whole.to(tensors[first].dtype).save_pretrained(part / "new", state_dict=state, **sizes)
        if shows_progress:
            logging.enable_progress_bar()
        new = sorted((part / "new").iterdir(), key=lambda file: file.name == INDEX)
        for file in new:
            sync(file)
            file.replace(path / file.name)
        for file in path.iterdir():
            if _WEIGHTS.fullmatch(file.name) and file.name not in {each.name for each in new}:
                file.unlink()
        shutil.rmtree(part)
        sync(path)


_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
