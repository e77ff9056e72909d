"""Checks of declared boundary tensors, and of micro-batches of different sizes, against the rest of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from pipeproof.diagnostics.problems import KeyPath, Problem
from pipeproof.specs.plan_sections import PlanSections
from pipeproof.specs.transport import SHARDED_DIM, BoundarySpec, is_float


def check_boundaries(plan: PlanSections) -> list[Problem]:
    """PP106, PP108, PP109: entries of ``boundaries`` and sizes by micro-batch agree with the rest of the plan."""
    problems = [*_check_sizes(plan), *_check_sequence_shards(plan)]
    names: dict[tuple[int | None, str], int] = {}
    for index, entry in enumerate(plan.boundaries):
        path: KeyPath = ("boundaries", index)
        last = plan.num_stages - 2
        if entry.edge is not None and entry.edge > last:
            message = f"`edge` {entry.edge} lies between stages {entry.edge} and {entry.edge + 1}, and the plan has "
            message += f"{plan.num_stages} stage{'s' if plan.num_stages > 1 else ''}"
            fix = f"use 0 to {last}, or remove `edge` for all" if last >= 0 else "remove the entry"
            problems.append(Problem("PP106", (*path, "edge"), message, help=fix))
        conflict = next((names[key] for key in ((entry.edge, entry.name), (None, entry.name)) if key in names), None)
        if conflict is None and entry.edge is None:
            conflict = next((i for (_, name), i in names.items() if name == entry.name), None)
        if conflict is not None:
            message = f"`{entry.name}` crosses the same edge as entry {conflict} of the same name"
            problems.append(Problem("PP106", (*path, "name"), message, help="give each tensor of an edge its own name"))
        names.setdefault((entry.edge, entry.name), index)
        if plan.transport.messages == "packed" and entry.receiver_tp not in (None, entry.tp):
            message = f"`{entry.name}` changes its layout from {entry.tp} to {entry.receiver_tp}, and a packed message "
            fix = "give both sides one layout, or use `transport: {messages: per_tensor}`"
            problems.append(Problem("PP106", (*path, "receiver_tp"), message + "has one layout", help=fix))
        problems += _check_shards(plan, entry, path)
        problems += _check_gradient(plan, entry, path)
    return problems


def _check_sizes(plan: PlanSections) -> Iterator[Problem]:
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
        if length > plan.gpt.seq_length:
            yield Problem(
                "PP106",
                ("schedule", "seq_lengths", index),
                f"micro-batch {index} has {length} tokens in a sequence, more than model.seq_length "
                f"{plan.gpt.seq_length}",
                help=f"use at most {plan.gpt.seq_length}, or raise model.seq_length",
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


def _check_sequence_shards(plan: PlanSections) -> Iterator[Problem]:
    """Sequences of every micro-batch divide over the ranks that share them."""
    topology = plan.topology
    splits = {"cp": topology.cp, "tp": topology.tp if topology.sequence_parallel else 1}
    num_parts = prod(splits.values())
    factors = " x ".join(f"topology.{axis} {size}" for axis, size in splits.items() if size > 1)
    lengths: Sequence[tuple[KeyPath, str, int]] = [
        (("schedule", "seq_lengths", i), f"schedule.seq_lengths[{i}]", n)
        for i, n in enumerate(plan.schedule.seq_lengths or ())
    ]
    if topology.cp > 1:
        lengths = [(("model", "seq_length"), "model.seq_length", plan.gpt.seq_length), *lengths]
    for path, name, length in lengths:
        if length % num_parts:
            yield Problem(
                "PP108",
                path,
                f"{name} {length} does not divide by {factors}: these ranks share each sequence",
                help=f"use a multiple of {num_parts}",
            )


def _check_shards(plan: PlanSections, entry: BoundarySpec, path: KeyPath) -> Iterator[Problem]:
    """PP108: sharded dims divide in every micro-batch."""
    num_tp = plan.topology.tp
    for key in ("tp", "receiver_tp"):
        match = SHARDED_DIM.fullmatch(getattr(entry, key) or "")
        if match is None or num_tp == 1 or match[1] not in entry.dims:
            continue
        for size in _sizes_of(plan, entry, match[1]):
            if size % num_tp:
                yield Problem(
                    "PP108",
                    (*path, key),
                    f"dim {match[1]} of `{entry.name}` has {size} elements, which do not divide by "
                    f"topology.tp {num_tp}",
                    help="shard another dim, or write invariant or replicated",
                )
                break


def _sizes_of(plan: PlanSections, entry: BoundarySpec, dim: str) -> list[int]:
    """The sizes of a dim over the micro-batches, on one context-parallel rank."""
    if entry.shape is not None:
        position = entry.dims.index(dim)
        return [entry.shape[position]] if position < len(entry.shape) else []
    schedule = plan.schedule
    if dim == "s":
        lengths = schedule.seq_lengths or (plan.gpt.seq_length,)
        return [length // plan.topology.cp for length in lengths]
    if dim == "b":
        return [schedule.micro_batch_size, schedule.last_micro_batch_size or schedule.micro_batch_size]
    return [plan.gpt.hidden_size] if dim == "h" else []


def _check_gradient(plan: PlanSections, entry: BoundarySpec, path: KeyPath) -> Iterator[Problem]:
    """The gradient of a replicated value is one addend per rank; no message converts between addends and sums."""
    sender, receiver = entry.tp, entry.receiver_tp
    has_gradient = is_float(entry.dtype or plan.run.dtype) if entry.gradient is None else entry.gradient
    if not has_gradient or receiver is None or plan.topology.tp == 1:
        return
    if (sender == "replicated") != (receiver == "replicated"):
        replicated, complete = ("sender", "receiver") if sender == "replicated" else ("receiver", "sender")
        yield Problem(
            "PP106",
            (*path, "receiver_tp"),
            f"`{entry.name}` is replicated at its {replicated} and not at its {complete}: its gradient is an addend on "
            f"each rank of the {replicated} and a sum on the {complete}, and messages do not add",
            help="write invariant on both sides, or gradient: false if there is none",
        )
