"""Digests of what the ranks of a pipeline are given, to compare: ``Pipeline(.., check_inputs=True)``."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.stage_keywords import AssignedInputs
from pipeproof.exec.train.torch.stage_values import MicroBatches


def digests_of(assigned: AssignedInputs) -> dict[str, str]:
    """A digest of each argument by its name; objects other than tensors and scalars count by their type."""
    named = {**assigned.args, **assigned.target, **assigned.kwargs}
    for number, own in assigned.stage_kwargs.items():
        named |= {f"{name} of stage {number}": value for name, value in own.items()}
    return {name: _digest(value) for name, value in named.items()}


def require_same_digests(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Refuse ranks that were given other values of one argument; a rank may have been given fewer arguments.

    Raises:
        PipelineError: names the argument, and the ranks by digest.
    """
    for name in dict.fromkeys(name for digests in by_rank for name in digests):
        ranks: dict[str, list[int]] = {}
        for rank, digests in enumerate(by_rank):
            if name in digests:
                ranks.setdefault(digests[name], []).append(rank)
        if len(ranks) > 1:
            shown = ", ".join(f"digest {digest} on ranks {numbers}" for digest, numbers in ranks.items())
            raise PipelineError.reported(
                f"check_inputs: {name} differs between the ranks of the pipeline: {shown}. All ranks of a pipeline "
                "take the same rows: let a sampler divide the data among the ranks of `data_group` alone, with one seed"
            )


def _digest(value: Any) -> str:
    sums = hashlib.blake2b(digest_size=6)
    _add(sums, value)
    return sums.hexdigest()


def _add(sums: Any, value: Any) -> None:
    leaves, spec = tree_flatten(value)
    sums.update(str(spec).encode())
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            sums.update(f"{leaf.dtype}{list(leaf.shape)}".encode())
            if type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout is torch.strided:
                data = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                sums.update(data.numpy().tobytes())
        elif isinstance(leaf, MicroBatches):
            _add(sums, list(leaf))
        elif hasattr(leaf, "kv_num_blocks"):  # a BlockMask
            _add(sums, {name: each for name, each in vars(leaf).items() if isinstance(each, torch.Tensor)})
        else:
            is_scalar = isinstance(leaf, str | int | float | complex | bytes | type(None))
            sums.update((repr(leaf) if is_scalar else type(leaf).__name__).encode())
