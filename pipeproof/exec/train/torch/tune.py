"""``tune``: from a model and a group of devices to the fastest proved pipeline that was measured on them."""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import nn

from pipeproof.analysis.tune.layer_cuts import (
    NEAR,
    Best,
    Lacking,
    LayerCost,
    Layers,
    numbers_of_stages,
    search_cuts,
    step_of,
)
from pipeproof.atomic_write import write_output
from pipeproof.exec.store.agreement import require_equal
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.torch.boundary_inference import unchanged_state
from pipeproof.exec.train.torch.measure_layers import Batch, Cutter, RunWay, way_of, ways_measured, weight_bytes
from pipeproof.exec.train.torch.model_stages import ModelStages
from pipeproof.exec.train.torch.module_stage import LossFunction
from pipeproof.exec.train.torch.no_pipeline import sharded_step
from pipeproof.exec.train.torch.pipeline import Pipeline
from pipeproof.exec.train.torch.pipeline_start import device_of
from pipeproof.exec.train.torch.split_backward import gradients_aside
from pipeproof.exec.train.torch.stage_values import MicroBatches
from pipeproof.exec.train.torch.start_phases import join
from pipeproof.exec.train.torch.tuned_layout import (
    Layout,
    LayoutRow,
    expected_ms,
    gib_text,
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
_MESSAGES = 12
_SAFE_SHARE = 0.97
"""Share of the memory that a prediction may use: measured peaks were up to 2 % higher."""
_ROWS = TypeAdapter(list[LayoutRow])


@dataclass(frozen=True)
class Search:
    """Limits of ``tune``.

    ``num_trials`` layouts are run, as many of them as ``max_s`` seconds allow, but one at least. ``splits`` are tried:
    by default ``whole`` and ``graph`` on a GPU, ``whole`` and ``linear`` on a CPU. ``optimizer_bytes`` are the bytes of
    optimizer states for each byte of trained weights: 2 for AdamW. ``file`` keeps the result, and a call with an equal
    model, devices and arguments reads it. ``without_pipeline``: FSDP2 over the same ranks is run, too, and noted.
    """

    num_trials: int = 3
    max_s: float = 180.0
    splits: Sequence[str] | None = None
    optimizer_bytes: float = 2.0
    file: str | Path | None = None
    without_pipeline: bool = True


def tune(
    model: nn.Module,
    *,
    loss_fn: LossFunction | None,
    example: Sequence[Any],
    num_micro_batches: int,
    target: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | dist.DeviceMesh | None = None,
    memory_gib: float | None = None,
    search: Search | None = None,
    **options: Any,
) -> Layout:
    """Find the fastest pipeline for a model on the ranks of a group, by measurements on their devices.

    Every rank calls it with an equal model on its own device; weights, gradients, buffers and random states are as
    before when it returns. Distinct layers are timed, forward, input and weight gradients, and the memory that they
    keep; all cuts are searched for every kind of schedule that ``Pipeline`` runs; the best ones run with the model's
    own modules, and the fastest of these that was proved is chosen, of equally fast ones the simplest.

    Args:
        model: a model of transformers, or an ``nn.Sequential``, on the rank's device.
        loss_fn: as of ``Pipeline``.
        example: positional arguments of the first stage for one micro-batch.
        num_micro_batches: micro-batches of a step.
        target: the target of one micro-batch.
        example_kwargs: keyword arguments of the stages for one micro-batch.
        group: the ranks of the pipeline; default: the world.
        memory_gib: memory of each rank for weights, gradients, optimizer states and activations; by default 94 % of
            that of a GPU. Blocks of transformers recompute their activations where they would not fit.
        search: its limits.
        options: further arguments of ``Pipeline`` for the steps that are run.

    Raises:
        PipelineError: no layout fits into the memory, the ranks have other models, or the layers are not known.
    """
    batch = Batch(tuple(example), example_kwargs or {}, target, loss_fn)
    return _Tuning(model, batch, num_micro_batches, group, memory_gib, search or Search(), options).run()


def tuned(
    pipeline: type[Pipeline], model: nn.Module, search: Search | None = None, target: Any = None,
    memory_gib: float | None = None, **arguments: Any,
) -> Pipeline:  # fmt: skip
    """The pipeline of the layout that ``tune`` chooses, see ``Pipeline.tuned``."""
    layout = tune(model, search=search, target=target, memory_gib=memory_gib, **arguments)
    return pipeline(layout.stages, plan=layout.plan, split=layout.split, replay=layout.replay, **arguments)


@dataclass
class _Tuning:
    model: nn.Module
    batch: Batch
    num_micro_batches: int
    group: Any
    memory_gib: float | None
    search: Search
    options: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)
    _num_asked: int = 0
    _plans: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict)
    """The plans of the layouts that were run, by ``LayoutRow.plain``."""
    _by_operation: dict[tuple[Any, ...], float] = field(default_factory=dict)
    """The predicted milliseconds of steps that are not replayed, likewise."""
    seconds: dict[str, float] = field(default_factory=dict)

    def run(self) -> Layout:
        """All phases."""
        self.started = time.monotonic()
        self.file = None if self.search.file is None else Path(self.search.file)
        self.ranks = join(self.group, self.options.get("timeout_s", 600.0))
        self.device = device_of([self.model])
        self.is_gpu = self.device.type == "cuda"
        self.cutter = self.ranks.agreement.own("model", self._cutter)
        self.signature = self._common_signature()
        kept = self._kept()
        if kept is not None:
            return kept
        self.limit = self._limit()
        costs = self._phase("measure", lambda: self._measured(self._ways()))
        self.static_bytes, self.latency_ns = self._static_bytes(), self._latency_ns()
        found, lacking = self._phase("search", lambda: self._searched(costs))
        if lacking and self.cutter.can_recompute:
            ways = [way._replace(recomputes=True) for way in costs if not way.replay]
            costs |= self._phase("measure recomputation", lambda: self._measured(ways, costs))
            found, lacking = self._phase("search again", lambda: self._searched(costs))
        rows = self._phase("try", lambda: self._tried(found, lacking))
        self._phase("without a pipeline", lambda: self._note_no_pipeline(rows[0]))
        layout = self._layout(rows, costs)
        if self.file is not None and not self.ranks.rank:
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
        """Show on the first rank what is done, with the seconds since the start."""
        if not self.ranks.rank:
            print(  # noqa: T201 - progress of minutes, also without a terminal
                f"tune: {time.monotonic() - self.started:5.1f} s: {text}", file=sys.stderr, flush=True
            )

    # --- what is tuned ---

    def _cutter(self) -> Cutter:
        if self.num_micro_batches < 1:
            raise PipelineError(f"num_micro_batches is {self.num_micro_batches}: give at least 1")
        example = None
        if self.batch.kwargs:
            example = {getattr(self.model, "main_input_name", "input_ids"): self.batch.args[0], **self.batch.kwargs}
        return Cutter.of(self.model, example)

    def _common_signature(self) -> str:
        """A digest of all that the result depends on, equal on all ranks.

        Raises:
            PipelineError: the ranks have other models or arguments.
        """
        layers = [self.cutter.signature(n) for n in range(self.cutter.num_layers)]
        weights = [(n, tuple(w.shape), str(w.dtype), w.requires_grad) for n, w in self.model.named_parameters()]
        digest = hashlib.sha256(str((layers, weights)).encode()).hexdigest()
        device = torch.cuda.get_device_name(self.device) if self.is_gpu else "cpu"
        shapes = [_about(value) for value in (*self.batch.args, *self.batch.kwargs.items(), self.batch.target)]
        own = {
            "model": digest, "device": device, "torch": torch.__version__, "pipeproof": __version__,
            "arguments": [shapes, self.num_micro_batches, self.memory_gib, str(replace(self.search, file=None)),
                          sorted(map(str, self.options.items()))],
            "ranks": self.ranks.num_ranks,
        }  # fmt: skip
        answers = self.ranks.agreement.gather("signature", lambda: own)
        for key in own:
            require_equal([json.dumps(answer[key]) for answer in answers], f"the {key} of tune")
        return json.dumps(own, sort_keys=True)

    def _kept(self) -> Layout | None:
        """The result of an earlier call, from the file of the first rank."""

        def read() -> Any:
            if self.file is None or self.ranks.rank or not self.file.exists():
                return None
            try:
                content = decode_json(read_foreign(self.file).decode())
                rows = _ROWS.validate_python(content["rows"])
            except (ValueError, KeyError, TypeError, ValidationError) as error:
                raise PipelineError(f"{self.file} is no result of tune ({type(error).__name__}): remove it") from None
            if content["signature"] != self.signature:
                return None
            return {**content, "rows": [asdict(row) for row in rows]}

        content = self.ranks.agreement.gather("file", read)[0]
        if content is None:
            return None
        rows = tuple(_ROWS.validate_python(content["rows"]))
        return Layout(self._stages(rows[0]), content["plan"], rows, tuple(content["notes"]), content["seconds"])

    # --- measure and search ---

    def _ways(self) -> list[RunWay]:
        splits = self.search.splits or (("whole", "graph") if self.is_gpu else ("whole", "linear"))
        return [RunWay(split, self.is_gpu and split == "whole") for split in splits]

    def _measured(
        self, ways: Sequence[RunWay], known: Mapping[RunWay, list[LayerCost]] | None = None
    ) -> dict[RunWay, list[LayerCost]]:
        """The costs in each way that is possible; ``linear`` takes the place of ``graph`` where it is not."""
        costs, refused = ways_measured(
            self.cutter, ways, self.batch, self.ranks.agreement, self.device, self._report, known or {}
        )
        self.notes += [f"split={way.split} is not possible: {reason}" for way, reason in refused.items()]
        linear = RunWay("linear", is_compiled=False)
        if any(way.split == "graph" for way in refused) and known is None and linear not in costs:
            costs |= self._measured([linear])
        for way in [way for way in costs if self._is_replayed(way)]:
            costs[way._replace(replay=True)] = [replace(cost, host=0) for cost in costs[way]]
        self._clean()
        return costs

    def _searched(self, costs: Mapping[RunWay, list[LayerCost]]) -> tuple[list[Best], list[Lacking]]:
        """The cuts of all schedules; every rank finds the same, from what they agreed on."""
        self.layers = Layers(self.static_bytes, self.cutter.has_ends, self.latency_ns)
        self._ways_by_name = {
            str(way): (way, way_of(way, own, costs.get(way._replace(recomputes=True)), self.cutter))
            for way, own in costs.items() if not way.recomputes
        }  # fmt: skip
        ways = [own for way, own in self._ways_by_name.values() if way.replay == self._is_replayed(way)]
        self._report(f"searching cuts of {self.layers.num_layers} layers for {self.ranks.num_ranks} ranks")
        limit = None if self.limit is None else int(_SAFE_SHARE * self.limit)
        return search_cuts(self.layers, ways, self.ranks.num_ranks, self.num_micro_batches, limit)

    def _is_replayed(self, way: RunWay) -> bool:
        """True if steps that run so are replayed, too."""
        return self.is_gpu and way.split == "graph"

    def _static_bytes(self) -> tuple[int, ...]:
        """Weights, gradients and optimizer states of each layer."""
        stages = self.cutter.stages([1] * self.cutter.num_layers)
        sizes = [weight_bytes(stage.parameters()) for stage in stages.values()]
        return tuple(int(whole + trained * (1 + self.search.optimizer_bytes)) for whole, trained in sizes)

    def _limit(self) -> int | None:
        """The bytes that the rank with least memory may use; None without a limit."""
        own = None if self.memory_gib is None else int(self.memory_gib * GIB)
        if own is None and self.is_gpu:
            own = int(0.94 * torch.cuda.get_device_properties(self.device).total_memory)
        limits = [each for each in self.ranks.agreement.gather("limit", lambda: own) if each is not None]
        return min(limits, default=None)

    def _latency_ns(self) -> int:
        """The slowest median time of a message between neighbours, measured with nothing else under way."""
        if self.ranks.num_ranks == 1:
            return 0
        message = self.ranks.agreement.gather("message", self._message_bytes)[0]
        group, ranks = self.ranks.group, self.ranks.global_ranks
        buffer = torch.empty(max(1, message), dtype=torch.uint8, device=self.device)
        medians = [0.0]
        for first in range(self.ranks.num_ranks - 1):
            times = [self._message_ns(buffer, first, ranks, group) for _ in range(_MESSAGES)]
            if self.ranks.rank in (first, first + 1):
                medians.append(median(times[_MESSAGES // 3 :]))
        return int(max(self.ranks.agreement.gather("message time", lambda: max(medians))))

    def _message_ns(self, buffer: torch.Tensor, first: int, ranks: Sequence[int], group: dist.ProcessGroup) -> float:
        """Half the time of a message from rank ``first`` to the next one and back; every rank calls it."""
        dist.barrier(group)
        self._sync()
        started = time.perf_counter_ns()
        if self.ranks.rank == first:
            dist.send(buffer, ranks[first + 1], group=group)
            dist.recv(buffer, ranks[first + 1], group=group)
        elif self.ranks.rank == first + 1:
            dist.recv(buffer, ranks[first], group=group)
            dist.send(buffer, ranks[first], group=group)
        self._sync()
        return (time.perf_counter_ns() - started) / 2

    def _message_bytes(self) -> int:
        stages = self.cutter.stages([1, self.cutter.num_layers - 1]) if self.cutter.num_layers > 1 else None
        if stages is None:
            return 0
        with torch.no_grad(), unchanged_state(stages.values(), self.device):
            value = stages[0](*self.batch.args, **(self.batch.kwargs if self.cutter.has_ends else {}))
        leaves = value if isinstance(value, tuple) else (value,)
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves)

    def _sync(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    # --- try ---

    def _tried(self, found: Sequence[Best], lacking: Sequence[Lacking]) -> list[LayoutRow]:
        """The rows of all schedules; the best ones are proved, run and measured."""
        if not found:
            raise PipelineError(self._lacking_text(lacking))
        left, tried = self._candidates(found), list[LayoutRow]()
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
        return [*ranked(measured, most), *failed, *sorted(left, key=lambda row: expected_ms(row, tried))[:_NUM_OTHERS]]

    def _has_time(self, needed_s: float) -> bool:
        """True if the first rank has so much time left; the same on all ranks."""
        left = self.started + self.search.max_s - time.monotonic()
        self._num_asked += 1
        return bool(self.ranks.agreement.gather(f"time {self._num_asked}", lambda: left > needed_s)[0])

    def _candidates(self, found: Sequence[Best]) -> list[LayoutRow]:
        rows = []
        for best in found:
            way, _ = self._ways_by_name[best.way.name]
            blocks = self.cutter.blocks_of(best.sizes)
            _, by_operation = self._ways_by_name[str(way._replace(replay=False))]
            is_open = not best.is_exhaustive and best.step <= NEAR * found[0].step
            rows.append(LayoutRow(
                best.kind, best.num_chunks, best.sizes, tuple(blocks), way.split, way.is_compiled, way.replay,
                best.recomputed, best.step / 1e6, max(best.peaks) / GIB,
                reason="the search of its cuts ended before all were compared" if is_open else "",
            ))  # fmt: skip
            self._by_operation[rows[-1].plain] = 1e-6 * step_of(
                self.layers, by_operation, best, self.ranks.num_ranks, self.num_micro_batches
            )
        return rows

    def _lacking_text(self, lacking: Sequence[Lacking]) -> str:
        limit = self.limit
        if not lacking or limit is None:
            layers = f"{self.cutter.num_layers} layer{'s' * (self.cutter.num_layers > 1)}"
            return (
                f"no schedule exists for {layers}, {self.ranks.num_ranks} ranks and {self.num_micro_batches} "
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

    def _stages(self, row: LayoutRow) -> ModelStages:
        """The stages of a layout, whose blocks run in its way."""
        self.cutter.run_as(row.way, self._recomputed(row))
        return self.cutter.stages(row.sizes)

    def _recomputed(self, row: LayoutRow) -> list[int]:
        """The layers whose activations are recomputed: the first blocks of each stage."""
        every = []
        for numbers, num in zip(numbers_of_stages(row.sizes), row.recomputed, strict=True):
            every += [n for n in numbers if self.cutter.block(n) is not None][:num]
        return every

    def _trial(self, row: LayoutRow) -> list[LayoutRow]:
        """A layout proved and run, operation by operation and, where it is to be replayed, replayed, too."""
        plain = replace(row, replay=False, predicted_ms=self._by_operation[row.plain])
        rows: list[LayoutRow] = []
        try:
            with ExitStack() as stack:
                stack.enter_context(gradients_aside(list(self.model.parameters())))
                stack.enter_context(unchanged_state([self.model], self.device))
                before = torch.cuda.memory_allocated(self.device) if self.is_gpu else 0
                pipe = Pipeline(
                    self._stages(row), plan=self._plan(row), loss_fn=self.batch.loss_fn, example=self.batch.args,
                    example_kwargs=self.batch.kwargs or None, group=self.group, split=row.split,  # type: ignore[arg-type]
                    replay=row.replay, **self.options,
                )  # fmt: skip
                stack.callback(pipe.close)
                stack.callback(pipe._cut_model.forget)  # noqa: SLF001 - its weights stay as they are
                self._plans[row.plain] = pipe.plan.content
                with pipe._runner.unchanged():  # noqa: SLF001 - operation by operation
                    rows.append(self._measured_row(plain, pipe, before))
                other = [split for split in pipe.splits.values() if split != row.split]
                if row.split == "graph" and other:
                    return [replace(rows[0], reason=other[0])]
                if row.replay:
                    rows.append(self._measured_row(row, pipe, before))
        except PipelineError as error:
            reason = str(error).splitlines()[0][:200]
            if row.replay and not rows and reason.startswith("replay=True"):
                return [*self._trial(plain), replace(row, reason=reason)]
            rows.append(replace(row, reason=reason))
        finally:
            self._clean()
        return rows

    def _plan(self, row: LayoutRow) -> dict[str, Any]:
        schedule: dict[str, Any] = {"kind": row.schedule, "num_micro_batches": self.num_micro_batches}
        if row.num_chunks > 1:
            schedule["num_chunks"] = row.num_chunks
        return {"schedule": schedule}

    def _measured_row(self, row: LayoutRow, pipe: Pipeline, before: int) -> LayoutRow:
        """The row with the slowest rank's time and the fullest one's memory; ``before`` was allocated at the start."""
        times, peak = self._times(pipe, is_compiled=row.replay)
        whole, trained = weight_bytes(weight for stage in pipe.stages.values() for weight in stage.parameters())
        own = whole + self.search.optimizer_bytes * trained
        gib = self.ranks.agreement.gather(
            f"trial {row.name}", lambda: (peak - before + own) / GIB if self.is_gpu else None
        )
        row = replace(
            row, measured_ms=times[0], noise_ms=times[1] - times[0], measured_gib=None if None in gib else max(gib)
        )
        self._report(f"{row.name}: predicted {ms_text(row.predicted_ms)}, measured {ms_text(times[0])}")
        return row

    def _times(self, pipe: Pipeline, *, is_compiled: bool) -> tuple[list[float], int]:
        """Times and bytes, as ``_timed`` returns them."""
        num = self.num_micro_batches
        args = [_every(value, num) for value in self.batch.args] if pipe.is_first else []
        kwargs = {name: _every(value, num) for name, value in self.batch.kwargs.items()}
        target = _every(self.batch.target, num) if pipe.is_last and self.batch.loss_fn is not None else None
        weights = [weight for stage in pipe.stages.values() for weight in stage.parameters()]

        def step() -> None:
            pipe.step(*args, target=target, **kwargs)
            for weight in weights:
                weight.grad = None

        return self._timed(step, is_compiled=is_compiled)

    def _timed(self, step: Callable[[], None], *, is_compiled: bool = False) -> tuple[list[float], int]:
        """Milliseconds of a step of the slowest rank in each series, the fastest first, and the most bytes allocated.

        Other processes only make a step longer: series are run until the two fastest have the same time.
        """

        def steps() -> float:
            dist.barrier(self.ranks.group)
            self._sync()
            started = time.perf_counter()
            for _ in range(_STEPS_OF_SERIES):
                step()
            self._sync()
            dist.barrier(self.ranks.group)
            own = (time.perf_counter() - started) / _STEPS_OF_SERIES * 1e3
            self._num_asked += 1
            return float(max(self.ranks.agreement.gather(f"series {self._num_asked}", lambda: own)))

        if self.is_gpu and is_compiled:
            torch.cuda.reset_peak_memory_stats(self.device)
        steps()  # compiles, and with replay captures: what a replay uses is allocated then
        if self.is_gpu and not is_compiled:
            torch.cuda.reset_peak_memory_stats(self.device)
        times: list[float] = []
        while len(times) < _LEAST_SERIES or (len(times) < _MOST_SERIES and times[1] > (1 + _REPEATS) * times[0]):
            times = sorted([*times, steps()])
        return times, torch.cuda.max_memory_allocated(self.device) if self.is_gpu else 0

    def _note_no_pipeline(self, fastest: LayoutRow) -> None:
        """Note the steps of FSDP2 without a pipeline, with the example's micro-batches and with twice as many rows."""
        num_ranks, found = self.ranks.num_ranks, dict[int, tuple[float, float | None]]()
        if num_ranks == 1 or not self.search.without_pipeline:
            return
        for num_examples in (1, 2):
            num, rest = divmod(self.num_micro_batches, num_ranks * num_examples)
            if rest or not self._has_time(0.0) or not self._has_room():
                continue
            self._report(f"running FSDP2 without a pipeline, micro-batches of {num_examples} examples")
            before = torch.cuda.memory_allocated(self.device) if self.is_gpu else 0
            with unchanged_state([self.model], self.device):
                step = sharded_step(
                    self.cutter, self.batch, num_examples, num, self.ranks.group, is_compiled=self.is_gpu
                )
                times, peak = self._timed(step)
            states = self.search.optimizer_bytes * weight_bytes(self.model.parameters())[1] / num_ranks
            own = (peak - before + states) / GIB if self.is_gpu else 0.0
            gib = max(self.ranks.agreement.gather(f"no pipeline {num_examples}", partial(float, own)))
            found[num_examples] = times[0], gib if self.is_gpu else None
            del step
            self._clean()
        for num_examples, (ms, gib) in found.items():
            memory = "" if gib is None else f" and {gib_text(gib)}"
            which = "is faster" if ms < (fastest.measured_ms or 0.0) else "is slower"
            if gib is not None and self.limit is not None and gib * GIB > self.limit:
                which = f"does not fit and {which}"
            self.notes.append(
                f"FSDP2 without a pipeline, micro-batches of {num_examples} example{'s' * (num_examples > 1)}: "
                f"{ms_text(ms)}{memory}, which {which} than the first row"
            )

    def _has_room(self) -> bool:
        """True if every rank can hold a second copy of the model."""
        size, _ = weight_bytes(self.model.parameters())
        self._num_asked += 1
        answers = self.ranks.agreement.gather(
            f"room {self._num_asked}", lambda: not self.is_gpu or 3 * size < torch.cuda.mem_get_info(self.device)[0]
        )
        return all(answers)

    def _clean(self) -> None:
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    # --- the result ---

    def _layout(self, rows: Sequence[LayoutRow], costs: Mapping[RunWay, list[LayerCost]]) -> Layout:
        chosen = rows[0]
        own, again = costs[chosen.way], costs.get(chosen.way._replace(recomputes=True), [])
        recomputed = set(self._recomputed(chosen))
        measured = [again[n] if n in recomputed else own[n] for n in range(len(own))]
        content = with_times(self._plans[chosen.plain], chosen, measured)
        return Layout(self._stages(chosen), content, tuple(rows), tuple(self.notes), dict(self.seconds))


def _every(value: Any, num: int) -> Any:
    return MicroBatches([value] * num) if isinstance(value, torch.Tensor) else value


def _about(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
