"""Pipelines of torch.distributed.pipelining in the files of trainers: names of schedules and of modules, and cuts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pipeproof.diagnostics.problems import listed, nearest_name

SCHEDULES: Final[Mapping[str, tuple[str, int]]] = MappingProxyType(
    {
        "1F1B": ("1f1b", 1),
        "GPipe": ("gpipe", 1),
        "Interleaved1F1B": ("interleaved", 2),
        "LoopedBFS": ("looped_bfs", 2),
        "InterleavedZeroBubble": ("interleaved_zb", 2),
        "ZBVZeroBubble": ("zb_v", 2),
        "DualPipeV": ("dualpipe_v", 2),
    }
)
"""PyTorch's names, ours, and the default number of stages of a rank."""


def schedule_named(name: str) -> tuple[str, int] | None:
    """Return our name and the default number of stages of a rank; the case of the name does not matter to PyTorch."""
    known = {pytorch.lower(): found for pytorch, found in SCHEDULES.items()}
    return known.get(name.lower())


def known_schedules(name: str) -> str:
    """Return the hint for a name that is no schedule."""
    near = nearest_name(name, SCHEDULES)
    return f"did you mean {near}?" if near else f"known are {listed(list(SCHEDULES), 'and')}"


_MODULES: Final[Mapping[str, str]] = MappingProxyType({"norm": "norm", "output": "head", "lm_head": "head"})


def module_named(name: str, embedding: str) -> str | None:
    """Return our name of a module, such as ``layers.3``; None for another one. ``embedding`` is the trainer's name."""
    kind, _, number = name.partition(".")
    if kind == "layers" and number.isdecimal():
        return f"layer.{number}"
    return "embed" if name == embedding else _MODULES.get(name)
