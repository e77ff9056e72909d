"""Rows of results that appear as they are measured, and sums of the bits of gradients."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

CHUNK = 2**24
Bits = dict[str, tuple[int, int]]


def bits_of(gradients: Mapping[str, torch.Tensor]) -> Bits:
    """Two sums of the bits of each gradient; the second depends on their positions."""
    return {name: _sums(gradient) for name, gradient in gradients.items()}


def _sums(tensor: torch.Tensor) -> tuple[int, int]:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    found = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for part in tensor.reshape(-1).view(kinds[tensor.element_size()]).split(CHUNK):
        wide = part.to(torch.int64)
        found += torch.stack([wide.sum(), (wide * (torch.arange(len(part), device=part.device) % 65521 + 1)).sum()])
    plain, by_position = found.tolist()
    return plain, by_position


class Rows:
    """Rows of the results; the first rank writes them."""

    def __init__(self, file: Path, end: float, device: torch.device) -> None:
        self._file, self._end, self._device = file, end, device
        if dist.get_rank() == 0:
            file.write_text("")

    def has_time(self) -> bool:
        """Return True if another row may begin, by the clock of the first rank."""
        more = torch.tensor([time.monotonic() < self._end], device=self._device)
        dist.broadcast(more, 0)
        return bool(more)

    def put(self, row: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Write a row; ``facts`` are of each rank: all must hold, the largest number counts."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, dict(facts))
        joined = {
            key: all(own[key] for own in gathered) if isinstance(value, bool) else max(own[key] for own in gathered)
            for key, value in facts.items()
            if not isinstance(value, dict)
        }
        reasons = {stage: reason for own in gathered for stage, reason in own["without"].items()}
        if dist.get_rank() == 0:
            text = json.dumps({**row, **joined, "without": reasons})
            print(text, flush=True)
            with self._file.open("a") as file:
                file.write(text + "\n")
