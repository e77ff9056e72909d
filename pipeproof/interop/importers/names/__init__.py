"""Names of arguments by tool: those of Megatron-LM with their versions, and those that other tools add (data)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

MEGATRON = "megatron"
VERSIONS = "2.0 to commit d98e8a6"
"""Versions of Megatron-LM whose arguments are in its list."""


@cache
def names_of(tool: str) -> Mapping[str, str]:
    """Return the names in a list, with underscores; those of Megatron-LM with their first and last version."""
    lines = files(__name__).joinpath(f"{tool}.txt").read_text(encoding="utf-8").splitlines()
    rows = (line.partition(" ") for line in lines if not line.startswith("#"))
    return {name: versions for name, _, versions in rows}


def plain(name: str) -> str:
    """Return a flag, or a key, as the lists have it: ``--num-layers`` is ``num_layers``."""
    return name.rpartition(".")[2].removeprefix("--").replace("-", "_")
