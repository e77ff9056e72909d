"""When and with what Megatron-LM's golden values were recorded.

A golden value stays in the repository while the arguments of its case, the code and the container change. The file has
a row for each file of golden values at commit d98e8a6: the commit that its iteration times are from, the release of
PyTorch's container that tests used then, the arguments with an effect on times or memory that were others than at
d98e8a6, and the spread of its steps, the interquartile range over the median. ``benchmarks/read_golden_records.py``
reads them from a clone of NVIDIA/Megatron-LM.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

RECORDS = Path(__file__).parent / "measurements" / "megatron_records.csv"
_TIMERS = "--timing-log-level"
_WITHOUT_EFFECT_ON_MEMORY = frozenset({_TIMERS, "NCCL_ALGO"})
_LARGEST_SPREAD = 0.2
"""Spread from which the steps of a run do not determine a median that another run would have."""
_UNFUSED_CONTAINERS = frozenset({"", "24.01"})
"""Containers whose Transformer Engine takes unfused attention for heads of 64 elements without cp: the peaks of all
cases that ran in them need stored scores, which predict them within 1 %. The repository does not name the containers
before February 2025."""
_CLOUD_CONTAINER = "26.04"
"""Container from which on the tests on H100 and GB200 have the times of other hosts, since May 2026."""


@dataclass(frozen=True)
class Record:
    """A file of golden values: when and in which container it was recorded, and what was other than at d98e8a6."""

    date: str
    container: str
    changed: tuple[str, ...]
    spread: float

    @property
    def has_unfused_attention(self) -> bool:
        """True if the container computes attention without cp unfused."""
        return self.container in _UNFUSED_CONTAINERS

    def no_step(self) -> str:
        """Return why no plan predicts the steps; empty if one does."""
        if _TIMERS in self.changed:
            return (
                f"another release's code ({self.date[:7]}): its timers wait for the device around each phase "
                "(--timing-log-level 2)"
            )
        if self.changed:
            return f"recorded with another {self.changed[0]} than the arguments of the case have ({self.date[:7]})"
        if self.spread > _LARGEST_SPREAD:
            return f"half of the run's own steps lie {self.spread:.0%} of their median apart"
        return ""

    def no_memory(self) -> str:
        """Return why no plan predicts the peak of memory; empty if one does."""
        others = [flag for flag in self.changed if flag not in _WITHOUT_EFFECT_ON_MEMORY]
        return (
            f"recorded with another {others[0]} than the arguments of the case have ({self.date[:7]})" if others else ""
        )


def record_of(case: str, machine: str) -> Record | None:
    """Return the record of a case on a machine; None if the repository has no iteration times of it."""
    return _records().get((case, machine))


def golden_system(device: str, machine: str, record: Record) -> str:
    """Return the machines that a row was recorded on, as far as their hosts differ."""
    if device == "a100":
        return "A100, tests of Megatron-LM"
    is_cloud = "dgxc" in machine or (record.container >= _CLOUD_CONTAINER)
    return f"{device.upper()}, tests of Megatron-LM {'since May 2026' if is_cloud else 'until April 2026'}"


@cache
def _records() -> Mapping[tuple[str, str], Record]:
    with RECORDS.open(encoding="utf-8", newline="") as file:
        return {
            (row["case"], row["machine"]): Record(
                row["date"], row["container"], tuple(row["changed"].split()), float(row["spread"])
            )
            for row in csv.DictReader(file)
        }
