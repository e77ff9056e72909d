"""Products of groups of rows, each with its own matrix: one kernel for all experts where PyTorch has one.

It has for bfloat16 (``torch.nn.functional.grouped_mm``), and reads where groups
end on the device, so that the host need not know how many rows each group has.
Other types are multiplied group by group.

Shape letters: N rows, E groups, K and M columns.
"""

from __future__ import annotations

from functools import cached_property
from typing import TypeAlias

import torch
import torch.nn.functional as F

Tensor: TypeAlias = torch.Tensor

ALIGNMENT_BYTES = 16
"""The kernel's: of rows of every factor."""


class Groups:
    """How many rows each group has, int64 [E]; the host learns of it where it asks for ``sizes``."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts

    @cached_property
    def ends(self) -> Tensor:
        """Where each group ends, int32 [E] on the device."""
        return self.counts.cumsum(0, dtype=torch.int32)

    @cached_property
    def sizes(self) -> list[int]:
        """On the host, which waits for them, once."""
        sizes: list[int] = self.counts.tolist()
        return sizes


def is_one_kernel(rows: Tensor, matrices: Tensor) -> bool:
    """Whether PyTorch multiplies [N, K] with [E, K, M] in one kernel."""
    per_row = ALIGNMENT_BYTES // rows.element_size()
    is_aligned = matrices.shape[1] % per_row == 0 and matrices.shape[2] % per_row == 0
    return rows.dtype == torch.bfloat16 and is_aligned and len(rows) > 0 and hasattr(F, "grouped_mm")


def grouped_product(rows: Tensor, matrices: Tensor, groups: Groups) -> Tensor:
    """[N, K] and [E, K, M] to [N, M]: the rows of group e times ``matrices[e]``."""
    if is_one_kernel(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=groups.ends)
    return torch.cat([part @ matrix for part, matrix in zip(rows.split(groups.sizes), matrices, strict=True)])


def grouped_gradients(inputs: Tensor, outputs: Tensor, groups: Groups) -> Tensor:
    """[N, K] and [N, M] to [E, K, M], zero where a group is empty; only where ``is_one_kernel`` for these shapes."""
    return F.grouped_mm(inputs.t(), outputs, offs=groups.ends)
