"""PaddleNLP's Unified Checkpoint: whole tensors, with one index each for weights, optimizer states and main weights.

An optimizer state has the key ``NAME/moment1_0`` and so on, a main weight the key of its weight; scalars have one dim.
With the option ``skip_save_model_weight`` the files of weights have the main weights. Experts have the numbers that
they have in the whole model. Source: ``paddlenlp/trainer/unified_checkpoint`` of PaddleNLP, commit 0f631f8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pipeproof.foreign_text import decode_json, read_foreign
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.state.checkpoint import Checkpoint, HeldShard
from pipeproof.state.flex.flex_metadata import COUNTERS, SLOTS, tensor_of
from pipeproof.state.state_codes import FlexError
from pipeproof.state.state_index import MAX_BYTES, Shard, ShardFile, TensorEntry

INDEX = ".safetensors.index.json"
"""Ending of an index; before it comes the first word of its files."""
MODEL, OPTIMIZER, MASTER = "model", "optimizer", "master_weights"
SUFFIXES = {slot: suffix.removeprefix(".") for slot, suffix in (SLOTS | COUNTERS).items()}
"""Endings of the keys of optimizer states, by pipeproof's names of the states."""
_FIX = "copy the checkpoint again from where it was saved, or save it again"


def is_unified(path: Path) -> bool:
    """Return True if a directory has optimizer states or main weights as PaddleNLP saves them."""
    return (path / f"{MASTER}{INDEX}").exists() or any(_optimizer_files(path))


def _optimizer_files(path: Path) -> list[Path]:
    return sorted(path.glob("optimizer*.safetensors"))


def open_unified(path: Path, open_indexed: Callable[[Path, str], Checkpoint]) -> Checkpoint:
    """Open a Unified Checkpoint, with its tensors under pipeproof's names.

    Main weights are taken, and not their roundings in the files of weights. ``open_indexed`` opens the whole tensors
    that an index lists.

    Raises:
        StateError: An index or file is missing, contradicts another one, or has states of another optimizer.
    """
    if _optimizer_files(path) and not (path / f"{OPTIMIZER}{INDEX}").exists():
        fix = "save without `ignore_merge_optimizer`, which leaves the parts of each rank as they are"
        raise FlexError(f"{path} has {_optimizer_files(path)[0].name}, and no {OPTIMIZER}{INDEX}", fix)
    groups = [group for group in (MASTER, MODEL, OPTIMIZER) if (path / f"{group}{INDEX}").exists()]
    opened = {group: open_indexed(path, f"{group}{INDEX}") for group in groups}
    tensors, shards = dict[str, TensorEntry](), dict[str, tuple[HeldShard, ...]]()
    files = dict[Path, ShardFile | None]()
    for group, part in opened.items():
        files |= part.files
        for key, stored in part.tensors.items():
            name, entry = _state_of(path, key, stored) if group == OPTIMIZER else (key, stored)
            if name in tensors:
                _require_rounding(path, name, tensors[name], entry)
                continue
            tensors[name] = entry
            (held,) = part.shards[key]
            shards[name] = (
                replace(held, shard=Shard(tensor=name, offsets=(0,) * len(entry.shape), extents=entry.shape)),
            )
    lost = next((entry.weight for entry in tensors.values() if entry.weight and entry.weight not in tensors), None)
    if lost is not None:
        raise FlexError(f"{path} has optimizer states of {lost}, and no such weight", _FIX)
    if OPTIMIZER in opened and MASTER not in opened:
        _require_main_weights(path, opened.get(MODEL))
    return Checkpoint(path, "unified", tensors, shards, files, None)


def _state_of(path: Path, key: str, stored: TensorEntry) -> tuple[str, TensorEntry]:
    weight, _, suffix = key.rpartition("/")
    if not weight or suffix not in SUFFIXES.values():
        suffixes = ", ".join(SUFFIXES.values())
        raise FlexError(
            f"{path} has the optimizer state {key}, which AdamW has not ({suffixes})", "use its weights alone"
        )
    name, entry = tensor_of(f"{weight}.{suffix}", stored.dtype, stored.shape)
    if entry.kind == "weight":
        raise FlexError(f"{path}: {key} is a scalar, and has the shape {list(stored.shape)}", _FIX)
    return name, entry


def _require_rounding(path: Path, name: str, main: TensorEntry, copy: TensorEntry) -> None:
    if main.shape != copy.shape or dtype_bytes(main.dtype) < dtype_bytes(copy.dtype):
        texts = [f"{entry.dtype} {list(entry.shape)}" for entry in (copy, main)]
        raise FlexError(f"{path}: {name} is {texts[0]}, and {texts[1]} as main weight", _FIX)


def _require_main_weights(path: Path, weights: Checkpoint | None) -> None:
    """Refuse weights of 16 bits whose main weights, which the optimizer has updated, are missing."""
    has_main = decode_json(read_foreign(path / f"{OPTIMIZER}{INDEX}", MAX_BYTES)).get(MASTER)
    narrow = [n for n, entry in (weights.tensors if weights else {}).items() if dtype_bytes(entry.dtype) < 4]
    if has_main and narrow:
        raise FlexError(f"{path / OPTIMIZER}{INDEX} states main weights, and there is no {MASTER}{INDEX}", _FIX)
