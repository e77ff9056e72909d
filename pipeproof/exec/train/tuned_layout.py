"""The layouts that ``tune`` compares, and the layout that it chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from pipeproof.analysis.tune.layer_cuts import LayerCost, numbers_of_stages
from pipeproof.atomic_write import write_output
from pipeproof.diagnostics.units import size_text, time_text
from pipeproof.exec.train.layer_samples import RunWay, rows_text
from pipeproof.sim.memory_curve import GIB

_CLOSE = 1.02
"""Ratio of predicted times below which the simpler layout is tried first: this is the accuracy of predictions."""
_TIE = 0.005
"""Share of a measured time below which two layouts are as fast as each other."""


@dataclass(frozen=True)
class LayoutRow:
    """One layout: its schedule, the blocks of each stage, how its stages run, and its predicted and measured costs.

    Times are in milliseconds; ``gib`` is the memory of the fullest rank. ``measured_ms`` is None for a layout that was
    not tried.
    """

    schedule: str
    num_chunks: int
    sizes: tuple[int, ...]
    blocks: tuple[int, ...]
    split: str
    is_compiled: bool
    replay: bool
    recomputed: tuple[int, ...]
    predicted_ms: float
    predicted_gib: float
    measured_ms: float | None = None
    measured_gib: float | None = None
    noise_ms: float = 0.0
    reason: str = ""
    rows: int | None = None
    """Rows of a micro-batch; None for the rows of the example."""
    data_ranks: int = 1
    """Pipelines next to each other, each with a part of the rows."""

    @property
    def way(self) -> RunWay:
        """The way its stages run."""
        return RunWay(self.split, self.is_compiled, replay=self.replay, rows=self.rows)

    @property
    def plain(self) -> tuple[Any, ...]:
        """Its schedule, cut and way: different for any two layouts, except for the replay."""
        return self.schedule, self.sizes, self.split, self.is_compiled, self.rows, self.data_ranks

    @property
    def name(self) -> str:
        """Schedule, cut and way in a few words."""
        words = [self.schedule, "/".join(map(str, self.blocks)), self.split]
        words += ["compiled blocks"] * self.is_compiled + ["replayed"] * self.replay
        words += [f"{self.data_ranks} data ranks"] if self.data_ranks > 1 else []
        words += [] if self.rows is None else [rows_text(self.rows)]
        if any(self.recomputed):
            words.append(f"{'/'.join(map(str, self.recomputed))} blocks recomputed")
        return ", ".join(words)

    def failed(self, error: Exception) -> LayoutRow:
        """The row with the reason why it does not run."""
        return replace(self, reason=str(error).splitlines()[0][:200])


@dataclass(frozen=True)
class Layout:
    """The layout that ``tune`` chose, and all compared layouts, the chosen one first.

    ``Pipeline(layout.stages, plan=layout.plan, split=layout.split, replay=layout.replay, ..)`` trains by it; ``stages``
    are the stages of the tuned model; its blocks are compiled and recomputed as in the layout.

    With several ``data_ranks`` it also needs ``group=layout.group, data_group=layout.data_group``, and a step gets this
    rank's part of the rows: ``x.chunk(layout.data_ranks)[layout.replica]``.
    """

    stages: Any
    plan: dict[str, Any]
    rows: tuple[LayoutRow, ...]
    notes: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds that ``tune`` took, by phase."""
    group: Any = None
    """The ranks of this rank's pipeline."""
    data_group: Any = None
    """The ranks with the same stages; None without data parallelism."""
    replica: int = 0
    """The number of this rank's pipeline."""

    @property
    def split(self) -> Any:
        """The ``split`` of the Pipeline."""
        return self.rows[0].split

    @property
    def replay(self) -> bool:
        """True if steps are replayed."""
        return self.rows[0].replay

    @property
    def data_ranks(self) -> int:
        """The number of pipelines next to each other."""
        return self.rows[0].data_ranks

    @property
    def micro_batch_size(self) -> int:
        """Rows of a micro-batch, as the ``example`` of the Pipeline has them."""
        return int(self.plan["schedule"]["micro_batch_size"])

    def save(self, path: str | Path) -> None:
        """Write the plan as YAML, with the measured times of its layers: for `pipeproof check`, `simulate`, `tune`."""
        write_output(Path(path), yaml.safe_dump(self.plan, sort_keys=False, default_flow_style=None, width=120))

    def __repr__(self) -> str:
        table = [_HEAD, *(_cells(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in self.seconds.items())
        return "\n".join([*(line.rstrip() for line in lines), *self.notes, *([f"({times})"] if times else [])])

    def _repr_html_(self) -> str:
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(row)) + "</tr>" for row in self.rows
        )
        head = "".join(f"<th>{cell}</th>" for cell in _HEAD)
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<table><tr>{head}</tr>{rows}</table>{notes}"


