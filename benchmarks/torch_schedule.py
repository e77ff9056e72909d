"""The rival of several benchmarks: location of PyTorch, and its interleaved 1F1B."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def torch_python(arguments: Sequence[str]) -> str:
    """The interpreter after ``--torch-python``; without it, the one that runs this."""
    if "--torch-python" not in arguments:
        return sys.executable
    return arguments[arguments.index("--torch-python") + 1]


def has_torch(python: str) -> bool:
    """True if an interpreter finds PyTorch."""
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([python, "-c", code], check=False).returncode == 0


def interleaved(ranks: int, chunks: int, micro_batches: int) -> dict[int, list[Any]]:
    """The operations of ``ScheduleInterleaved1F1B`` by rank, without the stages that its constructor asks for."""
    from torch.distributed.pipelining import schedules

    made = object.__new__(schedules.ScheduleInterleaved1F1B)
    made.pp_group_size, made.n_local_stages, made._n_microbatches = ranks, chunks, micro_batches
    made.number_of_rounds = max(1, micro_batches // ranks)
    made.microbatches_per_round = micro_batches // made.number_of_rounds
    return {
        rank: [action for action in made._calculate_single_rank_operations(rank) if action is not None]
        for rank in range(ranks)
    }
