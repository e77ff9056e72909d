"""The result of a search in a terminal: a table of layouts, why the first one wins, and what was tried."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from pipeproof.analysis.tune.frameworks import FRAMEWORKS
from pipeproof.analysis.tune.tune_result import TuneResult, TuneRow
from pipeproof.views.tables import print_table

_COLUMNS = (
    ("PP", "pp"), ("VPP", "vpp"), ("TP", "tp"), ("CP", "cp"), ("EP", "ep"), ("DP", "dp"), ("MBS", "mbs"),
    ("schedule", "schedule_name"), ("cut", "cut"), ("recompute", "recompute"), ("shard optimizer", "shard_optimizer"),
    ("overlap", "overlap"),
)  # fmt: skip
"""Headings of what is varied, and the attributes of a layout."""

_NUMBERS = ("pp", "vpp", "tp", "cp", "ep", "dp", "mbs")


def render_tune(result: TuneResult, console: Console) -> None:
    """Print the rows with the columns in which they differ, and one line for what all of them share."""
    title = (
        f"{result.num_gpus} {result.device}, {result.memory_gib:g} GiB each, {result.global_batch} sequences of "
        f"{result.seq_length} tokens in a step, {FRAMEWORKS[result.framework].title}"
    )
    _print(f"{title}.", console)
    for assumption in result.assumptions:
        _print(f"Assumed: {assumption}.", console)
    console.print()
    if not result.rows:
        none = "No layout fits." if result.counts.tried else f"No layout is possible on {result.num_gpus} devices."
        _print(f"{none} {_counts_text(result)}", console)
        return
    has_exchanges = any(row.layout.ep > 1 for row in result.rows)  # without, there is nothing to overlap
    varied = [column for column in _COLUMNS if column[1] != "overlap" or has_exchanges]
    columns = [column for column in varied if len({getattr(row.layout, column[1]) for row in result.rows}) > 1]
    shared = [
        f"{heading} {getattr(result.rows[0].layout, name)}"
        for heading, name in varied
        if (heading, name) not in columns
    ]
    headings = [
        ">#", *(f">{heading}" if name in _NUMBERS else heading for heading, name in columns),
        ">step s", ">tokens/s/GPU", ">TFLOP/s", ">MFU", ">GiB", ">bubble", ">comm.",
    ]  # fmt: skip
    rows = [
        (str(row.rank), *(str(getattr(row.layout, name)) for _, name in columns), *_figures(row)) for row in result.rows
    ]
    print_table(headings, rows, console, optional=("TFLOP/s", "comm.", "bubble", "MFU"))
    if shared:
        _print(f"All rows: {', '.join(shared)}.", console)
    if any(row.layout.overlap != "none" for row in result.rows):
        _print("Overlap pairs: a forward and a backward take turns at the all-to-alls of experts.", console)
    console.print()
    _print(f"Why row 1: {result.rows[0].why}.", console)
    for row in result.rows[1:]:
        _print(f"Row {row.rank} against row 1: {row.why}.", console)
    console.print()
    _print(_counts_text(result), console)
    _print("Every row has passed `pipeproof check`.", console)


def _figures(row: TuneRow) -> tuple[str, ...]:
    return (
        f"{row.step_s:.4g}", f"{row.tokens_per_s_per_gpu:,.0f}", f"{row.tflops_per_gpu:.0f}", f"{row.mfu:.1%}",
        f"{row.peak_gib:.1f}", f"{row.parts_s['bubble'] / row.step_s:.1%}",
        f"{row.parts_s['communication'] / row.step_s:.1%}",
    )  # fmt: skip


def _counts_text(result: TuneResult) -> str:
    counts, sentences = result.counts, []
    if counts.tried:
        sentences.append(
            f"Of {counts.tried:,} layouts, {counts.over_memory:,} need more memory by their lower bound and "
            f"{counts.unfit:,} have no such schedule; {counts.simulated:,} of the other {counts.bounded:,} were "
            f"simulated, the rest cannot be faster than the last row; {counts.over_memory_simulated:,} simulated ones "
            "needed more memory."
        )
    if counts.removed:
        reasons = "; ".join(f"{reason} ({number:,})" for reason, number in counts.removed.items())
        sentences.append(f"Not tried: {reasons}.")
    if counts.refused:
        sentences.append(f"Refused: {', '.join(f'{code} ({number})' for code, number in counts.refused.items())}.")
    return " ".join(sentences)


def _print(text: str, console: Console) -> None:
    console.print(Text(text))
