"""``tune``: the fastest proved pipeline that was measured for a model on a group of devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pipeproof.analysis.tune.layer_cuts import LayerCost
from pipeproof.analysis.tune.layouts import divisors
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.layer_samples import RunWay, Sample
from pipeproof.exec.train.module_plan import stages_of_rank
from pipeproof.exec.train.torch.boundary_inference import unchanged_state
from pipeproof.exec.train.torch.data_parallel import BUCKET_BYTES, average_gradients
from pipeproof.exec.train.torch.measure_layers import Batch, Cutter, measure_sample, weight_bytes
from pipeproof.exec.train.torch.meta_buffers import with_memory
from pipeproof.exec.train.torch.model_stages import ModelStages
from pipeproof.exec.train.torch.module_stage import LossFunction
from pipeproof.exec.train.torch.no_pipeline import sharded_step
from pipeproof.exec.train.torch.pipeline import Pipeline
from pipeproof.exec.train.torch.split_backward import gradients_aside
from pipeproof.exec.train.torch.stage_values import MicroBatches
from pipeproof.exec.train.torch.start_phases import device_of, join
from pipeproof.exec.train.tuned_layout import Layout, LayoutRow, gib_text, ms_text
from pipeproof.exec.train.tuning import Division, Search, Tuning
from pipeproof.sim.memory_curve import GIB

_MESSAGES = 12
_SMALL_BUCKET = 4096


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

    Every rank calls it with an equal model on its own device; weights, gradients, buffers and random states stay
    unchanged. It measures the times of distinct layers (forward, input gradient, weight gradient) and the memory that
    they keep. It searches all cuts for every kind of schedule that ``Pipeline`` runs. The best layouts run with the
    model's own modules; the result is the fastest proved layout, or the simplest of several with the same time.

    Args:
        model: a model of transformers, or an ``nn.Sequential``, on the rank's device. Of a model on the meta device,
            single layers get memory to be measured, and a rank's stages to be run.
        loss_fn: see ``Pipeline``.
        example: positional arguments of the first stage for one micro-batch.
        num_micro_batches: micro-batches of a step, over all ranks of the group.
        target: the target of one micro-batch.
        example_kwargs: keyword arguments of the stages for one micro-batch.
        group: the ranks; default: the world.
        memory_gib: memory of each rank for weights, gradients, optimizer states and activations; by default 94 % of a
            GPU's memory. If they do not fit, blocks of transformers and modules of an ``nn.Sequential`` without buffers
            recompute their activations.
        search: the limits of the search, and what else it may change.
        options: further arguments of ``Pipeline`` for the steps that are run.

    Raises:
        PipelineError: no layout fits into the memory, the ranks have different models, or the layers are unknown.
    """
    batch = Batch(tuple(example), example_kwargs or {}, target, loss_fn)
    return _Tuning(model, batch, num_micro_batches, group, memory_gib, search or Search(), options).run()


def tuned(
    pipeline: type[Pipeline], model: nn.Module, search: Search | None = None, target: Any = None,
    memory_gib: float | None = None, **arguments: Any,
) -> Pipeline:  # fmt: skip
    """The pipeline of the layout that ``tune`` chooses, see ``Pipeline.tuned``."""
    layout = tune(model, search=search, target=target, memory_gib=memory_gib, **arguments)
    batch = Batch(tuple(arguments["example"]), arguments.get("example_kwargs") or {}, None, None)
    batch = batch.resized(layout.micro_batch_size)
    arguments |= {"group": layout.group, "example": batch.args, "example_kwargs": batch.kwargs or None}
    if layout.data_ranks > 1:
        arguments["data_group"] = layout.data_group
    del arguments["num_micro_batches"]
    return pipeline(layout.stages, plan=layout.plan, split=layout.split, replay=layout.replay, **arguments)


