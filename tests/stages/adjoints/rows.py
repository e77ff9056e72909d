"""Constructors of table rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.stages.adjoints.world import Case, Held

LAYOUTS: tuple[tuple[int, int | None], ...] = ((1, None), (2, None), (2, 0))
"""One rank, two, and two between which sequences are cut: (ranks, dim of the sequence)."""


def plain(name: str, covers: str, function: Callable[..., Any], *shapes: Sequence[int], **more: Any) -> Case:
    """A function of tensors alone, on one rank."""
    inputs = tuple(Held(tuple(shape)) for shape in shapes)
    return Case(name, tuple(covers.split()), lambda rank, *tensors: function(*tensors), inputs, **more)


def per_layout(
    name: str, covers: str, function: Callable[..., Any], *inputs: tuple[Any, ...], output: str
) -> list[Case]:
    """On each layout. Inputs and output are ``between`` layers, ``own`` or ``replicated``; ``weight`` marks weights.

    Between layers is one tensor that all ranks hold, or with sequence parallelism each rank's own part. A weight that
    is used there is of the same kind: cut sequences leave addends of its gradient.
    """
    cases = []
    for num_ranks, dim in LAYOUTS:
        is_replicated = {"between": dim is None, "own": False, "replicated": True}
        held = tuple(Held(tuple(shape), is_replicated[kind], bool(weight)) for shape, kind, *weight in inputs)
        which = f"{name}, {num_ranks} ranks{'' if dim is None else ', sequences cut'}"
        cases.append(Case(which, tuple(covers.split()), function, held, num_ranks, dim, is_replicated[output]))
    return cases
