"""Advice in a terminal: the plan as it is, tables of candidates, and the change that makes the best of them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from pipeproof.analysis.advise.advice_report import change_to
from pipeproof.analysis.advise.candidates import Changed
from pipeproof.analysis.advise.reasons import caveats, name_of, percent, why_better, why_now, why_receives
from pipeproof.analysis.advise.schedule_figures import Figures
from pipeproof.analysis.advise.search import MAX_REFUSED, Advice, Group, Verified
from pipeproof.views.tables import print_table
from pipeproof.views.timeline_text import format_us

_TITLES = {
    Group.BETTER: "Better, with the plan's own micro-batches",
    Group.COPIED: "Better if every stage may be on two ranks, with its weights twice",
    Group.RESIZED: "Better with other micro-batches or splits",
    Group.OVER_LIMIT: "Over the memory limit: they need what is their peak",
}


def render_advice(advice: Advice, console: Console, *, all_reasons: bool = False) -> None:
    """Print what was found; with ``all_reasons``, also why schedules were left out."""
    cost = advice.candidates.spec.cost
    if cost.placeholder_note:
        _print(console, f"{cost.placeholder_note.capitalize()}.")
    _print(console, _now(advice))
    for other in advice.receives:
        _print(console, why_receives(advice, other))
    for group, listed in advice.listed.items():
        if listed:
            console.print()
            is_computed = advice.candidates.spec.cost.analytic is not None
            belief = "" if is_computed or group is not Group.RESIZED else ", if time is in proportion to tokens"
            _print(console, f"{_TITLES[group]}{belief}:")
            _print_listed(advice, listed, group, console)
    console.print()
    _print(console, _unit(advice))
    _print(console, _counts(advice))
    if _has_other_stages(advice):
        _print(console, "Costs are per layer: stages of another partition take the times of their layers in this plan.")
    if all_reasons:
        for reason, count in advice.impossible.items():
            _print(console, f"  not possible ({count}): {reason}")
    console.print()
    _render_best(advice, console)


def _now(advice: Advice) -> str:
    schedule = advice.candidates.spec.schedule
    text = f"Now: {name_of(advice.candidates.spec)}, {schedule.num_micro_batches} x {schedule.micro_batch_size}"
    if advice.present is None or advice.path is None:
        text += ": it never ends."
    else:
        text += (
            f": {format_us(advice.present.makespan_us)} us a step, {percent(advice.present.idle_ratio)} of it idle, "
            f"peak {_peak(advice, advice.present)}. {why_now(advice.present, advice.path)}"
        )
    cost = advice.candidates.spec.cost
    if cost.analytic is not None or cost.network is not None or cost.optimizer_us != 0:
        text += (
            " Steps are timed to their last computation, without gradient reductions and the optimizer; every message "
            "takes what the slowest does, and links are not shared."
        )
    if advice.errors:
        text += f" The plan does not pass check ({', '.join(advice.errors)}): fix that too."
    return text


def _print_listed(advice: Advice, listed: Sequence[Verified], group: Group, console: Console) -> None:
    rows = []
    for verified in listed:
        choice, figures = verified.candidate.choice, verified.candidate.figures
        is_copied = Changed.COPIES in advice.candidates.changes(choice)
        rows.append(
            (
                name_of(verified.candidate.spec) + (" (two copies)" if is_copied and group is not Group.COPIED else ""),
                f"{choice.num_micro_batches} x {choice.micro_batch_size}",
                format_us(figures.makespan_us),
                _saved(advice, figures),
                percent(figures.idle_ratio),
                _peak(advice, figures),
                "conditional" if verified.failing else "robust",
            )
        )
    headings = ("schedule", ">micro-batches", ">step us", ">saved", ">idle", ">peak", "deadlock")
    print_table(headings, rows, console, optional=("idle", "saved"))


def _render_best(advice: Advice, console: Console) -> None:
    best = advice.best
    if best is None:
        limit = " within the memory limit" if advice.candidates.room is not None else ""
        _print(console, "Fix the plan first." if advice.gave_up else f"Nothing that was tried is better{limit}.")
        return
    for sentence in (why_better(advice, best), *caveats(advice, best)):
        _print(console, sentence)
    _print(console, "Change the plan as follows:")
    for line in change_to(advice, best).lines():
        console.print(Text(f"  {line}"), soft_wrap=True, no_wrap=True)


def _saved(advice: Advice, figures: Figures) -> str:
    if advice.present is None:
        return ""
    saved = 1 - figures.makespan_us / advice.present.makespan_us
    return percent(saved)


def _peak(advice: Advice, figures: Figures) -> str:
    return format_us(figures.peak / advice.candidates.activation)


def _has_other_stages(advice: Advice) -> bool:
    """True if a listed candidate has other stages than the plan, with times that follow from those of the plan."""
    spec = advice.candidates.spec
    listed = [verified for group in advice.listed.values() for verified in group]
    return spec.cost.analytic is None and any(v.candidate.spec.num_stages != spec.num_stages for v in listed)


def _unit(advice: Advice) -> str:
    candidates = advice.candidates
    size = format_us(candidates.activation)
    text = (
        "Peak: most activations that a rank holds, from F to the end of B or W, in those of the plan's largest stage "
        f"for a micro-batch (one is {size} times a transformer block's for a sequence)"
    )
    if candidates.room is not None:
        text += f"; the limit is {format_us(candidates.room / candidates.activation)}"
    return text + "."


def _counts(advice: Advice) -> str:
    num_impossible = sum(advice.impossible.values())
    framework = advice.candidates.framework
    of_framework = "" if framework is None else f"Only schedules of {framework.title} were tried (`--all`: all). "
    text = (
        of_framework
        + f"Timed {advice.num_timed} candidates; {num_impossible} more do not exist for the plan's sizes and keys"
    )
    if advice.refused:
        codes = ", ".join(f"{code} ({count})" for code, count in advice.refused.items())
        text += f"; {sum(advice.refused.values())} failed their check: {codes}"
    if advice.gave_up:
        return f"{text}. After more than {MAX_REFUSED} failures no more were checked."
    return f"{text}. All that are listed passed their check." if any(advice.listed.values()) else f"{text}."


def _print(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
