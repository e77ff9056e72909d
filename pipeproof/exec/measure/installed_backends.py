"""The packages of the frameworks that plans run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Installation:
    """Name of a backend for people, extra of pipeproof, requirement for pip, and the distributions that have it."""

    name: str
    extra: str
    requirement: str
    distributions: tuple[str, ...]


INSTALLED_BY: Mapping[str, Installation] = MappingProxyType(
    {
        "paddle": Installation("Paddle", "cpu", "paddlepaddle==3.3.1", ("paddlepaddle", "paddlepaddle-gpu")),
        "torch": Installation("PyTorch", "torch", "torch>=2.11", ("torch",)),
    }
)


def installed_version(backend: str) -> str:
    """Version of the first distribution of a backend that is installed; empty without one."""
    for distribution in INSTALLED_BY[backend].distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""
