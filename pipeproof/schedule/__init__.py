"""Schedules as data: pure generators, passes over programs, the op table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pipeproof.schedule.gpipe import gpipe
from pipeproof.schedule.interleaved import interleaved
from pipeproof.schedule.one_f_one_b import one_f_one_b
from pipeproof.schedule.programs import Programs

GENERATORS: Mapping[str, Callable[[int, int], Programs]] = MappingProxyType({"gpipe": gpipe, "1f1b": one_f_one_b})
"""``schedule.kind`` to its generator, for one stage on each rank: (pipeline ranks, micro-batches) -> programs."""

CHUNKED_GENERATORS: Mapping[str, Callable[[int, int, int], Programs]] = MappingProxyType({"interleaved": interleaved})
"""The same for several stages on each rank: (pipeline ranks, micro-batches, chunks) -> programs."""
