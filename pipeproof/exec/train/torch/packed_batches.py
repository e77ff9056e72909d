"""Packed batches: documents in one sequence, with the offsets where they begin, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.stage_values import MicroBatches


class _Part(NamedTuple):
    """The documents and the tokens of one micro-batch, both as half-open ranges."""

    first: int
    last: int
    begin: int
    end: int


def packed(
    input_ids: torch.Tensor, cu_seqlens: torch.Tensor | None = None, *, num_micro_batches: int, **others: Any
) -> dict[str, MicroBatches]:
    """Keyword arguments of a step for packed documents: each micro-batch has documents of its own, from offset 0.

    ``pipe.step(**packed(ids, cu_seqlens, num_micro_batches=4, labels=labels))``. Every value equals a collator's result
    for the documents of that micro-batch alone. The result has the names that were given.

    Args:
        input_ids: tokens of all documents, of shape (tokens,) or (1, tokens); or of packs of one length, (packs,
            length). Documents are divided into micro-batches with numbers of tokens as equal as possible; packs are
            divided evenly.
        cu_seqlens: offsets of the documents in all tokens, from 0 to the number of tokens (int32, as FlashAttention has
            them). Default: ``cu_seq_lens_q`` of a Hugging Face collator, else documents begin where ``position_ids``
            fall. The host reads them.
        num_micro_batches: the pipeline's number of micro-batches.
        others: more names. Offsets (``cu_seq...``) are counted from 0. Tensors with a value for each token
            (``labels``) are divided; ``position_ids=True`` makes those that count from 0 in each document, and
            ``seq_idx`` numbers the documents from 0. Numbers whose name begins with ``max_`` (``max_seqlen``,
            ``max_length_q``) are the longest document of the micro-batch, also made by ``True``; other scalars are
            shared.

    Raises:
        PipelineError: the offsets do not fit the tokens, there are fewer documents than micro-batches, packs are not
            divided evenly, or a value has another shape.
    """
    num_tokens = input_ids.numel()
    offsets = _offsets(input_ids, cu_seqlens, others)
    values = {"input_ids": input_ids, **({} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}), **others}
    if input_ids.dim() not in (1, 2):
        raise PipelineError(
            f"input_ids has shape {list(input_ids.shape)}: pass (tokens,), (1, tokens) or (packs, length)"
        )
    if offsets[0] != 0 or offsets[-1] != num_tokens or any(a >= b for a, b in pairwise(offsets)):
        raise PipelineError(f"the offsets {_short(offsets)} of documents must rise from 0 to {num_tokens}, the tokens")
    parts = _parts(input_ids, offsets, num_micro_batches)
    return {name: _micro_batches(name, value, input_ids, offsets, parts) for name, value in values.items()}


def _offsets(input_ids: torch.Tensor, cu_seqlens: torch.Tensor | None, others: dict[str, Any]) -> list[int]:
    """Offsets of the documents, the last one the number of tokens."""
    cu_seqlens = (
        next((x for name, x in others.items() if _is_offsets(name)), None) if cu_seqlens is None else cu_seqlens
    )
    if cu_seqlens is not None:
        if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
            raise PipelineError(f"the offsets of documents have shape {list(cu_seqlens.shape)}: pass one dim of them")
        return [int(offset) for offset in cu_seqlens.tolist()]
    positions = others.get("position_ids")
    if not isinstance(positions, torch.Tensor) or positions.shape != input_ids.shape:
        raise PipelineError("packed() needs the documents: pass `cu_seqlens`, or `position_ids` of the tokens' shape")
    flat = positions.flatten()
    begins = (flat[1:] <= flat[:-1]).nonzero().flatten() + 1
    return [0, *map(int, begins.tolist()), input_ids.numel()]


def _parts(input_ids: torch.Tensor, offsets: Sequence[int], num: int) -> list[_Part]:
    num_tokens, num_documents = input_ids.numel(), len(offsets) - 1
    is_packs = input_ids.dim() == 2 and input_ids.shape[0] > 1
    if is_packs and input_ids.shape[0] % num:
        raise PipelineError(f"{input_ids.shape[0]} packs are not divided evenly by {num} micro-batches")
    if num_documents < num:
        raise PipelineError(f"{num_documents} documents are fewer than {num} micro-batches")
    cuts = [0]
    for index in range(1, num):
        wanted = index * num_tokens / num
        lowest, highest = cuts[-1] + 1, num_documents - (num - index)
        cut = min(range(lowest, highest + 1), key=lambda document: abs(offsets[document] - wanted))
        if is_packs and offsets[cut] != wanted:
            raise PipelineError(f"a document goes from one pack into the next at token {int(wanted)}: the offsets are "
                                f"{_short(offsets)}")  # fmt: skip
        cuts.append(cut)
    cuts.append(num_documents)
    return [_Part(a, b, offsets[a], offsets[b]) for a, b in pairwise(cuts)]


def _micro_batches(
    name: str, value: Any, input_ids: torch.Tensor, offsets: Sequence[int], parts: Sequence[_Part]
) -> MicroBatches:
    if _is_offsets(name):
        if not isinstance(value, torch.Tensor) or len(value) != len(offsets):
            raise PipelineError(f"{name} has other offsets than {_short(offsets)}: pass one offset for each document")
        return MicroBatches(value[part.first : part.last + 1] - value[part.first] for part in parts)
    if name.startswith("max_") and not isinstance(value, torch.Tensor):
        bounds = (offsets[part.first : part.last + 1] for part in parts)
        return MicroBatches(max(b - a for a, b in pairwise(each)) for each in bounds)
    if name == "position_ids" and value is True:
        value = _positions(input_ids, offsets)
    if value is None or isinstance(value, bool | int | float | str):
        return MicroBatches([value] * len(parts))
    return MicroBatches(_tokens(name, value, input_ids, part) for part in parts)


def _tokens(name: str, value: Any, input_ids: torch.Tensor, part: _Part) -> torch.Tensor:
    """The tokens of a micro-batch, in the form of ``input_ids``: one sequence, or packs."""
    num_dims = input_ids.dim()
    if not isinstance(value, torch.Tensor) or value.shape[:num_dims] != input_ids.shape:
        shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise PipelineError(
            f"{name} is {shape}, and the tokens have shape {list(input_ids.shape)}: pass a value for each token, or "
            f"add MicroBatches([..]) for {name!r} to the result"
        )
    rest = value.shape[num_dims:]
    tokens = value.reshape(-1, *rest)[part.begin : part.end]
    if num_dims == 2:
        tokens = tokens[None] if input_ids.shape[0] == 1 else tokens.reshape(-1, input_ids.shape[1], *rest)
    return tokens - tokens.flatten()[0] if name == "seq_idx" else tokens


def _positions(input_ids: torch.Tensor, offsets: Sequence[int]) -> torch.Tensor:
    begins = torch.tensor(offsets[:-1], device=input_ids.device)
    sizes = torch.tensor([b - a for a, b in pairwise(offsets)], device=input_ids.device)
    positions = torch.arange(input_ids.numel(), device=input_ids.device)
    return (positions - begins.repeat_interleave(sizes)).reshape(input_ids.shape)


def _is_offsets(name: str) -> bool:
    return name.startswith("cu_seq")


def _short(offsets: Sequence[int]) -> str:
    return str(list(offsets)) if len(offsets) <= 12 else f"{list(offsets[:12])[:-1]}, ..]"
