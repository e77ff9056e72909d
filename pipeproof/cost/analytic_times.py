"""Times of stages from ``cost.analytic``: a roofline of every operation, summed.

An operation takes the longer of its FLOPs and its bytes, by measured curves or
by the share of peak and of bandwidth that the plan states (Williams et al.,
Roofline: an insightful visual performance model, 2009). Operations follow one
another, and so do the collectives inside layers, except over the axes of
``overlap``. A phase takes the longer of this time and the host's. W has no
collectives: its inputs were gathered for F.

The arithmetic is exact; each time is rounded once, to ``GRID_US`` (times of
collectives up), before they are added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from itertools import chain
from operator import add, attrgetter
from typing import NamedTuple

from pipeproof.cost.analytic_links import Links
from pipeproof.cost.device_tables import attention_share, device_table, exact, product_us
from pipeproof.cost.devices import DEVICES, Device
from pipeproof.cost.network_times import DEFAULT_LINK_EFFICIENCY, Network
from pipeproof.diagnostics.finding import BadPlanAtError, Finding, Severity
from pipeproof.schedule.kinds import ends_share_ranks
from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.specs.cost import AnalyticSpec, CostSpec
from pipeproof.specs.cost_table import CostTable, ProductCurve
from pipeproof.specs.exact_times import GRID_US, MAX_TIME_US, rounded, rounded_up
from pipeproof.specs.memory import Recompute
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import MicroBatchSize, work_item_sizes
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer import (
    Collective,
    CollectiveKind,
    Layer,
    is_block,
    is_in_modules,
    layer_kind,
    modules_of_block,
    weight_calls,
)
from pipeproof.stages.describe.layers.layer_operations import layer_operations
from pipeproof.stages.describe.layers.operations import Product
from pipeproof.stages.describe.model_family import stage_layers
from pipeproof.stages.describe.op_work import ComputeUnit, Phase, Work, layer_work, operation_works
from pipeproof.stages.describe.stage_memory import (
    copied_bytes,
    moved_by_update,
    offloaded_blocks,
    state_of_weights,
)

_ZERO = Fraction(0)

_MATMUL, _ATTENTION, _MEMORY = 0.7, 0.5, 0.8
"""Shares of peak and of memory bandwidth for devices and types without measured curves."""

_CAST_BYTES = 4
"""Bytes for each element that is cast to fewer bits: two are read, one is written as it is and one transposed."""

_NOT_HIDDEN = Fraction(3, 10)
"""Share of the time to read and write a weight gradient that its product in 16 bits does not hide. Of 27 products on
one H200, W takes 31 % of this time more if it adds to a gradient in float32, and 16 % more to one in bfloat16
(``benchmarks/gpu/shape_kernels.py``). Products in fewer bits, which were not measured, hide nothing."""

_LINK_PROCESSORS = Fraction(16, 132)
"""Share of a chip's processors that a collective takes from products: 16 of the 132 of an H100 (TransformerEngine's
default for pipelined collectives)."""

_SUMS = (CollectiveKind.ALL_REDUCE, CollectiveKind.REDUCE_SCATTER)

_PAIR_PROCESSORS = Fraction(20, 132)
"""Share of a chip's processors that the collectives of an overlapped pair hold."""

_PASSES = 4
"""Reads and writes of memory for each byte that a collective of an overlapped pair moves."""

_PHASE_LAUNCHES = 10
"""Operations that the host starts around F or I of a micro-batch on a stage: its batch, messages, the schedule."""

_COMPILED_HOST = Fraction("0.8")
"""Time of the host with each stage compiled as one graph, as a share of eager execution (``docs/costs.md``)."""

_REPLAYED_NAMES: Mapping[str, tuple[str, ...]] = {
    "attention": ("attn_norm", "attn."),
    "router": ("mlp_norm", "mlp.router", "mlp.scores", "mlp.shared."),
}
"""Prefixes of the names of operations that the replay of a part in ``replayed`` starts."""

