"""A comparison of two timelines for people and, as JSON, for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from pipeproof.analysis.compare.compare_timelines import Comparison, Divergence, PairedOp
from pipeproof.analysis.compare.timeline_files import TimelineFile
from pipeproof.diagnostics.units import signed_time_text, time_text
from pipeproof.schedule.ops import OpKind
from pipeproof.sim.timeline import Span, Timeline, figures_of

if TYPE_CHECKING:
    from rich.console import Console

_WORDS = {"plan": "plan, simulated", "trace": "trace", "report": "report of a run"}


def render_comparison(comparison: Comparison, console: Console, *, worst: int, note: str) -> None:
    """Print the faster one, the kinds of both files, totals and errors, the first divergence and the worst operations.

    ``note`` is about the costs of two plans.
    """
    from pipeproof.views.tables import print_table

    console.print(_verdict(comparison), soft_wrap=True)
    for name, file in (("A", comparison.a), ("B", comparison.b)):
        clock = "measured" if file.measured else "simulated"
        about = _WORDS[file.source] + (f", {clock}" if file.source == "trace" else "")
        console.print(f"{name}  {file.file}: {about}, {len(file.ops)} operations", soft_wrap=True, markup=False)
    for sentence in dict.fromkeys((comparison.a.note, comparison.b.note, note)):
        if sentence:
            console.print(sentence, soft_wrap=True, markup=False)
    clocks = "at the first operation of each rank" if comparison.per_rank_clocks else "at the first start of all"
    console.print(f"clocks are set equal {clocks}; errors are B - A\n", soft_wrap=True)

    totals = [
        (
            str(step.step_a), str(step.step_b), time_text(step.makespan_a), time_text(step.makespan_b),
            _ratio(_quotient(step.makespan_b, step.makespan_a)), time_text(step.compute_a), time_text(step.compute_b),
            _ratio(_quotient(step.compute_b, step.compute_a)),
        )
        for step in comparison.steps
    ]  # fmt: skip
    headings = ("step of A", "of B", ">step time A", ">B", ">B / A", ">computing A", ">B", ">B / A")
    print_table(headings, totals, console)
    console.print()
    if comparison.kinds:
        kinds = [
            (
                str(kind.kind), str(kind.count), _ratio(kind.median_ratio), signed_time_text(kind.median_error),
                signed_time_text(kind.max_error), signed_time_text(kind.median_start_error),
                signed_time_text(kind.max_start_error),
            )
            for kind in comparison.kinds
        ]  # fmt: skip
        console.print("operations that both have:")
        numbers = (">number", ">median B / A", ">median error", ">farthest", ">start: median", ">farthest")
        print_table(("kind", *numbers), kinds, console)
        console.print()
    else:
        console.print("no operation is in both")
    for name, only in (("A", comparison.only_a), ("B", comparison.only_b)):
        if only:
            text = ", ".join(f"{number} {kind}" for kind, number in only.items())
            console.print(f"only in {name}: {text}", soft_wrap=True)
    console.print(_divergence_text(comparison.first_divergence), soft_wrap=True)
    listed = comparison.worst(worst)
    if listed:
        ops = [
            (
                str(pair.a.op), str(pair.a.rank), _steps(pair), time_text(pair.a.duration), time_text(pair.b.duration),
                signed_time_text(pair.duration_error), signed_time_text(pair.start_error),
            )
            for pair in listed
        ]  # fmt: skip
        console.print("\nfarthest apart in length:")
        print_table(("op", ">rank", ">step", ">A", ">B", ">error", ">start"), ops, console)


def _verdict(comparison: Comparison) -> str:
    """The faster of the two in the last step that was compared, with bubbles and activations."""
    last = comparison.steps[-1]
    facts = []
    for file, step, makespan in (
        (comparison.a, last.step_a, last.makespan_a), (comparison.b, last.step_b, last.makespan_b),
    ):  # fmt: skip
        figures = figures_of(_timeline_of(file, step))
        ranks = [of_rank for of_rank in figures if of_rank.busy_us]
        bubble = float(sum(of_rank.bubble_makespan_ratio for of_rank in ranks) / max(1, len(ranks)))
        peak = max((of_rank.peak_activations for of_rank in figures), default=0)
        facts.append((time_text(makespan), f"{bubble:.1%}", str(peak)))
    ratio = _quotient(last.makespan_b, last.makespan_a)
    if ratio is None or ratio == 1:
        lead = "A and B take equally long"
    else:
        lead = f"B takes {abs(float(ratio) - 1):.1%} {'longer' if ratio > 1 else 'less time'} than A"
    time, bubble_text, peak_text = (f"A {of_a}, B {of_b}" for of_a, of_b in zip(*facts, strict=True))
    return f"{lead}: {time}; bubble {bubble_text}; activations held at most {peak_text}"


def _timeline_of(file: TimelineFile, step: int) -> Timeline:
    """A step from time 0 on."""
    ops = [op for op in file.ops if op.step == step]
    origin = min((op.start for op in ops), default=Fraction(0))
    spans = (Span(op.rank, op.queue, at, str(op.op), op.start - origin, op.end - origin) for at, op in enumerate(ops))
    return Timeline(tuple(spans), ({},) * (max((op.rank for op in ops), default=-1) + 1))


def _divergence_text(divergence: Divergence | None) -> str:
    if divergence is None:
        return "the order of computations and transfers is the same on every queue"
    a, b = (op or "nothing more" for op in (divergence.op_a, divergence.op_b))
    return (
        f"the first divergence is on rank {divergence.rank}, queue {divergence.queue}, position {divergence.place} "
        f"(step {divergence.step_a} of A, {divergence.step_b} of B): A has {a}, B has {b}"
    )


def _steps(pair: PairedOp) -> str:
    return str(pair.a.step) if pair.a.step == pair.b.step else f"{pair.a.step}, {pair.b.step}"


def _quotient(b: Fraction, a: Fraction) -> Fraction | None:
    return b / a if a else None


def _ratio(ratio: Fraction | None) -> str:
    return "-" if ratio is None else f"{float(ratio):.3f}"


def comparison_to_json(comparison: Comparison, *, worst: int, note: str = "") -> dict[str, Any]:
    """The form of ``compare --format json``; see ``docs/schemas/compare.schema.json``."""
    data = comparison_data(comparison, worst=worst, note=note)
    return data | {name: [_floats(row) for row in data[name]] for name in ("steps", "kinds", "worst")}


def comparison_data(comparison: Comparison, *, worst: int, note: str) -> dict[str, Any]:
    """The data of ``comparison_to_json`` with exact times and ratios, as fractions."""
    return {
        "unit": "us",
        "costs": note or None,
        "a": _file_to_json(comparison.a),
        "b": _file_to_json(comparison.b),
        "clocks": "per_rank" if comparison.per_rank_clocks else "common",
        "steps": [
            {
                **asdict(step),
                "makespan_ratio": _quotient(step.makespan_b, step.makespan_a),
                "compute_ratio": _quotient(step.compute_b, step.compute_a),
            }
            for step in comparison.steps
        ],
        "kinds": [asdict(kind) for kind in comparison.kinds],
        "only_a": _counts(comparison.only_a),
        "only_b": _counts(comparison.only_b),
        "first_divergence": None if comparison.first_divergence is None else asdict(comparison.first_divergence),
        "worst": [
            {
                "rank": pair.a.rank,
                "op": str(pair.a.op),
                "step_a": pair.a.step,
                "step_b": pair.b.step,
                "duration_a": pair.a.duration,
                "duration_b": pair.b.duration,
                "error": pair.duration_error,
                "start_error": pair.start_error,
            }
            for pair in comparison.worst(worst)
        ],
    }


def _file_to_json(file: TimelineFile) -> dict[str, Any]:
    return {
        "file": file.file,
        "source": file.source,
        "measured": file.measured,
        "num_ops": len(file.ops),
        "cost_source": file.cost_source,
    }


def _floats(content: dict[str, Any]) -> dict[str, Any]:
    return {name: float(value) if isinstance(value, Fraction) else value for name, value in content.items()}


def _counts(only: Mapping[OpKind, int]) -> dict[str, int]:
    return {str(kind): number for kind, number in only.items()}