class _Tuning(Tuning):
    def __init__(
        self, model: nn.Module, batch: Batch, num_micro_batches: int, group: Any, memory_gib: float | None,
        search: Search, options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.model, self.batch, self.group, self.options = model, batch, group, options
        self._made_groups: dict[int, tuple[Any, Any, int]] = {1: (group, None, 0)}
        self.ranks = join(group, options.get("timeout_s", 600.0))
        super().__init__(self.ranks.agreement, num_micro_batches, memory_gib, search)
        self.device = device_of([model], allow_meta=True)
        if any(weight.is_meta for weight in model.parameters()):
            values = (*batch.args, *batch.kwargs.values())
            self.device = next((each.device for each in values if isinstance(each, torch.Tensor)), self.device)
        self.is_gpu = self.device.type == "cuda"
        self.allocated = torch.cuda.memory_allocated(self.device) if self.is_gpu else 0
        """Bytes at the start: leftovers of a trial are freed before the next one is measured."""

    def _chain(self) -> Cutter:
        example = None
        if self.batch.kwargs:
            example = {getattr(self.model, "main_input_name", "input_ids"): self.batch.args[0], **self.batch.kwargs}
        self.cutter = Cutter.of(self.model, example)
        return self.cutter

    def _facts(self) -> dict[str, Any]:
        weights = [(n, tuple(w.shape), str(w.dtype), w.requires_grad) for n, w in self.model.named_parameters()]
        shapes = [_about(value) for value in (*self.batch.args, *self.batch.kwargs.items(), self.batch.target)]
        device = torch.cuda.get_device_name(self.device) if self.is_gpu else "cpu"
        return {
            "weights": weights, "device": device, "torch": torch.__version__,
            "arguments": [shapes, sorted(map(str, self.options.items()))],
        }  # fmt: skip

    def _divisions(self) -> list[Division]:
        own, num_ranks, asked = self.batch.num_rows, self.ranks.num_ranks, self.search
        num_rows = own * self.num_micro_batches
        sizes: Any = asked.rows_per_micro_batch
        if sizes == "auto":
            sizes = [*([] if own % 2 else [own // 2]), own, 2 * own, 4 * own]
        elif sizes is None or isinstance(sizes, int):
            sizes = [sizes]
        counts = divisors(num_ranks) if asked.data_ranks == "auto" else [asked.data_ranks]
        divisions = [
            Division(rows, count, num_rows // ((rows or own) * count))
            for rows in sizes for count in counts
            if not num_ranks % count and not num_rows % ((rows or own) * count)
        ]  # fmt: skip
        if not divisions:
            raise PipelineError(
                f"{num_rows} rows in a step and {num_ranks} ranks do not divide by data_ranks={asked.data_ranks} and "
                f"rows_per_micro_batch={asked.rows_per_micro_batch}: change one of them"
            )
        if asked.rows_per_micro_batch is not None and self.options.get("split_dims"):
            raise PipelineError("rows_per_micro_batch changes rows in the first dim only: leave out split_dims, or it")
        if counts != [1] and "data_group" in self.options:
            raise PipelineError("data_ranks makes the data group: leave out data_group")
        return divisions

    def _groups(self, row: LayoutRow) -> tuple[Any, Any, int]:
        return self._groups_of(row.data_ranks)

    def _groups_of(self, data_ranks: int) -> tuple[Any, Any, int]:
        """See ``_groups``; every rank makes its own groups in the same order."""
        if data_ranks not in self._made_groups:
            ranks, own = self.ranks.global_ranks, self.ranks.rank
            replica, first = own % data_ranks, own - own % data_ranks
            pipeline, copies = (
                dist.new_group(members, use_local_synchronization=True)
                for members in (ranks[replica::data_ranks], ranks[first : first + data_ranks])
            )
            self._made_groups[data_ranks] = pipeline, copies, replica
        return self._made_groups[data_ranks]

    def _reductions_ns(self, data_ranks: int) -> tuple[tuple[int, ...], int]:
        """Times of the sums that a ``Pipeline`` makes at the end of a step, of a small and of a large bucket."""
        _, group, _ = self._groups_of(data_ranks)
        sizes = [trained for _, trained in self._weight_bytes()]
        buckets = [_SMALL_BUCKET, max(2 * _SMALL_BUCKET, min(BUCKET_BYTES, sum(sizes)))]
        small, large = (max(self._gathered("sum", self._sum_ns(bucket, group))) for bucket in buckets)
        per_byte = max(0.0, large - small) / (buckets[1] - buckets[0])
        return tuple(int(per_byte * size) for size in sizes), int(small)

    def _sum_ns(self, num_bytes: int, group: dist.ProcessGroup) -> float:
        """The median time to average a gradient of this size over a group."""
        dtype = next((w.dtype for w in self.model.parameters() if w.is_floating_point()), torch.float32)
        weight = nn.Parameter(torch.zeros(num_bytes // dtype.itemsize, dtype=dtype, device=self.device))
        weight.grad = torch.zeros_like(weight)
        times = []
        with torch.no_grad():
            for _ in range(_MESSAGES):
                self._barrier()
                started = time.perf_counter_ns()
                average_gradients([weight], group)
                self._sync()
                times.append(time.perf_counter_ns() - started)
        return median(times[_MESSAGES // 3 :])

    def _ways(self) -> list[RunWay]:
        splits = self.search.splits or (("whole", "graph") if self.is_gpu else ("whole", "linear"))
        return [RunWay(split, self.is_gpu and split == "whole") for split in splits]

    def _measured(
        self, ways: Sequence[RunWay], prior_costs: Mapping[RunWay, list[LayerCost]] | None = None
    ) -> dict[RunWay, list[LayerCost]]:
        """The costs in each possible way; ``linear`` replaces ``graph`` where that is impossible."""
        costs = super()._measured(ways, prior_costs)
        refused = [way for way in ways if way.split == "graph" and way not in costs]
        linear = [each for way in refused if (each := way._replace(split="linear")) not in costs]
        if linear and prior_costs is None:
            costs |= self._measured(linear)
        for way in [way for way in costs if self._is_replayed(way)]:
            costs[way._replace(replay=True)] = [replace(cost, host=0) for cost in costs[way]]
        return costs

    def _measure(self, sample: Sample, way: RunWay) -> tuple[LayerCost, str]:
        return measure_sample(self.cutter, sample, way, self.batch.resized(way.rows), self.device)

    def _limit(self) -> int | None:
        own = super()._limit()
        if own is None and self.is_gpu:
            own = int(0.94 * torch.cuda.get_device_properties(self.device).total_memory)
        return own

    def _is_replayed(self, way: RunWay) -> bool:
        return self.is_gpu and way.split == "graph"

    def _static_bytes(self) -> tuple[int, ...]:
        return tuple(
            int(whole + trained * (1 + self.search.optimizer_bytes)) for whole, trained in self._weight_bytes()
        )

    def _weight_bytes(self) -> list[tuple[int, int]]:
        """The bytes of each layer's weights, and of those that are trained."""
        stages = self.cutter.stages([1] * self.cutter.num_layers)
        return [weight_bytes(stage.parameters()) for stage in stages.values()]

    def _latency_ns(self, rows: int | None) -> int:
        """The slowest median time of a message between neighbours, measured with nothing else under way."""
        if self.ranks.num_ranks == 1:
            return 0
        message = self._gathered("message", self._message_bytes(self.batch.resized(rows)))[0]
        group, ranks = self.ranks.group, self.ranks.global_ranks
        buffer = torch.empty(max(1, message), dtype=torch.uint8, device=self.device)
        medians = [0.0]
        for first in range(self.ranks.num_ranks - 1):
            times = [self._message_ns(buffer, first, ranks, group) for _ in range(_MESSAGES)]
            if self.ranks.rank in (first, first + 1):
                medians.append(median(times[_MESSAGES // 3 :]))
        return int(max(self._gathered("message time", max(medians))))

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

    def _message_bytes(self, batch: Batch) -> int:
        stages = self.cutter.stages([1, self.cutter.num_layers - 1]) if self.cutter.num_layers > 1 else None
        if stages is None:
            return 0
        if self.cutter.is_meta:
            batch = batch.on(torch.device("meta"))
        with torch.no_grad(), unchanged_state(stages.values(), self.device):
            value = stages[0](*batch.args, **(batch.kwargs if self.cutter.has_ends else {}))
        leaves = value if isinstance(value, tuple) else (value,)
        return sum(leaf.numel() * leaf.element_size() for leaf in leaves)

    def _sync(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def _stages(self, row: LayoutRow) -> ModelStages:
        """See ``Tuning``; the model's blocks run in the layout's way from now on."""
        self.cutter.run_as(row.way, self._recomputed(row))
        return self.cutter.stages(row.sizes)

    def _trial(self, row: LayoutRow) -> list[LayoutRow]:
        """See ``Tuning``: operation by operation, and replayed if the layout asks for it."""
        plain = replace(row, replay=False)
        plain = replace(plain, predicted_ms=self._step_of(plain)[0] / 1e6)
        rows: list[LayoutRow] = []
        try:
            with ExitStack() as stack:
                stack.enter_context(gradients_aside(list(self.model.parameters())))
                stack.enter_context(unchanged_state([self.model], self.device))
                pipe = self._pipeline(row, stack)
                stack.callback(pipe.close)
                stack.callback(pipe._cut_model.forget)  # noqa: SLF001 - its weights stay as they are
                self.plans[row.plain] = pipe.plan.content
                with pipe._runner.unchanged():  # noqa: SLF001 - operation by operation
                    rows.append(self._timed_row(plain, pipe))
                other = [split for split in pipe.splits.values() if split != row.split]
                if row.split == "graph" and other:
                    return [replace(rows[0], reason=other[0])]
                if row.replay:
                    rows.append(self._timed_row(row, pipe))
        except PipelineError as error:
            failed = row.failed(error)
            if row.replay and not rows and failed.reason.startswith("replay=True"):
                return [*self._trial(plain), failed]
            rows.append(failed)
        finally:
            self._clean()
        return rows

    def _pipeline(self, row: LayoutRow, stack: ExitStack) -> Pipeline:
        """The pipeline of a layout; weights on the meta device have memory until the stack ends."""
        stages, batch = self._stages(row), self.batch.resized(row.rows)
        group, data_group, _ = self._groups(row)
        if self.cutter.is_meta:
            num_ranks = self.ranks.num_ranks // row.data_ranks
            own = stages_of_rank(row.schedule, num_ranks, len(stages), self.ranks.rank // row.data_ranks)
            stack.enter_context(with_memory([stages[number] for number in own], self.device))
        options = self.options if data_group is None else {**self.options, "data_group": data_group}

        def make() -> Pipeline:
            return Pipeline(
                stages, plan={"schedule": self._schedule(row)}, loss_fn=batch.loss_fn, example=batch.args,
                example_kwargs=batch.kwargs or None, group=group, split=row.split,  # type: ignore[arg-type]
                replay=row.replay, **options,
            )  # fmt: skip

        if data_group is None:
            return make()
        self._num_asked += 1
        return self.agreement.own(f"pipeline {self._num_asked}", make)

    def _timed_row(self, row: LayoutRow, pipe: Pipeline) -> LayoutRow:
        batch, num = self.batch.resized(row.rows), pipe.num_micro_batches
        args = [_every(value, num) for value in batch.args] if pipe.is_first else []
        kwargs = {name: _every(value, num) for name, value in batch.kwargs.items()}
        target = _every(batch.target, num) if pipe.is_last and batch.loss_fn is not None else None
        weights = [weight for stage in pipe.stages.values() for weight in stage.parameters()]

        def step() -> None:
            pipe.step(*args, target=target, **kwargs)
            for weight in weights:
                weight.grad = None

        times, peak = self._times_and_peak(step, is_compiled=row.replay)
        whole, trained = weight_bytes(weights)
        own = self.search.optimizer_bytes * trained + (0 if self.cutter.is_meta else whole)
        return self._measured_row(row, times, (peak - self.allocated + own) / GIB if self.is_gpu else None)

    def _times_and_peak(self, step: Callable[[], None], *, is_compiled: bool = False) -> tuple[list[float], int]:
        """The times of ``_timed``, and the most bytes that were allocated."""
        if self.is_gpu and is_compiled:
            torch.cuda.reset_peak_memory_stats(self.device)
        self._series(step)  # compiles, and with replay captures: the memory of a replay is allocated then
        if self.is_gpu and not is_compiled:
            torch.cuda.reset_peak_memory_stats(self.device)
        times = self._timed(step)
        return times, torch.cuda.max_memory_allocated(self.device) if self.is_gpu else 0

    def _barrier(self) -> None:
        self._sync()
        dist.barrier(self.ranks.group)
        self._sync()

    def _note_no_pipeline(self, fastest: LayoutRow) -> None:
        """Note the steps of FSDP2 without a pipeline, with the example's micro-batches and with twice as many rows."""
        num_ranks, measurements = self.ranks.num_ranks, dict[int, tuple[float, float | None]]()
        if num_ranks == 1 or not self.search.without_pipeline:
            return
        for num_examples in (1, 2):
            num, rest = divmod(self.num_micro_batches, num_ranks * num_examples)
            if rest or not self._has_time(0.0) or not self._has_room():
                continue
            self._report(f"running FSDP2 without a pipeline, micro-batches of {num_examples} examples")
            with unchanged_state([self.model], self.device):
                step = sharded_step(self.cutter, self.batch, num_examples, num, self.ranks.group, self.device)
                times, peak = self._times_and_peak(step)
            states = self.search.optimizer_bytes * weight_bytes(self.model.parameters())[1] / num_ranks
            own = (peak - self.allocated + states) / GIB if self.is_gpu else 0.0
            gib = max(self._gathered("no pipeline", own))
            measurements[num_examples] = times[0], gib if self.is_gpu else None
            del step
            self._clean()
        for num_examples, (ms, gib) in measurements.items():
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
        return all(self._gathered("room", not self.is_gpu or 3 * size < torch.cuda.mem_get_info(self.device)[0]))

    def _clean(self) -> None:
        super()._clean()
        if self.is_gpu:
            torch.cuda.empty_cache()


def _every(value: Any, num: int) -> Any:
    return MicroBatches([value] * num) if isinstance(value, torch.Tensor) else value


def _about(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
