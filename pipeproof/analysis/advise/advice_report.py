"""Advice as JSON; the form is published as ``docs/schemas/advise.schema.json``."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from pipeproof.analysis.advise.critical_path import CriticalPath
from pipeproof.analysis.advise.plan_change import Change, change_between
from pipeproof.analysis.advise.reasons import caveats, idle_parts, why_better, why_now, why_receives
from pipeproof.analysis.advise.receive_timing import OtherPost
from pipeproof.analysis.advise.schedule_figures import Figures
from pipeproof.analysis.advise.search import Advice, Group, Verified
from pipeproof.sim.figures import number_to_json
from pipeproof.specs.plan import PlanSpec
from pipeproof.verify.deadlock.deadlock_rules import models_text


def change_to(advice: Advice, verified: Verified) -> Change:
    """Changes of the plan file that give a candidate."""
    after = verified.candidate.spec.model_dump(mode="json", exclude_unset=True)
    return change_between(advice.candidates.data, after)


def advice_to_json(advice: Advice) -> dict[str, Any]:
    """The advice as JSON. Times are in ``unit``; a time without an exact binary form has an ``_exact`` key, too."""
    candidates, best = advice.candidates, advice.best
    return {
        "unit": "us",
        "cost_source": candidates.spec.cost.source,
        **number_to_json("activation", candidates.activation),
        "memory_limit": None if candidates.room is None else int(candidates.room / candidates.activation),
        "plan": {
            **_sizes(candidates.spec),
            "errors": list(advice.errors),
            "figures": None if advice.present is None else _figures(advice, advice.present, advice.path),
            "why": None if advice.present is None or advice.path is None else why_now(advice.present, advice.path),
        },
        "receives": [_receives(advice, other) for other in advice.receives],
        "best": None if best is None else why_better(advice, best),
        **{
            group.value: [_candidate(advice, verified) for verified in advice.listed[group]]
            if group in advice.listed
            else None
            for group in Group
        },
        "num_timed": advice.num_timed,
        "impossible": _counted("reason", advice.impossible),
        "refused": _counted("code", advice.refused),
        "gave_up": advice.gave_up,
    }


def _receives(advice: Advice, other: OtherPost) -> dict[str, Any]:
    assert advice.present is not None, "what has such advice has run"
    return {
        "recv_order": other.recv_order,
        **number_to_json("makespan", other.makespan_us),
        **number_to_json("saved", advice.present.makespan_us - other.makespan_us),
        "deadlock": "conditional" if other.failing else "robust",
        "deadlocks_with": models_text(other.failing) if other.failing else None,
        "why": why_receives(advice, other),
        "set": [{"key": "transport.recv_order", "value": other.recv_order}],
    }


def _candidate(advice: Advice, verified: Verified) -> dict[str, Any]:
    change = change_to(advice, verified)
    figures = verified.candidate.figures
    saved = None if advice.present is None else advice.present.makespan_us - figures.makespan_us
    return {
        **_sizes(verified.candidate.spec),
        "figures": _figures(advice, figures, verified.path),
        **({"saved": None} if saved is None else number_to_json("saved", saved)),
        "deadlock": "conditional" if verified.failing else "robust",
        "deadlocks_with": models_text(verified.failing) if verified.failing else None,
        "why": why_better(advice, verified),
        "caveats": caveats(advice, verified),
        "set": [
            {"key": f"{section}.{key}", "value": value}
            for section, values in change.set.items()
            for key, value in values.items()
        ],
        "remove": list(change.remove),
    }


def _sizes(spec: PlanSpec) -> dict[str, Any]:
    schedule = spec.schedule
    return {
        "schedule": schedule.kind,
        "variant": schedule.variant,
        "num_chunks": schedule.num_chunks,
        "num_micro_batches": schedule.num_micro_batches,
        "micro_batch_size": schedule.micro_batch_size,
        "num_sequence_splits": schedule.num_sequence_splits,
    }


def _figures(advice: Advice, figures: Figures, path: CriticalPath | None) -> dict[str, Any]:
    assert path is not None, "what has figures has run"
    idle = idle_parts(figures, path)
    return {
        **number_to_json("makespan", figures.makespan_us),
        **number_to_json("work", figures.work_us),
        **number_to_json("idle", figures.idle_us),
        **number_to_json("idle_ratio", figures.idle_ratio),
        **number_to_json("overload", idle.overload),
        **number_to_json("messages", idle.messages),
        **number_to_json("fill", idle.fill),
        "busiest_rank": figures.busiest,
        **number_to_json("peak_activations", figures.peak / advice.candidates.activation),
        **number_to_json("peak_block_sequences", figures.peak),
        "peak_rank": figures.peak_rank,
        "critical": _path(path, idle.largest),
    }


def _path(path: CriticalPath, cause: str | None) -> dict[str, Any]:
    return {
        "cause": cause,
        "rank": path.rank,
        "edge": None if path.edge is None else list(path.edge),
        **number_to_json("warm_up", Fraction(path.warm_up)),
        **number_to_json("steady", Fraction(path.steady)),
        **number_to_json("cool_down", Fraction(path.cool_down)),
        "compute": [{"rank": rank, **number_to_json("time", Fraction(time))} for rank, time in path.compute.items()],
        "messages": [
            {"source": source, "target": target, **number_to_json("time", Fraction(time))}
            for (source, target), time in path.messages.items()
        ],
        "held_up": [{"rank": rank, **number_to_json("time", Fraction(time))} for rank, time in path.held_up.items()],
    }


def _counted(name: str, counts: Mapping[str, int]) -> list[dict[str, str | int]]:
    return [{name: what, "count": count} for what, count in counts.items()]
