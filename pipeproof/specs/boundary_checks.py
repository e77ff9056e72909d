"""Checks of the tensors that a plan declares between stages, and of micro-batches that differ in size."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from pipeproof.specs.problems import KeyPath, Problem, describe_value, listed, nearest_name

if TYPE_CHECKING:
    from pipeproof.specs.plan import PlanSpec
    from pipeproof.specs.transport import BoundarySpec

CUT = re.compile(r"sharded\(([a-z])\)", re.ASCII)
"""A placement that cuts one dim, named by its letter."""

_WHOLE = ("invariant", "replicated")
MODEL_DIMS = "sbh"
"""Dims whose sizes the model and the schedule give: sequence, micro-batch rows, hidden."""


def is_float(dtype: str) -> bool:
    """Whether values of the type have gradients."""
    return "float" in dtype


def check_boundary(entry: BoundarySpec) -> list[Problem]:
    """What one entry of ``boundaries`` says by itself: dims, shape and placements that fit each other."""
    problems = []
    if not re.fullmatch(r"[a-z]+", entry.dims, re.ASCII) or len(set(entry.dims)) != len(entry.dims):
        message = f"`dims` names each dim by a letter of its own, found {describe_value(entry.dims)}"
        return [Problem("PP106", ("dims",), message, help="write for example sbh: sequence, batch, hidden")]
    unknown = [dim for dim in entry.dims if dim not in MODEL_DIMS]
    if entry.shape is None and unknown:
        message = f"the sizes of the dims {listed(unknown, 'and')} of `{entry.name}` are not known"
        problems.append(Problem("PP104", ("dims",), message, help="add `shape`, one size for each dim"))
    if entry.shape is not None and len(entry.shape) != len(entry.dims):
        message = f"`shape` has {len(entry.shape)} sizes, and `dims` names {len(entry.dims)} dims"
        problems.append(Problem("PP109", ("shape",), message, help="give one size for each dim"))
    for key in ("tp", "receiver_tp"):
        text: str | None = getattr(entry, key)
        if text is not None:
            problems += _check_placement(key, text, entry.dims)
    if entry.gradient and entry.dtype is not None and not is_float(entry.dtype):
        message = f"`{entry.name}` is {entry.dtype}, which has no gradient, and `gradient` is true"
        problems.append(Problem("PP106", ("gradient",), message, help="remove `gradient`"))
    return problems


def _check_placement(key: str, text: str, dims: str) -> Iterator[Problem]:
    match = CUT.fullmatch(text)
    allowed = [*_WHOLE, *(f"sharded({dim})" for dim in dims)]
    if text in _WHOLE or (match and match[1] in dims):
        return
    near = nearest_name(text, allowed)
    yield Problem(
        "PP106",
        (key,),
        f"`{key}` must be {listed(allowed)}, found {describe_value(text)}",
        help=f"did you mean `{near}`?" if near else None,
    )


def check_boundaries(plan: PlanSpec) -> list[Problem]:
    """What entries of ``boundaries`` and sizes by micro-batch say beside the rest of the plan."""
    problems = [*_check_sizes(plan), *_check_cuts_of_default(plan)]
    names: dict[tuple[int | None, str], int] = {}
    for index, entry in enumerate(plan.boundaries):
        where: KeyPath = ("boundaries", index)
        last = plan.num_stages - 2
        if entry.edge is not None and entry.edge > last:
            message = f"`edge` {entry.edge} lies between stages {entry.edge} and {entry.edge + 1}, and the plan has "
            message += f"{plan.num_stages} stage{'s' if plan.num_stages > 1 else ''}"
            mend = f"use 0 to {last}, or remove `edge` for all" if last >= 0 else "remove the entry"
            problems.append(Problem("PP106", (*where, "edge"), message, help=mend))
        clash = next((names[key] for key in ((entry.edge, entry.name), (None, entry.name)) if key in names), None)
        if clash is None and entry.edge is None:
            clash = next((i for (_, name), i in names.items() if name == entry.name), None)
        if clash is not None:
            message = f"`{entry.name}` crosses the same edge as entry {clash}, which has that name too"
            problems.append(
                Problem("PP106", (*where, "name"), message, help="give each tensor of an edge its own name")
            )
        names.setdefault((entry.edge, entry.name), index)
        problems += _check_cuts(plan, entry, where)
        problems += _check_gradient(plan, entry, where)
    return problems


def _check_sizes(plan: PlanSpec) -> Iterator[Problem]:
    schedule = plan.schedule
    lengths = schedule.seq_lengths
    if lengths is not None and len(lengths) != schedule.num_micro_batches:
        yield Problem(
            "PP109",
            ("schedule", "seq_lengths"),
            f"`schedule.seq_lengths` has {len(lengths)} entries, and schedule.num_micro_batches is "
            f"{schedule.num_micro_batches}",
            help=f"give {schedule.num_micro_batches}, or leave it out for model.seq_length everywhere",
        )
    for index, length in enumerate(lengths or ()):
        if length > plan.model.seq_length:
            yield Problem(
                "PP106",
                ("schedule", "seq_lengths", index),
                f"micro-batch {index} has {length} tokens in a sequence, more than model.seq_length "
                f"{plan.model.seq_length}",
                help=f"use at most {plan.model.seq_length}, or raise model.seq_length",
            )
    last = schedule.last_micro_batch_size
    if last is not None and last > schedule.micro_batch_size:
        yield Problem(
            "PP106",
            ("schedule", "last_micro_batch_size"),
            f"the last micro-batch has {last} sequences, more than schedule.micro_batch_size "
            f"{schedule.micro_batch_size}",
            help=f"use at most {schedule.micro_batch_size}",
        )


def _check_cuts_of_default(plan: PlanSpec) -> Iterator[Problem]:
    """Sequences of every micro-batch divide over the ranks that share them."""
    topology = plan.topology
    parts = {"cp": topology.cp, "tp": topology.tp if topology.sequence_parallel else 1}
    num_parts = prod(parts.values())
    factors = " x ".join(f"topology.{axis} {size}" for axis, size in parts.items() if size > 1)
    lengths: Sequence[tuple[KeyPath, str, int]] = [
        (("schedule", "seq_lengths", i), f"schedule.seq_lengths[{i}]", n)
        for i, n in enumerate(plan.schedule.seq_lengths or ())
    ]
    if topology.cp > 1:
        lengths = [(("model", "seq_length"), "model.seq_length", plan.model.seq_length), *lengths]
    for path, name, length in lengths:
        if length % num_parts:
            yield Problem(
                "PP108",
                path,
                f"{name} {length} does not divide by {factors}: these ranks share each sequence",
                help=f"use a multiple of {num_parts}",
            )


def _check_cuts(plan: PlanSpec, entry: BoundarySpec, where: KeyPath) -> Iterator[Problem]:
    """PP108 where a cut dim does not divide, in any micro-batch."""
    num_tp = plan.topology.tp
    for key in ("tp", "receiver_tp"):
        match = CUT.fullmatch(getattr(entry, key) or "")
        if match is None or num_tp == 1 or match[1] not in entry.dims:
            continue
        for size in _sizes_of(plan, entry, match[1]):
            if size % num_tp:
                yield Problem(
                    "PP108",
                    (*where, key),
                    f"dim {match[1]} of `{entry.name}` has {size} elements, which do not divide by "
                    f"topology.tp {num_tp}",
                    help="cut another dim, or say invariant or replicated",
                )
                break


def _sizes_of(plan: PlanSpec, entry: BoundarySpec, dim: str) -> list[int]:
    """The sizes that a dim has over the micro-batches, on one context-parallel rank."""
    if entry.shape is not None:
        place = entry.dims.index(dim)
        return [entry.shape[place]] if place < len(entry.shape) else []
    schedule = plan.schedule
    if dim == "s":
        lengths = schedule.seq_lengths or (plan.model.seq_length,)
        return [length // plan.topology.cp for length in lengths]
    if dim == "b":
        return [schedule.micro_batch_size, schedule.last_micro_batch_size or schedule.micro_batch_size]
    return [plan.model.hidden_size] if dim == "h" else []


def _check_gradient(plan: PlanSpec, entry: BoundarySpec, where: KeyPath) -> Iterator[Problem]:
    """A replicated value's gradient is one addend per rank: no message makes that of a complete one, or back."""
    sender, receiver = entry.tp, entry.receiver_tp
    has_gradient = is_float(entry.dtype or plan.run.dtype) if entry.gradient is None else entry.gradient
    if not has_gradient or receiver is None or plan.topology.tp == 1:
        return
    if (sender == "replicated") != (receiver == "replicated"):
        one, other = ("sender", "receiver") if sender == "replicated" else ("receiver", "sender")
        yield Problem(
            "PP106",
            (*where, "receiver_tp"),
            f"`{entry.name}` is replicated at its {one} and not at its {other}: its gradient is an addend on each rank "
            "there and complete here, and messages do not add",
            help="say invariant on both sides, or gradient: false if none flows",
        )