_OVERLAPPING = ("dualpipe", "dualpipe_v", "file", "custom")
"""Schedules in which a forward and a backward may run in parallel."""


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """One phase of a stage or layer, for one micro-batch: its work, and its times in microseconds.

    ``compute_us`` is the time of operations bound by FLOPs, ``memory_us``
    of operations bound by bytes, ``links_us`` of collectives. ``host_us``
    is the concurrent time of the host to start them, and ``copies_us`` the
    time of copies of activations to or from host memory.
    """

    flops: Fraction = _ZERO
    num_bytes: Fraction = _ZERO
    link_bytes: Fraction = _ZERO
    compute_us: Fraction = _ZERO
    memory_us: Fraction = _ZERO
    links_us: Fraction = _ZERO
    host_us: Fraction = _ZERO
    copies_us: Fraction = _ZERO

    @property
    def device_us(self) -> Fraction:
        """The time of the device alone."""
        return self.compute_us + self.memory_us + self.links_us

    @property
    def us(self) -> Fraction:
        """The whole time: the device never waits for the host or for copies, or always."""
        return max(self.device_us, self.host_us, self.copies_us)

    def __add__(self, other: PhaseTime) -> PhaseTime:
        return PhaseTime(*map(add, _PARTS(self), _PARTS(other)))

    def times(self, number: int) -> PhaseTime:
        """The sum of ``number`` equal times."""
        return PhaseTime(*(number * part for part in _PARTS(self)))


_PARTS = attrgetter(*(field.name for field in fields(PhaseTime)))


class FlatShares(NamedTuple):
    """Shares of peak and bandwidth for all sizes; None if measured curves are used."""

    products: float | None
    attention: float | None
    memory: float
    links: float | None


