"""The result of a search in a terminal: a table of layouts, why the first one wins, and the numbers of layouts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from pipeproof.analysis.tune.frameworks import FRAMEWORKS
from pipeproof.analysis.tune.present_step import PresentStep
from pipeproof.analysis.tune.tune_reasons import DIFFERENCE_ERRORS
from pipeproof.analysis.tune.tune_result import TuneResult, TuneRow
from pipeproof.diagnostics.units import size_text, time_text
from pipeproof.sim.memory_curve import GIB
from pipeproof.views.tables import print_table

_COLUMNS = (
    ("PP", "pp"), ("VPP", "vpp"), ("TP", "tp"), ("CP", "cp"), ("EP", "ep"), ("DP", "dp"), ("MBS", "mbs"),
    ("schedule", "schedule_name"), ("placement", "placement"), ("splits", "num_sequence_splits"),
    ("memory limit", "memory_limit"), ("cut", "cut"), ("recompute", "recompute"),
    ("shard optimizer", "shard_optimizer"), ("overlap", "overlap"),
)  # fmt: skip
"""Headings of the varied attributes of a layout, and their names."""

_NUMBERS = ("pp", "vpp", "tp", "cp", "ep", "dp", "mbs", "num_sequence_splits", "memory_limit")
_OF_PLANS = ("placement", "num_sequence_splits", "memory_limit")
"""Attributes that only a search on a plan's own ranks varies; a column each only if rows differ."""
_OF_DEVICES = ("pp", "tp", "cp", "ep", "dp", "recompute", "shard_optimizer")
"""Attributes that such a search leaves as they are."""


def render_tune(result: TuneResult, console: Console) -> None:
    """Print the rows with the columns in which they differ, and one line for their common values."""
    present = result.present
    _print_head(result, console)
    if not result.rows:
        _print(f"{_nothing_text(result)} {_counts_text(result)}", console)
        return
    has_exchanges = any(row.layout.ep > 1 for row in result.rows)  # without, there is nothing to overlap
    varied = [column for column in _COLUMNS if column[1] != "overlap" or has_exchanges]
    columns = [column for column in varied if len({getattr(row.layout, column[1]) for row in result.rows}) > 1]
    shared = [
        f"{heading} {getattr(result.rows[0].layout, name)}"
        for heading, name in varied
        if (heading, name) not in columns and name not in (_OF_PLANS if present is None else _OF_PLANS + _OF_DEVICES)
    ]
    headings = [
        ">#", *(f">{heading}" if name in _NUMBERS else heading for heading, name in columns), *_figure_names(result),
    ]  # fmt: skip
    rows = [
        (
            f"={row.rank}" if row.difference_error is not None else str(row.rank),
            *("" if (value := getattr(row.layout, name)) is None else str(value) for _, name in columns),
            *_figures(row, result),
        )
        for row in result.rows
    ]
    print_table(headings, rows, console, optional=("TFLOP/s", "comm.", "bubble", "MFU"))
    if shared:
        _print(f"All rows: {', '.join(shared)}.", console)
    for note in (*_error_text(result), *result.notes):
        _print(note, console)
    console.print()
    for row in result.rows:
        if present is not None and present.step_us is not None:
            _print(f"Row {row.rank} against the plan: {row.why}.", console)
        else:
            _print(f"{'Why row 1' if row.rank == 1 else f'Row {row.rank} against row 1'}: {row.why}.", console)
    conditional = [row for row in result.rows if row.deadlocks_with is not None]
    if conditional:
        numbers = ", ".join(str(row.rank) for row in conditional)
        _print(f"Conditional: {numbers}. Row {conditional[0].rank} deadlocks with {conditional[0].deadlocks_with}, and "
               "is safe on its backend.", console)  # fmt: skip
    console.print()
    _print(_counts_text(result), console)
    _print("Every row has passed `pipeproof check`.", console)
    if present is not None:
        _print("Row 1 is this change of the plan:", console)
        before = present.spec.model_dump(mode="json", exclude_unset=True)
        for line in change_lines(before, result.rows[0].plan):
            console.print(Text(f"  {line}"), soft_wrap=True, no_wrap=True)


def _print_head(result: TuneResult, console: Console) -> None:
    """Print the devices, or the unchanged plan."""
    present, title = result.present, "" if result.framework == "any" else FRAMEWORKS[result.framework].title
    if result.device is None and present is None:
        limit = "" if result.memory_gib is None else f", {result.memory_gib:g} GiB each"
        _print(f"{result.num_gpus} ranks{limit}, {result.global_batch} rows in a step.", console)
    elif present is None:
        _print(
            f"{result.num_gpus} {result.device}, {result.memory_gib:g} GiB each, {result.global_batch} sequences of "
            f"{result.seq_length} tokens in a step, {title}.",
            console,
        )
    else:
        if note := present.spec.placeholder_note:
            _print(f"{note.capitalize()}.", console)
        _print(_present_text(present), console)
        if title:
            _print(f"Only schedules of {title} were tried (`--framework any`: all).", console)
    for assumption in result.assumptions:
        _print(f"Assumed: {assumption}.", console)
    console.print()


