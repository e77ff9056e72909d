"""Hypothesis strategies for plans and their sections: valid, small, and smaller as Hypothesis shrinks them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement, Request, ScheduleKind
from pipeproof.schedule.programs import UnfitSizesError
from pipeproof.specs.axis_layout import PlacementKind

Section = dict[str, Any]
"""A section of a plan file, or a whole one."""

AXES = ("pp", "tp", "dp", "cp", "ep")

DRAWN_KINDS = tuple(sorted(set(SCHEDULE_KINDS) - {"optimal"}, key=lambda name: (name not in ("gpipe", "1f1b"), name)))
"""Kinds of schedules that are drawn, the simplest first; ``optimal`` uses a solver and may take long."""


@st.composite
def topologies(
    draw: st.DrawFn, *, max_ranks: int = 16, axes: Collection[str] = AXES, min_pp: int = 1, max_pp: int = 4
) -> Section:
    """A section ``topology``: sizes 1 or 2 of each of ``axes``, more along ``pp``, ``max_ranks`` in all.

    ``order`` is drawn, too, where there is more than one axis to order.

    Raises:
        ValueError: no such topology exists, or an axis is none.
    """
    unknown = set(axes) - set(AXES)
    if unknown or not 1 <= min_pp <= min(max_pp, max_ranks):
        raise ValueError(f"no topology has axes {sorted(axes)}, pp {min_pp} to {max_pp} and at most {max_ranks} ranks")
    topology: Section = {"pp": draw(st.integers(min_pp, min(max_pp, max_ranks))) if "pp" in axes else 1}
    for axis in AXES[1:]:
        left = max_ranks // prod(topology.values())
        topology[axis] = draw(st.sampled_from([1, 2] if left > 1 else [1])) if axis in axes else 1
    used = [axis for axis in ("tp", "cp", "ep", "dp", "pp") if topology[axis] > 1]
    if topology["tp"] > 1:
        topology["sequence_parallel"] = draw(st.booleans())
    if len(used) > 1:
        topology["order"] = draw(st.permutations(["tp", "cp", "ep", "dp", "pp"]))
    return topology


@st.composite
def layouts(
    draw: st.DrawFn, *, num_dims: int = 3, kinds: Sequence[str] = ("invariant", "replicated", "sharded")
) -> str:
    """Layouts of a tensor of ``num_dims`` dims over an axis, as text: ``invariant``, ``sharded(0)``.

    ``kinds`` may have ``partial`` and ``varying``, too, which no plan's boundary may be.
    """
    kind = PlacementKind(draw(st.sampled_from(list(kinds))))
    if kind is not PlacementKind.SHARDED:
        return str(kind)
    return f"{kind}({draw(st.integers(0, num_dims - 1))})"


@st.composite
def schedules(
    draw: st.DrawFn,
    num_ranks: int,
    *,
    kinds: Sequence[str] = DRAWN_KINDS,
    max_micro_batches: int = 8,
    max_splits: int = 3,
) -> Section:
    """A section ``schedule`` that exists for so many pipeline ranks, of micro-batches of one or two rows.

    Kinds that cut sequences cut them into ``max_splits`` at most; a plan with ``cp`` over 1 takes 1.

    Raises:
        ValueError: an unknown kind.
    """
    unknown = set(kinds) - set(SCHEDULE_KINDS)
    if unknown:
        raise ValueError(f"no schedule is called {', '.join(sorted(unknown))}; `pipeproof schedule list` has them all")
    kind = SCHEDULE_KINDS[draw(st.sampled_from(list(kinds)))]
    most = max(kind.min_chunks, 3) if kind.max_chunks is None else min(kind.max_chunks, max(kind.min_chunks, 3))
    request = Request(
        num_ranks=num_ranks,
        num_micro_batches=draw(st.integers(1, max_micro_batches)),
        num_chunks=draw(st.integers(kind.min_chunks, most)),
        num_sequence_splits=draw(st.integers(1, max_splits)) if kind.splits_sequences else 1,
        variant=draw(st.sampled_from(kind.variants)) if kind.variants else None,
    )
    assume(_exists(kind, request))
    schedule: Section = {
        "kind": kind.name,
        "num_micro_batches": request.num_micro_batches,
        "micro_batch_size": draw(st.integers(1, 2)),
    }
    if request.num_chunks > 1:
        schedule["num_chunks"] = request.num_chunks
    if request.num_sequence_splits > 1:
        schedule["num_sequence_splits"] = request.num_sequence_splits
    if request.variant is not None:
        schedule["variant"] = request.variant
    return schedule


def _exists(kind: ScheduleKind, request: Request) -> bool:
    try:
        kind.generate(request)
    except UnfitSizesError:
        return False
    return True


@st.composite
def plans(
    draw: st.DrawFn,
    *,
    max_ranks: int = 8,
    axes: Collection[str] = AXES,
    min_pp: int = 1,
    kinds: Sequence[str] = DRAWN_KINDS,
) -> Section:
    """A whole plan that ``pipeproof check`` proves, as a mapping: a small GPT with a layer or two for each stage."""
    topology = draw(topologies(max_ranks=max_ranks, axes=axes, min_pp=min_pp))
    schedule = draw(schedules(topology["pp"], kinds=kinds, max_splits=1 if topology["cp"] > 1 else 3))
    num_stages = topology["pp"] * schedule.get("num_chunks", 1)
    if SCHEDULE_KINDS[schedule["kind"]].placement is Placement.BOTH_WAYS:
        num_stages = topology["pp"]
    model: Section = {
        "kind": "gpt",
        "num_layers": num_stages + draw(st.integers(0, 1)),
        "hidden_size": 8,
        "num_heads": 4,
        "ffn_size": 16,
        "vocab_size": 16,
        "seq_length": 24,  # divides over tp, cp and any number of splits that is drawn
    }
    if draw(st.booleans()):
        model["num_kv_heads"] = 2
    plan: Section = {"pipeproof": 1, "model": model, "topology": topology, "schedule": schedule}
    if not topology.get("sequence_parallel"):  # where `partial` is sound
        plan["transport"] = draw(st.sampled_from(["full", "partial"]))
    return plan