class AnalyticCosts:
    """Times of a plan's stages on the device that ``cost.analytic`` names.

    If micro-batches and splits differ in size, the one with most tokens
    counts. A split is an average one: causal attention gives later ones more.
    """

    def __init__(self, plan: PlanSpec, analytic: AnalyticSpec) -> None:
        self.analytic = analytic
        self.device: Device = DEVICES[analytic.device]
        self.table: CostTable | None = analytic.table or device_table(analytic.device)
        self._operation_us = _host_us(analytic, self.table)
        self._start_us = _ZERO
        if self.table is not None and analytic.memory_efficiency is None:
            self._start_us = exact(self.table.elementwise_us)
        replays, collective_us = analytic.execution == "graph", analytic.collective_us
        self.collective_host_us = self._operation_us if replays or collective_us is None else exact(collective_us)
        """Time of the host for a collective inside a layer."""
        self._fill_us = _ZERO if replays else exact(analytic.fill_us)
        self._replayed = tuple(name for part in analytic.replayed for name in _REPLAYED_NAMES[part])
        self.dtype: str = analytic.dtype or plan.run.dtype
        run = plan.run.model_copy(update={"dtype": self.dtype})
        self._plan = plan.model_copy(update={"run": run})
        curves = () if self.table is None else self.table.collectives
        network = Network.of_device(analytic, self.device, plan.cost.network, curves)
        self.links = Links(self._plan, network.routed(plan.model.moe, by_node=analytic.exchange == "by_node"))
        self.size: MicroBatchSize = max(work_item_sizes(plan)[0], key=lambda size: (size.num_tokens, size.seq_length))
        """The largest work item: a micro-batch or a split."""
        self.num_splits = plan.schedule.num_sequence_splits

    @cached_property
    def stages(self) -> tuple[Mapping[Phase, PhaseTime], ...]:
        """By global stage, the time of each phase of a whole micro-batch, all its splits together."""
        model = self._plan.gpt
        kinds = {layer: layer_kind(model, layer) for names in stage_layers(self._plan) for layer in names}
        described = {layer_kind(model, layer.name): layer for layer in describe_gpt(self._few_blocks(), self.size)}
        by_kind = {kind: self.layer(described[kind]) for kind in set(kinds.values())}
        stages = list[dict[Phase, PhaseTime]]()
        for number, names in enumerate(stage_layers(self._plan)):
            counts, copies_us = Counter(kinds[name] for name in names), self._copies_us(names)
            stage = {}
            for phase in Phase:
                host_us = self.num_splits * self.host_around_us(phase, names, is_first=number == 0)
                around = PhaseTime(host_us=host_us, copies_us=_ZERO if phase is Phase.WEIGHT else copies_us)
                stage[phase] = sum((by_kind[kind][phase].times(n) for kind, n in counts.items()), around)
            stages.append(stage)
        self._hide_loss(stages)
        return tuple(stages)

    def _hide_loss(self, stages: Sequence[dict[Phase, PhaseTime]]) -> None:
        """Subtract the loss where it makes the device slower than the host, on a rank that the host bounds as a whole.

        The host runs ahead meanwhile, and the device catches up in the next phases.
        """
        last, num_ranks = len(stages) - 1, self._plan.topology.pp
        own = {0, last} if ends_share_ranks(self._plan) else {*range(last % num_ranks, last + 1, num_ranks)}
        times = [time for number in own for time in stages[number].values()]
        if sum(time.host_us - time.device_us for time in times) <= 0:
            return
        for work in layer_work(self._plan, "head", self.size, dtype_bytes(self.dtype)):
            if work.name == "head.loss":
                time = stages[last][work.phase]
                loss_us, over_us = self.num_splits * self.work(work).memory_us, time.device_us - time.host_us
                stages[last][work.phase] = replace(time, memory_us=time.memory_us - max(_ZERO, min(loss_us, over_us)))

    def host_around_us(self, phase: Phase, names: Sequence[str], *, is_first: bool) -> Fraction:
        """Time of the host around a phase of a work item on a stage with these layers: batch, messages, schedule."""
        launches = _PHASE_LAUNCHES if names and phase is not Phase.WEIGHT else 0
        reads = is_first and phase is Phase.FORWARD
        return launches * self._operation_us + (exact(self.analytic.input_us) / self.num_splits if reads else _ZERO)

    def _copies_us(self, names: Sequence[str]) -> Fraction:
        """Time to copy the offloaded blocks of a stage to host memory, or back, for a micro-batch."""
        offloaded = offloaded_blocks(self._plan, names)
        num_bytes = sum((copied_bytes(self._plan, name, self.size) for name in offloaded), _ZERO)
        return self.num_splits * num_bytes / (exact(self.host_bandwidth) * 1000)

    @property
    def host_bandwidth(self) -> float:
        """GB/s of copies between the memory of the device and its host."""
        share = self.analytic.link_efficiency
        return self._plan.cost.host_bandwidth or self.device.host * (
            DEFAULT_LINK_EFFICIENCY if share is None else share
        )

    def layer(self, layer: Layer) -> Mapping[Phase, PhaseTime]:
        """Time of each phase of one layer for a whole micro-batch."""
        return self.layer_by_recompute(layer, (self._plan.memory.recompute,))[0]

    def layer_by_recompute(
        self, layer: Layer, recomputes: Iterable[Recompute]
    ) -> tuple[Mapping[Phase, PhaseTime], ...]:
        """``layer`` for each of some values of ``memory.recompute``; their operations are timed once."""
        item_bytes = dtype_bytes(self.dtype)
        flash = self.analytic.attention == "flash"
        by_operation = operation_works(self._plan, layer.name, self.size, item_bytes, flash=flash)
        works = tuple(chain.from_iterable(by_operation))
        collectives = {Phase.FORWARD: layer.forward_collectives, Phase.INPUT: layer.backward_collectives}
        times = {}
        for phase in Phase:
            time = sum((self.work(work) for work in works if work.phase is phase), PhaseTime())
            if phase is not Phase.WEIGHT:  # which the replay of the backward includes
                time += PhaseTime(host_us=self._replays(works) * self._operation_us)
            times[phase] = self._with_collectives(time, collectives.get(phase, ()), item_bytes)
        times[Phase.WEIGHT] += self._collectives_time(weight_calls(self._plan, layer), item_bytes)
        if self._plan.topology.tp > 1 and not {"tp", "tp_backward"}.isdisjoint(self.analytic.overlap):
            operations = layer_operations(self._plan.gpt, layer.name)
            entered = [
                work
                for operation, one in zip(operations, by_operation, strict=True)
                if isinstance(operation, Product) and operation.entered
                for work in one
            ]
            self._hide_backward(times, layer, entered, item_bytes)
        times = {phase: time.times(self.num_splits) for phase, time in times.items()}
        if not is_block(layer.name):
            return tuple(times for _ in recomputes)
        again = (self._recomputed(layer, by_operation, times[Phase.FORWARD], recompute) for recompute in recomputes)
        return tuple({**times, Phase.INPUT: times[Phase.INPUT] + time} for time in again)

    def _with_collectives(self, time: PhaseTime, calls: Iterable[Collective], item_bytes: int) -> PhaseTime:
        """Add a layer's collectives to the time of its operations, without the time that ``overlap`` hides.

        A collective over tp is cut into one part for each tp rank. Not hidden are its first part, and the time that the
        products do not cover (Wang et al., Overlap communication with dependent computation via decomposition,
        ASPLOS 2023). Exchanges over ep hide behind the operations of another micro-batch, which take
        the same time as this micro-batch's.
        """
        total, over = time, dict.fromkeys(("tp", "ep"), _ZERO)
        for call in calls:
            one = self._collectives_time((call,), item_bytes)
            total += one
            if call.axis in self.analytic.overlap and call.per_token:
                over[call.axis] += one.links_us
        hidden = min(over["tp"] * (1 - Fraction(1, self._plan.topology.tp)), time.compute_us)
        hidden += min(over["ep"], time.compute_us + time.memory_us - hidden)
        return replace(total, links_us=total.links_us - hidden * (1 - _LINK_PROCESSORS))

    def _recomputed(
        self, block: Layer, works: Sequence[Sequence[Work]], forward: PhaseTime, recompute: Recompute
    ) -> PhaseTime:
        """Time of the recomputation in a block's backward: forwards of modules, or all of the ``forward``.

        ``works`` has the work of each operation.
        """
        if recompute == "full":
            return forward
        if recompute == "none":
            return PhaseTime()
        modules = modules_of_block(self._plan, block.name)
        operations = layer_operations(self._plan.gpt, block.name)
        time = sum(
            (
                self.work(work)
                for operation, one in zip(operations, works, strict=True)
                if is_in_modules(modules, operation.name)
                for work in one
                if work.phase is Phase.FORWARD
            ),
            PhaseTime(),
        )
        prefix = f"{block.name}."
        calls = [call for call in block.forward_collectives if is_in_modules(modules, call.label.removeprefix(prefix))]
        return self._with_collectives(time, calls, dtype_bytes(self.dtype)).times(self.num_splits)

    def _hide_backward(
        self, times: dict[Phase, PhaseTime], layer: Layer, entered: Iterable[Work], item_bytes: int
    ) -> None:
        """Subtract from I and W the time of the backward's collectives that products of gathered tensors hide.

        The gather for a weight's gradient runs next to the product for the input's gradient, and the sum of the latter
        next to the product for the weight's gradient (``LinearWithGradAccumulationAndAsyncCommunication.backward`` of
        Megatron-LM, and Transformer Engine's linear layers). With ``tp`` sums are pipelined already.
        """
        computing = dict.fromkeys(Phase, _ZERO)
        for work in entered:
            computing[work.phase] += self.work(work).compute_us
        sums: tuple[Collective, ...] = ()
        if "tp" not in self.analytic.overlap:
            sums = tuple(c for c in layer.backward_collectives if c.axis == "tp" and c.kind in _SUMS and c.per_token)
        for phase, calls, behind in (
            (Phase.WEIGHT, weight_calls(self._plan, layer), Phase.INPUT),
            (Phase.INPUT, sums, Phase.WEIGHT),
        ):
            hidden = min(self._collectives_time(calls, item_bytes).links_us, computing[behind])
            time = times[phase]
            times[phase] = replace(time, links_us=time.links_us - hidden * (1 - _LINK_PROCESSORS))

    def _collectives_time(self, calls: Iterable[Collective], item_bytes: int) -> PhaseTime:
        time = PhaseTime()
        for call in calls:
            us = rounded_up(self.links.collective_us(call, item_bytes))  # as it is simulated
            time += PhaseTime(link_bytes=self.links.collective_bytes(call, item_bytes), links_us=us,
                              host_us=self.collective_host_us)  # fmt: skip
        return time

    @cached_property
    def updates(self) -> tuple[Fraction, ...]:
        """By global stage, the microseconds of the optimizer's step, not rounded: only its bytes count."""
        layers = {layer.name: layer for layer in describe_gpt(self._plan)}
        lends = ends_share_ranks(self._plan)  # to a tied head: then it has no copy
        states = []
        stages = stage_layers(self._plan)
        for number, names in enumerate(stages):
            described = [layers[name] for name in names]
            is_lent = lends and number == len(stages) - 1
            held = [layer.parameters if is_lent else (*layer.parameters, *layer.borrowed) for layer in described]
            states.append(state_of_weights(self._plan, dict.fromkeys(chain.from_iterable(held))))
        return tuple(self._moved_us(moved_by_update(state)) for state in states)

    def work(self, work: Work) -> PhaseTime:
        """One operation: bound by its FLOPs or by its bytes, with the casts for it and the end of a weight gradient.

        A product adds to a weight gradient tile by tile when it is done with the tile; other tiles hide a part of it.
        The start of a product is part of its curve; other operations take ``elementwise_us`` to start each kernel.
        """
        curve, host = self._curve(work), self._host_us_of(work)
        if curve is None or work.shape is None:
            compute, added = work.flops / self._flops_per_us(work), _ZERO
        else:
            compute, added = product_us(curve, work.shape, self._peak(work)), work.accumulated
            if work.phase is not Phase.FORWARD:
                compute *= 1 + exact(curve.gradient_slowdown)
        is_narrow = work.narrow and self.analytic.matmul_dtype is not None
        cast = _CAST_BYTES * work.cast if is_narrow else _ZERO
        if self.analytic.matmul_efficiency is not None:
            cast = _ZERO  # the plan's share includes all of this
        not_hidden = added if is_narrow else _NOT_HIDDEN * added
        memory, extra = self._moved_us(work.num_bytes - added), self._moved_us(not_hidden + cast)
        if work.unit is not ComputeUnit.MATMUL:
            extra += work.launches * self._start_us
        parts = {"compute_us": compute, "memory_us": extra} if compute >= memory else {"memory_us": memory + extra}
        return PhaseTime(work.flops, work.num_bytes + cast, host_us=host, **parts)

    @cached_property
    def shares(self) -> FlatShares:
        """The shares of the data sheet that apply to all sizes."""
        spec, table = self.analytic, self.table
        dtypes = () if table is None else [curve.dtype for curve in table.products]
        measured = (spec.matmul_dtype or self.dtype) in dtypes
        memory = _MEMORY if table is None else table.memory_efficiency
        return FlatShares(
            spec.matmul_efficiency or (None if measured else _MATMUL),
            spec.attention_efficiency or (None if table is not None and self.dtype == "bfloat16" else _ATTENTION),
            spec.memory_efficiency or memory,
            spec.link_efficiency or (None if self.links.network.curves else DEFAULT_LINK_EFFICIENCY),
        )

    def _moved_us(self, num_bytes: Fraction) -> Fraction:
        return num_bytes / (self.device.memory * 1000 * exact(self.shares.memory))

    def _replays(self, works: Iterable[Work]) -> int:
        """Number of parts of a layer that one replay each starts: a dense block has no router."""
        names = {work.name for work in works}
        firsts = {"attention": "attn_norm", "router": "mlp.router"}
        return sum(firsts[part] in names for part in self.analytic.replayed)

    def _host_us_of(self, work: Work) -> Fraction:
        """Time of the host for one operation; none if its part is replayed."""
        if self._replayed and work.name.startswith(self._replayed):
            return _ZERO
        return work.launches * self._operation_us + (self._fill_us if work.launches else _ZERO)

    @cached_property
    def overlapped(self) -> tuple[Fraction, ...] | None:
        """By stage of the forward, a forward and a backward in parallel, not rounded; None if there are none.

        They share the chip and the links, and each one's collectives hide
        behind the other's computation. The backward belongs to the opposite
        stage, as in DualPipe; in your own order, to any stage.
        """
        kind, num_stages = self._plan.schedule.kind, len(self.stages)
        if kind not in _OVERLAPPING or self._plan.alternation is not None:  # then parts have the times
            return None
        opposite = kind in ("dualpipe", "dualpipe_v")
        return tuple(
            max(
                self._overlapped_us(stage, other)
                for other in ((num_stages - 1 - stage,) if opposite else range(num_stages))
            )
            for stage in range(num_stages)
        )

    def _overlapped_us(self, forward: int, backward: int) -> Fraction:
        """The pair takes the time of its collectives or of its computations, whichever is longer.

        While collectives run, their kernels hold processors that products then lack: 20 of the 132 of an H800
        (arXiv:2412.19437, section 3.2.2). Their bytes pass through memory, with a read and a write on each side.
        """
        first, second = self.stages[forward][Phase.FORWARD], self.stages[backward][Phase.INPUT]
        second += self.stages[backward][Phase.WEIGHT]
        both = first + second
        computing = both.compute_us + both.memory_us
        if self.table is not None and self.analytic.matmul_efficiency is None:
            lacking = _PAIR_PROCESSORS * min(both.links_us, both.compute_us / (1 - _PAIR_PROCESSORS))
            computing += lacking + self._moved_us(_PASSES * both.link_bytes)
        together = max(computing, both.links_us, first.us, second.us)
        return max(both.host_us, min(together, first.us + second.us))

    def resolved(self, p2p: str) -> CostSpec:
        """The costs as given times; every edge has the latency of the slowest.

        Raises:
            BadPlanAtError: PP106, a time is longer than a plan may have.
        """
        phases = {phase: [rounded(stage[phase].us) for stage in self.stages] for phase in Phase}
        forward = [max(time, GRID_US) for time in phases[Phase.FORWARD]]  # every stage takes some time
        latency = rounded(max(self.links.messages(), default=_ZERO))
        overlapped = None if self.overlapped is None else [*map(rounded, self.overlapped)]
        a_step = exact(self.analytic.step_us) * self._plan.topology.pp / len(self.stages)  # a rank has several stages
        updates = [rounded(update + a_step) for update in self.updates]
        if (
            max([*forward, *phases[Phase.INPUT], *phases[Phase.WEIGHT], *(overlapped or ()), *updates, latency])
            > MAX_TIME_US
        ):
            message = f"`cost.analytic` comes to a time of more than {MAX_TIME_US} us"
            finding = Finding("PP106", Severity.ERROR, message, help="use smaller micro-batches, or more stages")
            raise BadPlanAtError(finding, ("cost", "analytic"))
        return CostSpec.model_validate(
            {
                "forward_us": forward,
                "backward_input_us": phases[Phase.INPUT],
                "backward_weight_us": phases[Phase.WEIGHT],
                "optimizer_us": updates,
                "overlapped_us": overlapped,
                "p2p_latency_us": latency,
                "p2p": p2p,
            }
        )

    def _curve(self, work: Work) -> ProductCurve | None:
        """The measured curve of a product; None if the plan has a share, or there is no curve of the type."""
        if self.table is None or work.unit is not ComputeUnit.MATMUL or self.analytic.matmul_efficiency is not None:
            return None
        narrow = self.analytic.matmul_dtype if work.narrow else None
        return next((curve for curve in self.table.products if curve.dtype == (narrow or self.dtype)), None)

    def _peak(self, work: Work) -> float:
        """TFLOP/s: products at the peak of their type, other operations at the float32 peak."""
        if work.unit is ComputeUnit.VECTOR:
            return self.device.float32
        if work.narrow and self.analytic.matmul_dtype is not None:
            return self.device.peak(self.analytic.matmul_dtype)
        return self.device.bfloat16 if self.dtype == "bfloat16" else self.device.float32

    def _flops_per_us(self, work: Work) -> Fraction:
        """FLOPs per microsecond without a curve of products."""
        peak, spec = exact(self._peak(work)) * 10**6, self.analytic
        if work.unit is ComputeUnit.VECTOR:
            return peak
        if work.unit is ComputeUnit.MATMUL:
            return peak * exact(_MATMUL if spec.matmul_efficiency is None else spec.matmul_efficiency)
        if self.shares.attention is not None:
            return peak * exact(self.shares.attention)
        assert self.table is not None
        assert work.shape is not None
        is_forward = work.phase is Phase.FORWARD
        return peak * attention_share(self.table.attention, work.shape.columns, is_forward=is_forward)

    def _few_blocks(self) -> PlanSpec:
        """The plan with at least one block of each kind: blocks of a kind have equal times."""
        model = self._plan.gpt
        if model.hyper_connections is not None:  # its ends have kinds of their own
            return self._plan
        few = model.model_copy(update={"num_layers": model.num_blocks_of_each_kind})
        return self._plan.model_copy(update={"model": few})


def _host_us(analytic: AnalyticSpec, table: CostTable | None) -> Fraction:
    """Time of the host for each operation; a replayed graph needs none."""
    if analytic.execution == "graph":
        return _ZERO
    eager = analytic.host_us
    if eager is None:
        eager = 0 if table is None else table.host_us
    return exact(eager) * (_COMPILED_HOST if analytic.execution == "compiled" else 1)
