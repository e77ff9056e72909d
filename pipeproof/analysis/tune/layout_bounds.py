"""Lower bounds of the time and the memory of layouts, without their op graphs.

Layers of one kind are equal, so a bound is a sum over kinds. The times and bytes of a kind depend only on the mesh
inside a stage, the micro-batch and recomputation; they are computed once for each *cell* of these, and its times only
if some layout of the cell may fit into the memory.

The time is bounded from below by each pipeline rank: its first computation follows the forwards of the stages before
it, its last one precedes their backwards or its own optimizer step, and between the two is all of its work. Transfers,
gradient sums and waits for other ranks only add to this. If pairs alternate, all collectives count as hidden, but not
the time of the host.

The memory is bounded by training states and by the activations that the order of the program holds at once, on the
first two pipeline ranks and on the last one: the first stage may have the embedding alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from pipeproof.analysis.tune.layout_plans import balanced_cut, near_even_cut
from pipeproof.analysis.tune.layouts import Bound, Layout
from pipeproof.cost.analytic_times import AnalyticCosts
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement, Request
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import Program, UnfitSizesError
from pipeproof.sim.memory_curve import GIB
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.memory import Recompute
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layer import layer_kind, layer_order
from pipeproof.stages.describe.model_family import stored_activations
from pipeproof.stages.describe.op_work import Phase
from pipeproof.stages.describe.stage_memory import moved_by_update, state_of

_Times = npt.NDArray[np.float64]
_SPLIT_BACKWARD = ("interleaved_zb", "zb_v", "dualpipe_v")
"""Schedules in which W may run separately from I, or a forward next to a backward, which hides collectives."""


@dataclass(frozen=True)
class _Cell:
    """One layer of each kind of ``kinds`` on the ranks of a stage; columns are in that order.

    ``activations`` are the bytes of one micro-batch, ``states`` of weights and gradients, ``optimizer`` of the
    optimizer state before sharding. ``costs`` has the times of all cells that differ in recomputation only.
    """

    recompute: Recompute
    costs: _CellCosts
    activations: _Times
    states: _Times
    optimizer: _Times

    @classmethod
    def of(cls, spec: PlanSpec, costs: _CellCosts) -> _Cell:
        """The cell of a plan of one stage."""
        size, layers = costs.size, costs.layers.values()
        held = [stored_activations(spec, [layer], size) for layer in layers]
        states = [state_of(spec, [layer]) for layer in layers]
        return cls(
            spec.memory.recompute,
            costs,
            np.array([float(sum(one.num_bytes for one in kept if one.lifetime.is_from_forward)) for kept in held]),
            np.array([float(state.parameters + state.gradients) for state in states]),
            np.array([float(state.optimizer) for state in states]),
        )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of layers."""
        return tuple(self.costs.layers)


class _CellCosts:
    """Times of one layer of each kind, for each value of ``memory.recompute``."""

    def __init__(self, spec: PlanSpec) -> None:
        self._spec = spec
        self.size = MicroBatchSize(spec.gpt.seq_length, spec.schedule.micro_batch_size)
        self.layers = {layer_kind(spec.gpt, layer.name): layer for layer in describe_gpt(spec, self.size)}

    @cached_property
    def times(self) -> Mapping[str, _Times]:
        """By recomputation, microseconds of F, I and W on the device, there without collectives, and on the host.

        The shape is [3 phases, 3 times, kinds].
        """
        recomputes = get_args(Recompute)
        by_layer = [self._costs.layer_by_recompute(layer, recomputes) for layer in self.layers.values()]
        return {
            recompute: np.array(
                [
                    [
                        [float(time[phase].device_us) for time in times],
                        [float(time[phase].compute_us + time[phase].memory_us) for time in times],
                        [float(time[phase].host_us) for time in times],
                    ]
                    for phase in Phase
                ]
            )
            for recompute, times in zip(recomputes, zip(*by_layer, strict=True), strict=True)
        }

    @cached_property
    def update_us(self) -> _Times:
        """Microseconds of the optimizer's step before sharding."""
        updates = [float(moved_by_update(state_of(self._spec, [layer]))) for layer in self.layers.values()]
        return np.array(updates) / (self._costs.device.memory * 1000 * float(self._costs.shares.memory))

    @cached_property
    def _costs(self) -> AnalyticCosts:
        assert self._spec.cost.analytic is not None, "tune computes all times"
        return AnalyticCosts(self._spec, self._spec.cost.analytic)