_HEAD = ("layout", "predicted", "measured", "memory predicted", "memory measured", "")


def _cells(row: LayoutRow) -> tuple[str, ...]:
    measured = "" if row.measured_ms is None else ms_text(row.measured_ms)
    memory = "" if row.measured_gib is None else gib_text(row.measured_gib)
    return row.name, ms_text(row.predicted_ms), measured, gib_text(row.predicted_gib), memory, row.reason


def ms_text(ms: float) -> str:
    """A time in milliseconds with its unit."""
    return time_text(1000 * ms)


def gib_text(gib: float) -> str:
    """A size in GiB with its unit."""
    return size_text(GIB * gib)


def expected_ms(row: LayoutRow, tried: Sequence[LayoutRow]) -> float:
    """The predicted time, times the ratio of measured to predicted times of rows that run in the same way."""
    ratios = [
        each.measured_ms / each.predicted_ms
        for each in tried if each.way == row.way and each.measured_ms is not None
    ]  # fmt: skip
    return row.predicted_ms * (median(ratios) if ratios else 1.0)


def next_to_run(left: Sequence[LayoutRow], tried: Sequence[LayoutRow]) -> LayoutRow:
    """The row to run next: the simplest among the rows whose expected time is close to the fastest."""
    fastest = min(expected_ms(row, tried) for row in left)
    close = [row for row in left if expected_ms(row, tried) <= fastest * _CLOSE]
    return min(close, key=lambda row: (row.num_chunks, row.split != "whole", row.predicted_gib, row.predicted_ms))


def ranked(rows: Sequence[LayoutRow], most_gib: float | None = None) -> list[LayoutRow]:
    """Measured rows by their time; rows within the noise of the fastest are a tie, and the simplest of them is first.

    Rows that needed more than ``most_gib`` are behind all others.
    """
    large = [row for row in rows if most_gib is not None and (row.measured_gib or 0.0) > most_gib]
    if 0 < len(large) < len(rows):
        text = f"needs more than {gib_text(most_gib or 0.0)}"
        small = [row for row in rows if row not in large]
        return [*ranked(small), *(replace(row, reason=text) for row in ranked(large))]
    ordered = sorted(rows, key=lambda row: row.measured_ms or 0.0)
    fastest = ordered[0].measured_ms or 0.0
    width = max(ordered[0].noise_ms, _TIE * fastest)
    tied = [row for row in ordered if (row.measured_ms or 0.0) - fastest <= max(width, row.noise_ms / 2)]
    if len(tied) > 1:
        text = f"a tie within {ms_text(width)} of noise"
        tied = [replace(row, reason=row.reason or text) for row in sorted(tied, key=_complexity)]
    return [*tied, *(row for row in ordered if row.name not in {each.name for each in tied})]


def _complexity(row: LayoutRow) -> tuple[Any, ...]:
    is_divided = row.data_ranks > 1, row.rows is not None
    return row.replay, row.num_chunks, row.split != "whole", sum(row.recomputed), *is_divided, row.measured_ms


def with_times(
    content: Mapping[str, Any], row: LayoutRow, costs: Sequence[LayerCost], slowdowns: Sequence[float]
) -> dict[str, Any]:
    """The plan with the measured times of its layers, longer by the factor of each stage.

    The stage's own cost counts for its first layer.
    """
    result = {**content, "model": {**content["model"]}}
    layers = [dict(layer) for layer in content["model"]["layers"]]
    stages = content.get("stages") or [[layer["name"]] for layer in layers]
    by_name = {layer["name"]: layer for layer in layers}
    is_split = row.split != "whole"
    for numbers, names, slowdown in zip(numbers_of_stages(row.sizes), stages, slowdowns, strict=True):
        own = [costs[n] for n in numbers] if len(numbers) == len(names) else []
        for position, name in enumerate(names):
            parts = [own[position], *([costs[-1]] if not position else [])] if own else [costs[n] for n in numbers]
            times = [slowdown * sum(getattr(part, key) for part in parts) / 1e3
                     for key in ("forward", "backward_input", "backward_weight")]  # fmt: skip
            by_name[name]["forward_us"] = round(times[0], 3)
            if is_split:
                by_name[name] |= {"backward_input_us": round(times[1], 3), "backward_weight_us": round(times[2], 3)}
            else:
                by_name[name]["backward_us"] = round(times[1] + times[2], 3)
    result["model"]["layers"] = layers
    return result
