"""The phases of ``tune``: measure layers, search cuts, run the best ones, keep the result; the same for each framework.

The methods of ``Tuning`` that raise ``NotImplementedError`` depend on the framework.
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from pipeproof.analysis.tune.layer_cuts import (
    NEAR,
    Best,
    Lacking,
    LayerCost,
    Layers,
    Problem,
    numbers_of_stages,
    search_cuts,
    step_of,
)
from pipeproof.atomic_write import write_output
from pipeproof.exec.store.agreement import Agreement, require_equal
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.layer_samples import Chain, RunWay, Sample, way_of, ways_measured
from pipeproof.exec.train.tuned_layout import (
    Layout,
    LayoutRow,
    expected_ms,
    ms_text,
    next_to_run,
    ranked,
    with_times,
)
from pipeproof.foreign_text import decode_json, read_foreign
from pipeproof.sim.memory_curve import GIB
from pipeproof.version import __version__

_NUM_OTHERS = 7
"""Rows of a result that were not run."""
_LEAST_SERIES, _MOST_SERIES, _STEPS_OF_SERIES = 3, 12, 3
_REPEATS = 0.005
"""Share of a time below which the two fastest series are equal, and no further one is needed."""
_SAFE_SHARE = 0.97
"""Share of the memory that a prediction may use: measured peaks were up to 2 % higher."""
_ROWS = TypeAdapter(list[LayoutRow])


@dataclass(frozen=True)
class Search:
    """Limits of ``tune``.

    Up to ``num_trials`` layouts run within ``max_s`` seconds, at least one. ``splits`` are the splits to try: by
    default ``whole`` and ``graph`` on a GPU, ``whole`` and ``linear`` on a CPU. ``optimizer_bytes`` are the bytes of
    optimizer states for each byte of trained weights: 2 for AdamW. ``file`` keeps the result, and a call with an equal
    model, devices and arguments reads it. ``without_pipeline``: also run FSDP2 over the same ranks, and note its time.

    ``data_ranks`` is the number of pipelines into which the ranks are divided, each with all weights and a part of the
    rows; ``auto`` compares all numbers, up to pipelines of one rank. ``rows_per_micro_batch`` are rows of a micro-batch
    to compare, with as many rows in a step; ``auto``: half, one, two and four times the rows of the example.
    """

    num_trials: int = 3
    max_s: float = 180.0
    splits: Sequence[str] | None = None
    optimizer_bytes: float = 2.0
    file: str | Path | None = None
    without_pipeline: bool = True
    data_ranks: int | Literal["auto"] = 1
    rows_per_micro_batch: int | Sequence[int] | Literal["auto"] | None = None


class Division(NamedTuple):
    """Micro-batches of ``rows`` rows (None: of the example's), over pipelines with ``num_micro_batches`` each."""

    rows: int | None
    data_ranks: int
    num_micro_batches: int


class Tuning:
    """A model, the ranks that tune it, and the limits."""

    def __init__(self, agreement: Agreement, num_micro_batches: int, memory_gib: float | None, search: Search) -> None:
        self.agreement, self.num_micro_batches = agreement, num_micro_batches
        self.memory_gib, self.search = memory_gib, search
        self.notes: list[str] = []
        self.seconds: dict[str, float] = {}
        self.plans: dict[tuple[Any, ...], dict[str, Any]] = {}
        """The plans of the layouts that were run, by ``LayoutRow.plain``."""
        self.found: dict[tuple[Any, ...], Best] = {}
        """The cuts of all layouts, by ``LayoutRow.plain``."""
        self._num_asked = 0

    def run(self) -> Layout:
        """All phases.

        Raises:
            PipelineError: no layout fits or can be run, or the ranks have different models.
        """
        if self.num_micro_batches < 1:
            raise PipelineError(f"num_micro_batches is {self.num_micro_batches}: give at least 1")
        self.started = time.monotonic()
        self.file = None if self.search.file is None else Path(self.search.file)
        self.chain = self.agreement.own("model", self._chain)
        self.signature = self._common_signature()
        kept = self._kept()
        if kept is not None:
            return kept
        limits = [each for each in self.agreement.gather("limit", self._limit) if each is not None]
        self.limit = min(limits, default=None)
        self.divisions = self.agreement.own("division", self._divisions)
        row_counts = dict.fromkeys(each.rows for each in self.divisions)
        ways = [way._replace(rows=rows) for rows in row_counts for way in self._ways()]
        costs = self._phase("measure", lambda: self._measured(ways))
        self.layers = self._phase("measure messages", self._layers_by_division)
        best_cuts, lacking = self._phase("search", lambda: self._searched(costs))
        if lacking and any(map(self.chain.can_recompute, range(self.chain.num_layers))):
            ways = [way._replace(recomputes=True) for way in costs if not way.replay]
            costs |= self._phase("measure recomputation", lambda: self._measured(ways, costs))
            best_cuts, lacking = self._phase("search again", lambda: self._searched(costs))
        rows = self._phase("try", lambda: self._tried(best_cuts, lacking))
        self._phase("without a pipeline", lambda: self._note_no_pipeline(rows[0]))
        layout = self._layout(rows, costs)
        if self.file is not None and not self.agreement.rank:
            write_output(self.file, json.dumps({
                "signature": self.signature, "rows": [asdict(row) for row in layout.rows], "plan": layout.plan,
                "notes": list(layout.notes), "seconds": dict(layout.seconds),
            }))  # fmt: skip
        return layout

    def _phase(self, name: str, work: Callable[[], Any]) -> Any:
        started = time.monotonic()
        result = work()
        self.seconds[name] = round(time.monotonic() - started, 1)
        return result

    def _report(self, text: str) -> None:
        """Show progress on the first rank, with the seconds since the start."""
        if not self.agreement.rank:
            print(  # noqa: T201 - progress of minutes, also without a terminal
                f"tune: {time.monotonic() - self.started:5.1f} s: {text}", file=sys.stderr, flush=True
            )

    def _common_signature(self) -> str:
        """A digest of all inputs of the result, equal on all ranks.

        Raises:
            PipelineError: the ranks have different models or arguments.
        """
        layers = [self.chain.signature(n) for n in range(self.chain.num_layers)]
        facts = self._facts()
        facts["arguments"] = [
            str(facts["arguments"]),
            self.num_micro_batches,
            self.memory_gib,
            str(replace(self.search, file=None)),
        ]
        digest = hashlib.sha256(str((layers, facts.pop("weights"))).encode()).hexdigest()
        own = {"model": digest, **facts, "pipeproof": __version__, "ranks": self.agreement.num_ranks}
        answers = self.agreement.gather("signature", lambda: own)
        for key in own:
            require_equal([json.dumps(answer[key]) for answer in answers], f"the {key} of tune")
        return json.dumps(own, sort_keys=True)

    def _kept(self) -> Layout | None:
        """The result of an earlier call, from the file of the first rank."""

        def read() -> Any:
            if self.file is None or self.agreement.rank or not self.file.exists():
                return None
            try:
                content = decode_json(read_foreign(self.file).decode())
                rows = _ROWS.validate_python(content["rows"])
            except (ValueError, KeyError, TypeError, ValidationError) as error:
                raise PipelineError(
                    f"{self.file} is not a result of tune ({type(error).__name__}): remove it"
                ) from None
            if content["signature"] != self.signature:
                return None
            return {**content, "rows": [asdict(row) for row in rows]}

        content = self.agreement.gather("file", read)[0]
        if content is None:
            return None
        return self._made(_ROWS.validate_python(content["rows"]), content["plan"], content["notes"], content["seconds"])

    def _made(
        self, rows: Sequence[LayoutRow], plan: dict[str, Any], notes: Sequence[str], seconds: Mapping[str, float]
    ) -> Layout:
        """The result, whose first row is the chosen layout."""
        return Layout(self._stages(rows[0]), plan, tuple(rows), tuple(notes), dict(seconds), *self._groups(rows[0]))

    # --- measure and search ---

    def _layers_by_division(self) -> dict[Division, Layers]:
        """The memory, the messages and the sums of gradients of the layers."""
        static = self._static_bytes()
        latencies = {rows: self._latency_ns(rows) for rows in dict.fromkeys(each.rows for each in self.divisions)}
        counts = dict.fromkeys(each.data_ranks for each in self.divisions)
        reductions = {num: self._reductions_ns(num) if num > 1 else ((), 0) for num in counts}
        return {
            each: Layers(static, self.chain.has_ends, latencies[each.rows], *reductions[each.data_ranks])
            for each in self.divisions
        }

    def _measured(
        self, ways: Sequence[RunWay], prior_costs: Mapping[RunWay, list[LayerCost]] | None = None
    ) -> dict[RunWay, list[LayerCost]]:
        """The costs of all layers in each way that is possible."""
        costs, refused = ways_measured(self.chain, ways, self._measure, self.agreement, self._report, prior_costs or {})
        self.notes += [f"{way} is not possible: {reason}" for way, reason in refused.items()]
        self._clean()
        return costs

    def _searched(self, costs: Mapping[RunWay, list[LayerCost]]) -> tuple[list[Best], list[Lacking]]:
        """The cuts of all schedules; every rank computes the same cuts from the agreed costs."""
        self._ways_by_name = {
            str(way): (way, way_of(way, own, costs.get(way._replace(recomputes=True)), self.chain))
            for way, own in costs.items() if not way.recomputes
        }  # fmt: skip
        ways = [each for each in self._ways_by_name.values() if each[0].replay == self._is_replayed(each[0])]
        self._report(f"searching cuts of {self.chain.num_layers} layers for {self.agreement.num_ranks} ranks")
        problems = [
            Problem(self.layers[each], own, self.agreement.num_ranks // each.data_ranks, each.num_micro_batches)
            for each in self.divisions for way, own in ways if way.rows == each.rows
        ]  # fmt: skip
        limit = None if self.limit is None else int(_SAFE_SHARE * self.limit)
        return search_cuts(problems, limit)

    # --- try ---

    def _tried(self, best_cuts: Sequence[Best], lacking: Sequence[Lacking]) -> list[LayoutRow]:
        """The rows of all schedules; the best ones are proved, run and measured."""
        if not best_cuts:
            raise PipelineError(self._lacking_text(lacking))
        left, tried = self._candidates(best_cuts), list[LayoutRow]()
        longest = 0.0
        while left and len({row.plain for row in tried}) < self.search.num_trials:
            if tried and not self._has_time(longest):
                num = len({row.plain for row in tried})
                self.notes.append(f"{num} of {self.search.num_trials} layouts were run within {self.search.max_s:g} s")
                break
            began, row = time.monotonic(), next_to_run(left, tried)
            left = [each for each in left if each is not row]
            self._report(f"running {row.name}")
            tried += self._trial(row)
            longest = max(longest, time.monotonic() - began)
        measured = [row for row in tried if row.measured_ms is not None]
        if not measured:
            raise PipelineError("no layout could be run: " + "; ".join(row.reason for row in tried))
        failed = [row for row in tried if row.measured_ms is None]
        most = None if self.limit is None else self.limit / GIB
        return [*ranked(measured, most), *failed, *self._others(left, tried)]

    def _others(self, left: Sequence[LayoutRow], tried: Sequence[LayoutRow]) -> list[LayoutRow]:
        """The rows to show next to the tried ones: the fastest of each division, and the fastest of all."""
        ordered = sorted(left, key=lambda row: expected_ms(row, tried))
        best = {(row.rows, row.data_ranks): row for row in reversed(ordered)}
        return [row for row in ordered if row in [*best.values(), *ordered[:_NUM_OTHERS]]]

    def _has_time(self, needed_s: float) -> bool:
        """True if the first rank has this much time left; equal on all ranks."""
        return bool(self._gathered("time", self.started + self.search.max_s - time.monotonic() > needed_s)[0])

    def _candidates(self, best_cuts: Sequence[Best]) -> list[LayoutRow]:
        rows = []
        for best in best_cuts:
            way, _ = self._ways_by_name[best.problem.way.name]
            blocks = self.chain.blocks_of(best.sizes)
            is_open = not best.is_exhaustive and best.step <= NEAR * best_cuts[0].step
            rows.append(LayoutRow(
                best.kind, best.num_chunks, best.sizes, tuple(blocks), way.split, way.is_compiled, way.replay,
                best.recomputed, best.step / 1e6, max(best.peaks) / GIB,
                reason="the search of its cuts ended before all were compared" if is_open else "",
                rows=way.rows, data_ranks=self.agreement.num_ranks // best.problem.num_ranks,
            ))  # fmt: skip
            self.found[rows[-1].plain] = best
        return rows

    def _step_of(self, row: LayoutRow) -> tuple[int, list[float]]:
        """The predicted step of a row in nanoseconds, and the factor by which the host slows each stage."""
        _, way = self._ways_by_name[str(row.way)]
        return step_of(self.found[row.plain], way)

    def _lacking_text(self, lacking: Sequence[Lacking]) -> str:
        limit = self.limit
        if not lacking or limit is None:
            layers = f"{self.chain.num_layers} layer{'s' * (self.chain.num_layers > 1)}"
            return (
                f"no schedule exists for {layers}, {self.agreement.num_ranks} ranks and {self.num_micro_batches} "
                "micro-batches: use fewer ranks"
            )
        least = min(lacking, key=lambda each: each.needed)
        return (
            f"no layout fits into {limit / GIB:.3g} GiB: the smallest, {least.kind} ({least.way.name}), needs "
            f"{least.needed / _SAFE_SHARE / GIB:.3g} GiB on its fullest rank, {least.static / GIB:.3g} GiB of it for "
            f"weights, gradients and optimizer states and {(least.needed - least.static) / GIB:.3g} GiB for "
            f"activations, with {1 - _SAFE_SHARE:.0%} to spare: use more ranks, smaller micro-batches, or an optimizer "
            "with smaller states (optimizer_bytes)"
        )

    def _recomputed(self, row: LayoutRow) -> list[int]:
        """The layers whose activations are recomputed: in each stage the first layers that can."""
        every = []
        for numbers, num in zip(numbers_of_stages(row.sizes), row.recomputed, strict=True):
            every += [n for n in numbers if self.chain.can_recompute(n)][:num]
        return every

    def _schedule(self, row: LayoutRow) -> dict[str, Any]:
        """The section of a plan."""
        chunks = {"num_chunks": row.num_chunks} if row.num_chunks > 1 else {}
        num = self.found[row.plain].problem.num_micro_batches
        return {"kind": row.schedule, "num_micro_batches": num, **chunks}

    def _timed(self, step: Callable[[], None]) -> list[float]:
        """Milliseconds of a step of the slowest rank in each series, the fastest first.

        Other processes only make a step longer: series are run until the two fastest have the same time.
        """
        times: list[float] = []
        while len(times) < _LEAST_SERIES or (len(times) < _MOST_SERIES and times[1] > (1 + _REPEATS) * times[0]):
            times = sorted([*times, self._series(step)])
        return times

    def _series(self, step: Callable[[], None]) -> float:
        self._barrier()
        started = time.perf_counter()
        for _ in range(_STEPS_OF_SERIES):
            step()
        self._barrier()
        return float(max(self._gathered("series", (time.perf_counter() - started) / _STEPS_OF_SERIES * 1e3)))

    def _gathered(self, what: str, value: Any) -> list[Any]:
        """The values of all ranks, for repeated questions."""
        self._num_asked += 1
        return self.agreement.gather(f"{what} {self._num_asked}", lambda: value)

    def _measured_row(self, row: LayoutRow, times: Sequence[float], gib: float | None) -> LayoutRow:
        """The row with its times (see ``_timed``) and the memory of the fullest rank."""
        of_ranks = self._gathered("memory", gib)
        most = None if None in of_ranks else max(of_ranks)
        self._report(f"{row.name}: predicted {ms_text(row.predicted_ms)}, measured {ms_text(times[0])}")
        return replace(row, measured_ms=times[0], noise_ms=times[1] - times[0], measured_gib=most)

    def _layout(self, rows: Sequence[LayoutRow], costs: Mapping[RunWay, list[LayerCost]]) -> Layout:
        chosen = rows[0]
        own, again = costs[chosen.way], costs.get(chosen.way._replace(recomputes=True), [])
        recomputed = set(self._recomputed(chosen))
        measured = [again[n] if n in recomputed else own[n] for n in range(len(own))]
        _, slowdowns = self._step_of(chosen)
        if len(chosen.sizes) == 1 < self.agreement.num_ranks:
            self.notes.insert(0, f"no pipeline is best: {self.agreement.num_ranks} data ranks with all layers each")
        content = with_times(self.plans[chosen.plain], chosen, measured, slowdowns)
        return self._made(rows, content, self.notes, self.seconds)

    # --- what a framework does ---

    def _chain(self) -> Chain:
        """The layers."""
        raise NotImplementedError

    def _facts(self) -> dict[str, Any]:
        """All inputs of the result: texts of the ``weights``, the ``arguments``, the device and versions."""
        raise NotImplementedError

    def _ways(self) -> list[RunWay]:
        """The ways in which stages may run."""
        raise NotImplementedError

    def _is_replayed(self, way: RunWay) -> bool:
        """True if steps in this way are replayed, too."""
        return False

    def _limit(self) -> int | None:
        """The bytes that this rank may use; None without a limit."""
        return None if self.memory_gib is None else int(self.memory_gib * GIB)

    def _static_bytes(self) -> tuple[int, ...]:
        """Weights, gradients and optimizer states of each layer."""
        raise NotImplementedError

    def _latency_ns(self, rows: int | None) -> int:
        """Time of a message between neighbours, with micro-batches of this many rows."""
        raise NotImplementedError

    def _divisions(self) -> list[Division]:
        """The ways to divide the rows of a step that are compared.

        Raises:
            PipelineError: there are none.
        """
        return [Division(None, 1, self.num_micro_batches)]

    def _reductions_ns(self, data_ranks: int) -> tuple[tuple[int, ...], int]:
        """Times to sum gradients over data ranks, see ``Layers``."""
        raise NotImplementedError

    def _groups(self, row: LayoutRow) -> tuple[Any, Any, int]:
        """The group of this rank's pipeline, the group of its data ranks, and the number of the pipeline."""
        return None, None, 0

    def _measure(self, sample: Sample, way: RunWay) -> tuple[LayerCost, str]:
        """The cost of a stage of these layers, and the reason if it does not run in this way; else an empty text."""
        raise NotImplementedError

    def _stages(self, row: LayoutRow) -> Any:
        """The stages of a layout."""
        raise NotImplementedError

    def _trial(self, row: LayoutRow) -> list[LayoutRow]:
        """A layout proved and run, with its plan in ``plans``; rows without a time have the reason."""
        raise NotImplementedError

    def _note_no_pipeline(self, fastest: LayoutRow) -> None:
        """Note how fast steps without a pipeline are."""

    def _barrier(self) -> None:
        """Wait for all ranks, and for their devices."""
        raise NotImplementedError

    def _clean(self) -> None:
        """Free memory."""
        gc.collect()