def _present_text(present: PresentStep) -> str:
    schedule = present.spec.schedule
    text = f"Now: {schedule.kind}, {schedule.num_micro_batches} x {schedule.micro_batch_size}"
    if present.step_us is None or present.parts_s is None or present.peak_bytes is None:
        text += ": it never ends."
    else:
        bubble = present.parts_s["bubble"] / float(present.step_us / 10**6)
        text += f": {time_text(present.step_us)} a step, bubble {bubble:.1%}, {size_text(present.peak_bytes)}. "
        text += present.why or ""
    if present.errors:
        text += f" The plan does not pass check ({', '.join(present.errors)}): fix that too."
    return text


def _error_text(result: TuneResult) -> Iterator[str]:
    error, ties = result.expected_error, {row.difference_error for row in result.rows} - {None}
    if error is None:
        if result.device is not None:
            yield f"No step like these was measured on {result.device}: how far the predictions are off is not known."
        return
    yield (
        f"Predicted steps are off by {error:.1%} in the mean of comparable measurements; 80 % of these are within the "
        "+- of a row, which depends on what bounds it."
    )
    if ties:
        schedule, replicas, shards = (f"{share:.1%}" for share in DIFFERENCE_ERRORS.values())
        yield (
            "Rows with = are a tie with the shortest step, so measure them. The difference of two rows is off by "
            f"{schedule} with one mesh and micro-batch, by {replicas} with other pp, dp or micro-batches, by {shards} "
            "with other tp, cp or ep."
        )


def _nothing_text(result: TuneResult) -> str:
    if result.present is not None:
        return "Fix the plan first." if result.present.errors else "Nothing that was tried is better."
    text = "No layout fits." if result.counts.tried else f"No layout is possible on {result.num_gpus} devices."
    return text if result.nearest is None else f"{text} {result.nearest}"


def _figure_names(result: TuneResult) -> list[str]:
    rates = [">tokens/s/GPU", ">TFLOP/s", ">MFU"] if result.device is not None else []
    step = [">step"] if result.present is None else [">step", ">saved"]
    return [*step, *rates, ">memory", ">bubble", ">comm."]


def _figures(row: TuneRow, result: TuneResult) -> Iterator[str]:
    within = row.step_within
    yield time_text(row.step * 10**6) + ("" if within is None else f" +-{within:.{0 if within >= 0.1 else 1}%}")
    if result.present is not None:
        now = result.present.step_us
        yield "" if now is None else f"{float(1 - row.step * 10**6 / now):.1%}"
    if result.device is not None:
        yield f"{row.tokens_per_s_per_gpu:,.0f}"
        yield "" if row.tflops_per_gpu is None else f"{row.tflops_per_gpu:.0f}"
        yield "" if row.mfu is None else f"{row.mfu:.1%}"
    yield size_text(row.peak_gib * GIB)
    yield f"{row.parts_s['bubble'] / row.step_s:.1%}"
    yield f"{row.parts_s['communication'] / row.step_s:.1%}"


def _counts_text(result: TuneResult) -> str:
    counts, sentences = result.counts, []
    others = "the last row" if result.present is None else "the last row or the plan"
    is_cut = any("simulated forwards" in reason for reason in counts.removed)
    rest = "the rest were not" if is_cut else f"the rest cannot be faster than {others}"
    if counts.tried:
        sentences.append(
            f"Of {counts.tried:,} layouts, {counts.over_memory:,} need more memory by their lower bound and "
            f"{counts.unfit:,} have no such schedule; {counts.simulated:,} of the other {counts.bounded:,} were "
            f"simulated, {rest}; {counts.over_memory_simulated:,} simulated ones needed more memory."
        )
    if counts.removed:
        reasons = "; ".join(f"{reason} ({number:,})" for reason, number in counts.removed.items())
        sentences.append(f"Not tried: {reasons}.")
    if counts.refused:
        sentences.append(f"Refused: {', '.join(f'{code} ({number})' for code, number in counts.refused.items())}.")
    return " ".join(sentences)


def _print(text: str, console: Console) -> None:
    console.print(Text(text))


def change_lines(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The change from one plan to another, both as written, as lines of a plan file; removed keys are in comments."""
    removed, lines = [section for section in before if section not in after], list[str]()
    for section, values in after.items():
        old = before.get(section, {})
        if values == old:
            continue
        if not isinstance(values, Mapping):
            lines.append(f"{section}: {_flow(values)}")
            continue
        removed += [f"{section}.{key}" for key in old if key not in values]
        changed = {key: value for key, value in values.items() if key not in old or old[key] != value}
        lines += [f"{section}:"] * bool(changed)
        lines += [f"  {key}: {_flow(value)}" for key, value in changed.items() if key != "layers"]
        if "layers" in changed:
            lines.append("  # layers: including layers that pass on their input, in the plan that -o writes")
    return [*(f"# remove {key}" for key in removed), *lines]


def _flow(value: Any) -> str:
    """A value on one line."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**9)).removesuffix("...\n").strip()