class Bounds:
    """Lower bounds of layouts of one base plan; cells and programs are made once."""

    def __init__(self, base: Mapping[str, Any], spec: PlanSpec) -> None:
        self._base, self._spec = base, spec
        self._overhead = spec.memory.overhead_gib * GIB
        self._optimizer_ranks = base.get("memory", {}).get("optimizer_ranks", "dp")
        self._names = layer_order(spec.gpt)
        self._kind_of = {name: layer_kind(spec.gpt, name) for name in self._names}
        self._totals = Counter(self._kind_of.values())
        self._cells: dict[tuple[int, int, int, int, str], _Cell] = {}
        self._cell_costs: dict[tuple[int, int, int, int], _CellCosts] = {}
        self._cuts: dict[tuple[Any, ...], tuple[tuple[str, ...], ...]] = {}
        self._counts: dict[tuple[Any, ...], _Times] = {}
        self._programs: dict[tuple[Any, ...], tuple[Program, ...] | None] = {}
        self._held: dict[tuple[Any, ...], list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]] = {}

    def stages_of(self, layout: Layout) -> tuple[tuple[str, ...], ...]:
        """The layers of each stage of a layout."""
        if layout.cut != "balanced":
            key: tuple[Any, ...] = (layout.cut, layout.num_stages)
        else:
            key = (layout.num_stages, layout.tp, layout.cp, layout.ep, layout.mbs, layout.recompute, layout.overlap)
        if key not in self._cuts:
            if layout.cut == "even":
                times = {name: float(self._kind_of[name] in ("block", "moe_block")) for name in self._names}
            elif layout.cut == "near_even":
                self._cuts[key] = near_even_cut(self._spec, layout.num_stages)
                return self._cuts[key]
            else:
                cell = self._cell(layout)
                device, alone, _ = cell.costs.times[cell.recompute].sum(axis=0)
                by_kind = dict(zip(cell.kinds, device if layout.overlap == "none" else alone, strict=True))
                times = {name: by_kind[kind] for name, kind in self._kind_of.items()}
            self._cuts[key] = balanced_cut(self._spec, times, layout.num_stages)
        return self._cuts[key]

    def of(self, layout: Layout, limit_bytes: float = inf) -> Bound | None:
        """Bounds of a layout; None if its schedule does not exist for its sizes, or a stage has no layer.

        The time is 0 if the bound of the memory is over ``limit_bytes``: it is not computed then.
        """
        if self._program(layout) is None:
            return None
        cell = self._cell(layout)
        total = np.array([self._totals[kind] for kind in cell.kinds], dtype=np.float64)
        mean = float(total @ self._states(layout, cell)) / layout.pp + self._overhead
        if mean > limit_bytes:
            return Bound(0.0, mean)
        counts = self._layer_counts(layout, cell)
        if not counts.sum(axis=1).all():
            return None
        peak = self._peak_bytes(layout, cell, counts)
        return Bound(0.0 if peak > limit_bytes else self._step_us(layout, cell, counts), peak)

    def _step_us(self, layout: Layout, cell: _Cell, counts: _Times) -> float:
        is_split = layout.kind in _SPLIT_BACKWARD
        device, alone, host = np.einsum("sk,pwk->wps", counts, cell.costs.times[cell.recompute])
        whole = np.maximum(device, host)
        forward, backward_input, weight = alone if is_split else whole
        updates = counts @ cell.costs.update_us
        updates = updates / self._num_shards(layout)
        backward = backward_input if is_split else backward_input + weight
        before_forward = np.concatenate([[0.0], np.cumsum(forward)])
        before_backward = np.concatenate([[0.0], np.cumsum(backward)])
        bounds = []
        for stages in self._stages_of_ranks(layout):
            if is_split:
                busy = max(alone[:, stages].sum(), host[:, stages].sum())
            elif layout.overlap != "none":
                busy = np.maximum(alone, host)[:, stages].sum()
            else:
                busy = whole[:, stages].sum()
            work = layout.num_micro_batches * busy
            after = updates[stages].sum() if is_split else max(before_backward[stages[0]], updates[stages].sum())
            bounds.append(before_forward[stages[0]] + work + after)
        return float(max(bounds))

    def _peak_bytes(self, layout: Layout, cell: _Cell, counts: _Times) -> float:
        states = counts @ self._states(layout, cell)
        activations = counts @ cell.activations
        peaks = []
        ranks = self._stages_of_ranks(layout)
        for rank, (stage, change) in zip(_bounding_ranks(layout.pp), self._changes(layout), strict=True):
            held = np.cumsum(activations[stage] * change)
            peaks.append(states[ranks[rank]].sum() + held.max(initial=0.0))
        return float(max(peaks)) + self._overhead

    def _states(self, layout: Layout, cell: _Cell) -> _Times:
        """Bytes of weights, gradients and optimizer state of a layer of each kind on one rank."""
        return cell.states + cell.optimizer / self._num_shards(layout)

    def _num_shards(self, layout: Layout) -> int:
        """The ranks that share the state of a weight: the most of any weight."""
        if layout.shard_optimizer != "dp":
            return 1
        shares_all = self._optimizer_ranks == "replicas"
        return layout.dp * (layout.cp * layout.ep if shares_all else 1)

    def _stages_of_ranks(self, layout: Layout) -> list[list[int]]:
        if SCHEDULE_KINDS[layout.kind].placement is Placement.V:
            return [[rank, 2 * layout.pp - 1 - rank] for rank in range(layout.pp)]
        return [list(range(rank, layout.num_stages, layout.pp)) for rank in range(layout.pp)]

    def _changes(self, layout: Layout) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """By rank of ``_bounding_ranks``, the stage of each F and of each B or I of its program, and +1 or -1."""
        key = self._program_key(layout)
        if key not in self._held:
            programs = self._program(layout)
            assert programs is not None
            self._held[key] = []
            for rank in _bounding_ranks(layout.pp):
                ops = [op for op in programs[rank] if op.kind is not OpKind.BACKWARD_WEIGHT]
                changes = [1 if op.kind is OpKind.FORWARD else -1 for op in ops]
                self._held[key].append((np.array([op.stage for op in ops]), np.array(changes)))
        return self._held[key]

    def _program_key(self, layout: Layout) -> tuple[Any, ...]:
        """The sizes of a program that holds as much as the layout's, or less: a short one, except in GPipe."""
        num, pp = layout.num_micro_batches, layout.pp
        if layout.kind not in ("gpipe", "looped_bfs") and num > 4 * pp and num % pp == 0:
            num = 4 * pp
        return layout.kind, layout.variant, pp, num, layout.vpp, layout.overlap

    def _program(self, layout: Layout) -> tuple[Program, ...] | None:
        key = self._program_key(layout)
        if key not in self._programs:
            kind, variant, pp, num, vpp, overlap = key
            placement = None
            if SCHEDULE_KINDS[kind].placement is Placement.ANY:
                placement = tuple(tuple(range(rank, pp * vpp, pp)) for rank in range(pp))
            try:
                overlaps = overlap != "none"
                request = Request(pp, num, vpp, variant=variant, placement=placement, overlaps=overlaps)
                schedule = SCHEDULE_KINDS[kind].generate(request)
                has_pairs = any(schedule.pairs) or not overlaps  # too few micro-batches have no pairs
                self._programs[key] = schedule.programs if has_pairs else None
            except UnfitSizesError:
                self._programs[key] = None
        return self._programs[key]

    def _layer_counts(self, layout: Layout, cell: _Cell) -> _Times:
        """The number of layers of each kind on each stage, shape [stages, kinds]."""
        stages = self.stages_of(layout)
        key = (id(stages), cell.kinds)
        if key not in self._counts:
            rows = [Counter(self._kind_of[name] for name in names) for names in stages]
            self._counts[key] = np.array([[row[kind] for kind in cell.kinds] for row in rows], dtype=np.float64)
        return self._counts[key]

    def _cell(self, layout: Layout) -> _Cell:
        key = layout.tp, layout.cp, layout.ep, layout.mbs, layout.recompute
        if key not in self._cells:
            spec, shared = self._cell_spec(*key), key[:-1]
            if shared not in self._cell_costs:
                self._cell_costs[shared] = _CellCosts(spec)
            self._cells[key] = _Cell.of(spec, self._cell_costs[shared])
        return self._cells[key]

    def _cell_spec(self, tp: int, cp: int, ep: int, mbs: int, recompute: str) -> PlanSpec:
        """A plan of one stage with a layer of each kind, on the ranks that share a stage."""
        model = dict(self._base["model"])
        model["num_layers"] = self._spec.gpt.num_blocks_of_each_kind
        if (compressed := model.get("compressed_attention")) is not None:
            types = compressed["layer_types"][: model["num_layers"]]
            model["compressed_attention"] = {**compressed, "layer_types": types}
        modules = self._base["memory"].get("recompute_modules")
        memory = {key: value for key, value in self._base["memory"].items() if key != "recompute_modules"}
        spec = plan_from_dict(
            {
                "pipeproof": 1,
                "model": model,
                "topology": {"tp": tp, "cp": cp, "ep": ep, "sequence_parallel": tp > 1},
                "schedule": {"kind": "1f1b", "num_micro_batches": 1, "micro_batch_size": mbs},
                "cost": self._base["cost"],
                "memory": {**memory, "recompute": recompute},
                "run": self._base["run"],
            }
        ).spec
        if modules is None:
            return spec
        # Costs cover all values of `recompute`: each cell has the modules of `selective`.
        return spec.model_copy(update={"memory": spec.memory.model_copy(update={"recompute_modules": tuple(modules)})})


def _bounding_ranks(pp: int) -> list[int]:
    """The pipeline ranks whose memory is bounded."""
    return sorted({0, min(1, pp - 1), pp - 1})


def even_stages(stages: Sequence[Sequence[str]]) -> bool:
    """True if all stages have the same number of blocks: the plan needs no list of them."""
    counts = {sum(name.startswith("layer.") for name in names) for names in stages}
    return len(counts) == 1
