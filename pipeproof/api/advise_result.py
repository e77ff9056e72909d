"""``pipeproof.advise``: better schedules for a plan, with reasons, records and a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from pipeproof.analysis.advise.advice_report import advice_to_json
from pipeproof.analysis.advise.search import Advice, Group
from pipeproof.analysis.advise.search import advise as find_advice
from pipeproof.api.given_plan import GivenPlan, Settings, load_given, name_of
from pipeproof.api.result import Records, Result, html_table, html_text, noted, printed

_WIDTH = 110
_SIZES = (
    "schedule", "variant", "num_chunks", "num_micro_batches", "micro_batch_size", "num_sequence_splits",
)  # fmt: skip


class AdviseResult(Result):
    """Result of ``advise``: the advice, with the table ``candidates``; times in microseconds."""

    _columns = MappingProxyType(
        {
            "candidates": (
                "group", *_SIZES, "makespan_us", "saved_us", "idle_ratio", "peak_activations", "deadlock", "why", "set",
            ),
        }
    )  # fmt: skip

    def __init__(self, advice: Advice, name: str) -> None:
        self.advice, self.name = advice, name

    def __repr__(self) -> str:
        """Return the number of candidates, the best one, and a note about times."""
        rows = self.to_records()
        best = f"; best {rows[0]['schedule']}, {rows[0]['makespan_us']:,.3f} us" if rows else ""
        note = self.advice.candidates.spec.cost.placeholder_note
        return f"<advise: {self.name}, {len(rows)} candidates{best}{noted(note)}>"

    def _dict(self) -> dict[str, Any]:
        return advice_to_json(self.advice)

    def _tables(self) -> dict[str, Records]:
        content = advice_to_json(self.advice)
        rows = []
        for group in Group:
            for candidate in content[group.value] or ():
                figures = candidate["figures"]
                rows.append(
                    {
                        "group": group.value,
                        **{key: candidate[key] for key in _SIZES},
                        **_numbers("makespan_us", figures, "makespan"),
                        **_numbers("saved_us", candidate, "saved"),
                        **_numbers("idle_ratio", figures, "idle_ratio"),
                        **_numbers("peak_activations", figures, "peak_activations"),
                        "deadlock": candidate["deadlock"],
                        "why": candidate["why"],
                        "set": {change["key"]: change["value"] for change in candidate["set"]},
                    }
                )
        return {"candidates": rows}

    def _parts(self) -> Iterator[str]:
        from pipeproof.analysis.advise.advice_text import render_advice

        yield html_text(printed(_WIDTH, lambda console: render_advice(self.advice, console)))
        yield html_table([{**row, "set": settings_text(row["set"])} for row in self.to_records()], "candidates")


def _numbers(column: str, content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A number of the JSON form under another name, with its exact text where there is one."""
    exact = content.get(f"{key}_exact")
    return {column: content[key], **({} if exact is None else {f"{column}_exact": exact})}


def settings_text(settings: dict[str, Any]) -> str:
    """Return values by key on one line."""
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def advise(
    plan: GivenPlan,
    memory_limit: int | None = None,
    *,
    top: int = 5,
    with_over_limit: bool = False,
    every_schedule: bool = False,
    settings: Settings | None = None,
) -> AdviseResult:
    """Find better schedules, chunk counts and micro-batch counts for a plan.

    Args:
        plan: A path, a dict, a ``PlanSpec`` or a loaded plan.
        memory_limit: Most activations of the largest stage that a rank may hold; by default that of the plan.
        top: Candidates of each group.
        with_over_limit: Also list candidates over the limit.
        every_schedule: Also try schedules that the framework which the plan names does not have.
        settings: Values by dotted key, which win over those of the plan.

    Raises:
        BadPlanError: it is not a valid plan, or cannot be lowered.
        NoTrainingError: the plan has no backwards.
    """
    advice = find_advice(
        load_given(plan, settings), memory_limit, top=top, with_over_limit=with_over_limit,
        every_schedule=every_schedule,
    )  # fmt: skip
    return AdviseResult(advice, name_of(plan))
