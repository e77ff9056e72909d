"""``tune`` for Paddle: the fastest proved pipeline that was measured for a list of layers on a group of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import paddle
from paddle import nn
from paddle.distributed.fleet.meta_parallel import PipelineLayer

from pipeproof.analysis.tune.layer_cuts import Best, Lacking, LayerCost, numbers_of_stages
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.layer_samples import RunWay, Sample, host_times, plain_settings
from pipeproof.exec.train.paddle.boundary_inference import StageRun, run_stage, unchanged_state, zeros_of
from pipeproof.exec.train.paddle.module_stage import ModuleStage, SplitBackward
from pipeproof.exec.train.paddle.pipeline import Pipeline
from pipeproof.exec.train.paddle.stage_layers import ListStages, LossFunction, require_layers, trained
from pipeproof.exec.train.paddle.start_phases import join
from pipeproof.exec.train.paddle.step_data import StepData, rows_of
from pipeproof.exec.train.paddle.step_runner import drawn_step
from pipeproof.exec.train.plan_layers import LayerFacts, StageFacts, layers_content
from pipeproof.exec.train.stage_boundaries import Boundaries
from pipeproof.exec.train.tuned_layout import Layout, LayoutRow
from pipeproof.exec.train.tuning import Search, Tuning
from pipeproof.schedule.kinds import SCHEDULE_KINDS


def tune(
    layers: PipelineLayer | Sequence[Any],
    *,
    loss_fn: LossFunction | None = None,
    example: Any,
    target: Any,
    num_micro_batches: int,
    group: Any = None,
    memory_gib: float | None = None,
    search: Search | None = None,
    timeout_s: float = 600.0,
) -> Layout:
    """Find the fastest pipeline for a list of layers on the CPUs of a group's ranks, by measurements on them.

    Every rank calls it with an equal list, builds all layers, and measures a part of them: forward, input and weight
    gradients, and the memory that they keep. It searches all cuts for every kind of schedule; the best layouts run, and
    the fastest is chosen. It builds or copies layers for this: the list's layers stay unchanged. The search counts
    messages as 0; the steps that run include their time.

    ``Pipeline(layout.stages, plan=layout.plan, loss_fn=..)`` trains by the result, whose ``stages`` are the list.

    Args:
        layers: a list, see ``Pipeline``; the list of a ``PipelineLayer`` is cut anew.
        loss_fn: ``(output, label) -> loss``. Default: the first one of the ``PipelineLayer``.
        example: the inputs of the first stage for one micro-batch.
        target: the label of one micro-batch.
        num_micro_batches: micro-batches of a step.
        group: see ``Pipeline``.
        memory_gib: memory of each rank for weights, gradients, optimizer states and activations.
        search: the limits of the search; ``without_pipeline`` has no effect, and ranks and rows are not divided anew.
        timeout_s: see ``Pipeline``.

    Raises:
        PipelineError: no layout fits into the memory, the ranks have different layers, or a layer raised.
    """
    require_layers(layers)
    losses: Sequence[Any] = [loss_fn]
    if isinstance(layers, PipelineLayer):
        losses = [loss_fn or layers._loss_fn[0]]  # noqa: SLF001 - Fleet's own classes read these
        layers = layers._layers_desc  # noqa: SLF001
    if paddle.device.get_device() != "cpu":
        raise PipelineError("pipeproof.paddle.tune measures on CPUs only, and Paddle's device is a GPU")
    if search is not None and (search.data_ranks, search.rows_per_micro_batch) != (1, None):
        raise PipelineError("pipeproof.paddle.tune has no data_ranks and rows_per_micro_batch: leave them out")
    if losses == [None]:
        raise PipelineError("tune needs a loss: give it a loss_fn")
    return _Tuning(list(layers), losses, (example, target), num_micro_batches, group, memory_gib,
                   search or Search(), timeout_s).run()  # fmt: skip


class _Chain:
    """Each entry of the list as a layer; in ``whole`` each is a stage of its own."""

    has_ends = False

    def __init__(self, described: Sequence[Any], losses: Sequence[LossFunction]) -> None:
        self.described, self.num_layers = described, len(described)
        self.losses = losses
        self.whole = self.built(range(self.num_layers))

    def built(self, numbers: range) -> ListStages:
        """New layers of some entries, or copies of layers that the script built."""
        return ListStages(copied(self.described), range(self.num_layers + 1), numbers, self.losses)

    def block(self, layer: int) -> nn.Layer:
        """The layers of an entry."""
        return self.whole.module(layer)

    def can_recompute(self, _: int) -> bool:
        """No layer can."""
        return False

    def blocks_of(self, sizes: Sequence[int]) -> list[int]:
        """The entries of each stage."""
        return list(sizes)

    def signature(self, layer: int) -> str:
        """Its classes and settings; unique for a function and for a layer that Fleet shares."""
        item = self.whole.items(layer)[0]
        if item.module is None or item.shared:
            return f"entry {layer}"
        parts = [
            (name, type(part).__qualname__, part.extra_repr(), plain_settings(part, {"training"}))
            for name, part in item.module.named_sublayers(include_self=True)
        ]
        weights = [(n, w.shape, str(w.dtype), w.stop_gradient) for n, w in item.module.named_parameters()]
        return str((parts, weights))


def copied(described: Sequence[Any]) -> list[Any]:
    """The entries, with copies of built layers; the copies share weights as the layers do."""
    memo: dict[int, Any] = {}
    return [copy.deepcopy(each, memo) if isinstance(each, nn.Layer) else each for each in described]


class _Tuning(Tuning):
    def __init__(
        self, described: Sequence[Any], losses: Sequence[LossFunction], batch: tuple[Any, Any], num_micro_batches: int,
        group: Any, memory_gib: float | None, search: Search, timeout_s: float,
    ) -> None:  # fmt: skip
        self.described, self.losses, self.group, self.timeout_s = described, losses, group, timeout_s
        self.example, self.target = batch
        self.ranks = join(group, timeout_s)
        super().__init__(self.ranks.agreement, num_micro_batches, memory_gib, search)

    def _chain(self) -> _Chain:
        self.entries = _Chain(self.described, self.losses)
        whole, value = self.entries.whole, self.example
        self.inputs: list[Any] = []
        self.runs: list[StageRun] = []
        for number in range(self.entries.num_layers):
            self.inputs.append(value)
            is_last = number == self.entries.num_layers - 1
            run = run_stage(number, whole.module(number), partial(whole.call, number), value, is_last=is_last)
            self.runs.append(run)
            value = None if is_last else zeros_of(run.form, run.leaves)
        return self.entries

    def _facts(self) -> dict[str, Any]:
        weights = [(n, w.shape, str(w.dtype)) for n, w in self.entries.whole.layers.named_parameters()]
        shapes = [(leaf.shape, str(leaf.dtype)) for leaf in _tensors([self.example, self.target])]
        return {"weights": weights, "device": "cpu", "paddle": paddle.__version__, "arguments": shapes}

    def _ways(self) -> list[RunWay]:
        return [RunWay(split, is_compiled=False) for split in self.search.splits or ("whole", "linear")]

    def _searched(self, costs: Mapping[RunWay, list[LayerCost]]) -> tuple[list[Best], list[Lacking]]:
        """The cuts; a stage has a split backward if its schedule has W, and not otherwise."""
        best_cuts, lacking = super()._searched(costs)
        sizes = self.agreement.num_ranks, self.num_micro_batches
        return [
            best for best in best_cuts
            if len(costs) == 1 or best.problem.way.splits == (SCHEDULE_KINDS[best.kind].split_backwards(*sizes) > 0)
        ], lacking  # fmt: skip

    def _static_bytes(self) -> tuple[int, ...]:
        sizes = []
        for number in range(self.entries.num_layers):
            module = self.entries.whole.module(number)
            whole, own = (
                sum(int(w.size) * int(w.element_size()) for w in weights)
                for weights in (module.parameters(), trained(module).values())
            )
            sizes.append(int(whole + own * (1 + self.search.optimizer_bytes)))
        return tuple(sizes)

    def _latency_ns(self, rows: int | None) -> int:
        return 0

    def _measure(self, sample: Sample, way: RunWay) -> tuple[LayerCost, str]:
        entries, last = self.entries.built(sample.layers), sample.layers[-1]
        module = nn.LayerList([entries.module(n) for n in sample.layers])

        def call(value: Any) -> Any:
            for number in sample.layers:
                value = entries.call(number, value)
            return value

        is_last, first = last == self.entries.num_layers - 1, sample.first
        run = self.runs[last]
        before = self.runs[first - 1] if first else None
        split = SplitBackward([module], [*trained(module).values()]) if way.split != "whole" else None
        stage = ModuleStage(
            first, module, call, Boundaries(before.form if before else None, run.form, () if is_last else run.leaves),
            self.losses, {}, num_losses=1, split=split,
        )  # fmt: skip
        gradients = [None] if is_last else [
            paddle.ones(list(leaf.shape), leaf.dtype) if leaf.has_gradient else None for leaf in run.leaves
        ]  # fmt: skip

        def one_round(mark: Callable[[], None]) -> None:
            inputs = () if before is None else tuple(_tensors([zeros_of(before.form, before.leaves)]))
            stage.begin(StepData([self.example], [self.target]))
            mark()
            outputs = stage.forward(inputs, step=0, index=0, split=0, watch=None)
            mark()
            rest = stage.backward_input(outputs, gradients)
            mark()
            rest.accumulate()
            mark()

        kept = sum(self.runs[n].activation_bytes for n in sample.layers)
        with unchanged_state(module):
            forward, inputs, weights = host_times(one_round)
        return LayerCost(
            forward, inputs, weights, kept, kept if split else 0, forward_peak=kept, backward_peak=kept
        ), ""  # fmt: skip

    def _stages(self, row: LayoutRow) -> list[Any]:
        return list(self.described)

    def _plan(self, row: LayoutRow) -> dict[str, Any]:
        """A plan with a layer for each entry."""
        num_rows, facts = rows_of(self.example), []
        for number, run in enumerate(self.runs):
            item = self.entries.whole.items(number)[0]
            weights = trained(item.module)
            parameters = [{"name": name, "shape": list(weight.shape)} for name, weight in weights.items()]
            facts.append(StageFacts((LayerFacts(
                f"layer.{number}", type(item.module).__name__ if item.module is not None else "", parameters,
                [*weights], (), [leaf.plan_entry(num_rows) for leaf in run.leaves], run.activation_bytes,
            ),)))  # fmt: skip
        return {
            "model": {"kind": "layers", "layers": layers_content(facts, self._ties())},
            "stages": [[f"layer.{n}" for n in numbers] for numbers in numbers_of_stages(row.sizes)],
            "schedule": {**self._schedule(row), "micro_batch_size": num_rows},
        }

    def _ties(self) -> list[dict[int, str]]:
        """The weights that entries share, by their names in the entries' layers."""
        users: dict[int, dict[int, str]] = {}
        for number in range(self.entries.num_layers):
            for name, weight in trained(self.entries.whole.items(number)[0].module).items():
                users.setdefault(id(weight), {})[number] = name
        return [names for names in users.values() if len(names) > 1]

    def _trial(self, row: LayoutRow) -> list[LayoutRow]:
        state = paddle.get_rng_state()
        try:
            pipe = Pipeline(
                copied(self.described), plan=self._plan(row), loss_fn=self.losses, example=self.example,
                group=self.group, timeout_s=self.timeout_s,
            )  # fmt: skip
        except PipelineError as error:
            return [row.failed(error)]
        try:
            self.plans[row.plain] = pipe.plan.content
            runner, num = pipe._runner, self.num_micro_batches  # noqa: SLF001 - steps without an optimizer
            assert runner is not None
            data = _every(self.example, num), _every(self.target, num)

            def step() -> None:
                drawn = drawn_step(pipe._placed, data, 0, runner.sizes, is_training=True)  # noqa: SLF001
                runner.train(drawn, whole=True)

            step()
            return [self._measured_row(row, self._timed(step), None)]
        except PipelineError as error:
            return [row.failed(error)]
        finally:
            pipe.close()
            paddle.set_rng_state(state)
            self._clean()

    def _barrier(self) -> None:
        self._gathered("barrier", None)


def _tensors(value: Any) -> list[Any]:
    """The tensors of a value."""
    if isinstance(value, paddle.Tensor):
        return [value]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [leaf for item in items for leaf in _tensors(item)]


def _every(value: Any, num: int) -> Any:
    """The value of one micro-batch, repeated for all micro-batches, as ``train_batch`` takes it."""
    if isinstance(value, Mapping):
        return {key: [item] * num for key, item in value.items()}
    return tuple([item] * num for item in value) if isinstance(value, tuple) else [value] * num
