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


def installed_version(name: str) -> str:
    """Version of the first installed distribution of a backend, or of another package; empty without one."""
    for distribution in INSTALLED_BY[name].distributions if name in INSTALLED_BY else (name,):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""


@dataclass(frozen=True, slots=True)
class VersionRow:
    """Versions that ran together, the machine, the tests, and their result."""

    python: str
    torch: str
    transformers: str
    machine: str
    tests: str
    result: str


TESTED = (
    VersionRow("3.11", "2.13.0", "5.23.0", "CPU", "all, in CI", "all passed"),
    VersionRow("3.11", "2.13.0", "5.24.0", "CPU", "stages of `transformers`", "82 passed"),
    VersionRow("3.11", "2.14.1", "5.23.0", "CPU", "training scripts, stages", "608 passed, and 4 after a fix"),
    VersionRow(
        "3.12", "2.11.0", "5.17.0", "two H200", "`benchmarks/gpu`", "[times](../validation/results/gpu-measurements.md)"
    ),
    VersionRow("3.13", "2.14.1", "5.23.0", "CPU", "cuts of `nn.Sequential`, errors", "all passed"),
)
_NAMES = {"python": "Python", "torch": "PyTorch", "transformers": "transformers"}


def untested_versions(installed: Mapping[str, str]) -> list[str]:
    """A sentence for each version that no row has, up to its minor number; keys are names of the columns."""
    sentences = []
    for key, name in _NAMES.items():
        tested = sorted({_minor(getattr(row, key)) for row in TESTED})
        own = installed.get(key, "")
        if own[:1].isdigit() and _minor(own) not in tested:
            names = ", ".join(f"{major}.{minor}" for major, minor in tested)
            sentences.append(f"{name} {own} is untested: pipeproof's tests ran with {names}")
    return sentences


def _minor(text: str) -> tuple[int, int]:
    major, minor, *_ = text.split(".")
    return int(major), int(minor)
