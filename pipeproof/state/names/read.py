"""A checkpoint of another tool as pipeproof's own tensors: the map, after its copies have been compared."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.specs.model import ModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.state.checkpoint import Checkpoint
from pipeproof.state.mapping import StateMap, turned_round
from pipeproof.state.names.codes import CopiesDifferError, NoNamesError
from pipeproof.state.names.convention import copies_of, names_of
from pipeproof.state.names.parts import weights_of
from pipeproof.state.names.tables import OURS
from pipeproof.state.stream import tensor_blocks

_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq")
"""What older files of Hugging Face have beside weights: it follows from the model's sizes."""


def read_names(convention: str, checkpoint: Checkpoint, plan: PlanSpec) -> StateMap:
    """The plan's weights, made of a checkpoint's tensors that are named by ``convention``.

    A tensor of another type than ``run.dtype`` (or ``main_grad_dtype``) is cast once. Copies that are there are
    compared, byte for byte, and then left out; what is missing or unexpected is for the proof to say.

    Raises:
        NoNamesError: PP928, the convention has no names for the plan's model.
        CopiesDifferError: PP929, two tensors that stand for one of the plan's differ.
        StateError: PP920, a file cannot be read.
    """
    model = require_gpt(convention, plan)
    copies = {} if convention == OURS else copies_of(convention, model)
    _require_equal_copies(checkpoint, copies)
    theirs = names_of(convention, model, plan.run.weight_dtype, _ffn_shards(checkpoint))
    types = {name: entry.dtype for name, entry in checkpoint.tensors.items()}
    as_there = {name: replace(one, dtype=types.get(name, one.dtype)) for name, one in theirs.tensors.items()}
    back = turned_round(StateMap(as_there), weights_of(model, plan.run.weight_dtype))
    left_out = {name for name in types if name in copies or _COMPUTED.fullmatch(name)}
    return StateMap(back.tensors, frozenset(left_out))


def require_gpt(convention: str, plan: PlanSpec) -> ModelSpec:
    """The plan's model.

    Raises:
        NoNamesError: PP928, it is a sequence of own layers.
    """
    if plan.own_layers is not None:
        raise NoNamesError(
            f"`{convention}` has no names for own layers",
            "leave `--names` away; AOA statements can name tensors: `--aoa`",
        )
    return plan.model


def _ffn_shards(checkpoint: Checkpoint) -> dict[str, int]:
    """By its name, in how many parts along its output a fused gate and up lies: Paddle's ranks fuse their own."""
    fused = (name for name in checkpoint.tensors if name.endswith(".up_gate_proj.weight"))
    return {name: len({part.shard.offsets[-1] for part in checkpoint.parts.get(name, ())}) or 1 for name in fused}


def _require_equal_copies(checkpoint: Checkpoint, copies: Mapping[str, str]) -> None:
    for copy, original in copies.items():
        if copy not in checkpoint.tensors or original not in checkpoint.tensors:
            continue
        one, other = checkpoint.tensors[original], checkpoint.tensors[copy]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            raise _differ(
                checkpoint, original, copy, f"{one.dtype} {list(one.shape)}, {other.dtype} {list(other.shape)}"
            )
        item, at = dtype_bytes(one.dtype), 0
        blocks = tensor_blocks(checkpoint, original), tensor_blocks(checkpoint, copy)
        for mine, of_copy in zip(*blocks, strict=True):
            wrong = np.flatnonzero((mine != of_copy).reshape(-1, item).any(axis=1))
            if len(wrong):
                gaps = np.flatnonzero(np.diff(wrong) > 1)
                last = wrong[gaps[0]] if len(gaps) else wrong[-1]
                start, stop = at + int(wrong[0]), at + int(last) + 1
                row, column = np.unravel_index(start, one.shape)[0], start % one.shape[-1]
                what = f"first in elements {start} to {stop}"
                raise _differ(checkpoint, original, copy, f"{what}, from {_place(int(row), int(column), one.shape)} on")
            at += mine.size // item


def _place(row: int, column: int, shape: tuple[int, ...]) -> str:
    return f"element {column}" if len(shape) == 1 else f"row {row}, column {column},"


def _differ(checkpoint: Checkpoint, original: str, copy: str, how: str) -> CopiesDifferError:
    if copy.endswith("norm.weight"):
        mend = "modules of this checkpoint have a norm of their own, and those of a plan share the last one: without "
        mend += "`model.mtp` in the plan, and without the tensors of modules in the checkpoint, the rest can be read"
    elif ".layers." in copy:
        mend = "a plan's modules share embedding and head with the model: mend the checkpoint"
    else:
        mend = "the head of this checkpoint is not tied to the embedding: set `model.tied_embedding: false`"
    return CopiesDifferError(f"{checkpoint.place}: {copy} is to be {original} once more, and they differ: {how}", mend)
