"""Costs of a model's layers by samples: each layer as a stage of its own, and identical layers once.

The cost of a stage is the cost of its layers and a part of its own: masks and positions, which each stage makes, and
its message buffers. Two neighbouring layers as one stage show this part: the sum of the two single layers has it twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, Protocol

from pipeproof.analysis.tune.layer_cuts import LayerCost, Way
from pipeproof.exec.store.agreement import Agreement
from pipeproof.exec.store.train_errors import PipelineError

_LEAST_ROUNDS, _LEAST_S = 5, 0.4
"""Rounds of one sample on the host, and their time."""


class RunWay(NamedTuple):
    """The way stages run: the ``split`` of a ``Pipeline``, and whether blocks are compiled and recomputed.

    ``rows`` are the rows of a micro-batch; None for the rows of the example.
    """

    split: str
    is_compiled: bool
    recomputes: bool = False
    replay: bool = False
    rows: int | None = None

    def __str__(self) -> str:
        text = self.split + ", compiled" * self.is_compiled + ", recomputed" * self.recomputes
        rows = "" if self.rows is None else f", {rows_text(self.rows)}"
        return text + ", replayed" * self.replay + rows


def rows_text(rows: int) -> str:
    """The size of micro-batches in words."""
    return f"micro-batches of {rows} row{'s' * (rows > 1)}"


class Chain(Protocol):
    """A model as a chain of layers that can be cut anywhere."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        ...

    @property
    def has_ends(self) -> bool:
        """True if the first and the last layer are not blocks, see ``Layers``."""
        ...

    def block(self, layer: int) -> Any:
        """The module of a layer; None if it is not a block."""
        ...

    def can_recompute(self, layer: int) -> bool:
        """True if a layer can recompute its activations."""
        ...

    def signature(self, layer: int) -> str:
        """A text of the layer's computation: equal for identical layers."""
        ...

    def blocks_of(self, sizes: Sequence[int]) -> list[int]:
        """The blocks of each stage of a cut."""
        ...


@dataclass(frozen=True)
class Sample:
    """Layers that are measured as one stage: one layer, or two neighbours."""

    first: int
    num: int

    @property
    def layers(self) -> range:
        """Their numbers."""
        return range(self.first, self.first + self.num)


def plain_settings(part: Any, ignored: AbstractSet[str]) -> list[str]:
    """Texts of a module's plain attributes, in order of their names, for ``Chain.signature``."""
    values = {k: v for k, v in vars(part).items() if k not in ignored and not k.startswith("_")}
    return sorted(f"{k}={v}" for k, v in values.items() if isinstance(v, int | float | str | tuple | None))


def samples_of(chain: Chain) -> tuple[list[int], list[Sample]]:
    """The number of each layer's sample, and all samples; identical layers share one, the last may be two layers."""
    first_of: dict[str, int] = {}
    of: list[int] = []
    samples: list[Sample] = []
    for layer in range(chain.num_layers):
        signature = chain.signature(layer)
        if signature not in first_of:
            first_of[signature] = len(samples)
            samples.append(Sample(layer, 1))
        of.append(first_of[signature])
    inner = [n for n in range(chain.num_layers - 1) if chain.block(n) is not None and chain.block(n + 1) is not None]
    pairs = [n for n in inner if of[n] == of[n + 1]] or inner
    if pairs:
        samples.append(Sample(pairs[0], 2))
    return of, samples


def ways_measured(
    chain: Chain,
    ways: Sequence[RunWay],
    measure: Callable[[Sample, RunWay], tuple[LayerCost, str]],
    agreement: Agreement,
    progress: Callable[[str], None],
    prior_costs: Mapping[RunWay, Sequence[LayerCost]],
) -> tuple[dict[RunWay, list[LayerCost]], dict[RunWay, str]]:
    """The costs of all layers in each way, followed by the stage's own cost, or the reason why a way is impossible.

    ``measure`` returns the cost of a sample, and the reason if it does not run in this way. Each rank measures a part
    of the samples. Embedding and head recompute nothing: their costs are ``prior_costs``.

    Raises:
        PipelineError: a layer raised, on every rank.
    """
    of, samples = samples_of(chain)
    tasks = [(way, number) for way in ways for number, sample in enumerate(samples)
             if not way.recomputes or chain.block(sample.first) is not None]  # fmt: skip

    def own() -> list[Any]:
        measured = []
        for position in _shares(chain, samples, of, tasks, agreement.num_ranks)[agreement.rank]:
            way, number = tasks[position]
            sample = samples[number]
            progress(f"measuring layers {sample.first} to {sample.layers[-1]}, {way}")
            try:
                cost, reason = measure(sample, way)
            except PipelineError:
                raise
            except Exception as error:
                where = f"layer {sample.first}" if sample.num == 1 else f"layers {sample.first} and {sample.layers[-1]}"
                raise PipelineError(f"{where} cannot run on the example: {type(error).__name__}: {error}") from error
            measured.append([position, asdict(cost), reason])
        return measured

    costs: dict[RunWay, dict[int, LayerCost]] = {}
    refused: dict[RunWay, str] = {}
    for position, cost, reason in sorted(each for part in agreement.gather(f"layers {ways}", own) for each in part):
        way, number = tasks[position]
        costs.setdefault(way, {})[number] = LayerCost(**cost)
        if reason:
            refused[way] = f"layer {samples[number].first}: {reason}"
    possible = [way for way in ways if way not in refused]
    by_way = {
        way: _of_layers(of, samples, costs[way], prior_costs.get(way._replace(recomputes=False))) for way in possible
    }
    return by_way, refused


def _shares(
    chain: Chain, samples: Sequence[Sample], of: Sequence[int], tasks: Sequence[tuple[RunWay, int]], num_ranks: int
) -> list[list[int]]:
    """The positions of each rank's tasks: the longest task first, each for the rank with the least work so far.

    Two neighbours are compared with each of them alone, so one device measures all three: devices have different
    clocks. Compilation takes most of the time; graphs take longer to compile.
    """
    compared = {len(samples) - 1, *(of[layer] for layer in samples[-1].layers)} if samples[-1].num == 2 else set()
    together: dict[tuple[RunWay, int], list[int]] = {}
    efforts: dict[tuple[RunWay, int], int] = {}
    for position, (way, number) in enumerate(tasks):
        key = way, -1 if number in compared else number
        num_blocks = sum(chain.block(layer) is not None for layer in samples[number].layers)
        together.setdefault(key, []).append(position)
        efforts[key] = efforts.get(key, 0) + (1 + num_blocks) * (2 if way.split == "graph" else 1)
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    work = [0] * num_ranks
    for key in sorted(together, key=lambda key: -efforts[key]):
        rank = work.index(min(work))
        shares[rank] += together[key]
        work[rank] += efforts[key]
    return shares


def host_times(one_round: Callable[[Callable[[], None]], None]) -> list[int]:
    """Median nanoseconds of F, I and W on the host, in the later half of many rounds.

    ``one_round`` calls its argument before F, and after each of them.
    """
    rounds: list[list[int]] = []
    end = time.monotonic() + _LEAST_S
    while len(rounds) < _LEAST_ROUNDS or time.monotonic() < end:
        marks: list[int] = []
        one_round(lambda marks=marks: marks.append(time.perf_counter_ns()))  # type: ignore[misc]
        rounds.append([after - before for before, after in pairwise(marks)])
    return [int(median(each)) for each in zip(*rounds[len(rounds) // 2 :], strict=True)]


def _of_layers(
    of: Sequence[int],
    samples: Sequence[Sample],
    costs: Mapping[int, LayerCost],
    prior_costs: Sequence[LayerCost] | None,
) -> list[LayerCost]:
    each_stage, growth = LayerCost(), dict[int, int]()
    pair = len(samples) - 1
    if samples[pair].num == 2:
        first, second = (costs[of[layer]] for layer in samples[pair].layers)
        each_stage = _difference(_sum(first, second), costs[pair])
        each_stage = replace(each_stage, forward_peak=each_stage.kept, backward_peak=each_stage.kept)
        above = costs[pair].backward_peak - max(first.backward_peak, first.kept + second.backward_peak)
        growth = {of[layer]: max(0, above) for layer in samples[pair].layers}
    layers = [
        prior_costs[layer] if prior_costs is not None and number not in costs
        else replace(_without(costs[number], each_stage), growth=growth.get(number, 0))
        for layer, number in enumerate(of)
    ]  # fmt: skip
    return [*layers, each_stage]


def _sum(first: LayerCost, second: LayerCost) -> LayerCost:
    return LayerCost(**{name: value + asdict(second)[name] for name, value in asdict(first).items()})


def _difference(first: LayerCost, second: LayerCost) -> LayerCost:
    return LayerCost(**{name: max(0, value - asdict(second)[name]) for name, value in asdict(first).items()})


def _without(cost: LayerCost, each_stage: LayerCost) -> LayerCost:
    """A layer's own part of a single-layer stage; peaks are above the bytes that the stage itself keeps."""
    own = _difference(cost, each_stage)
    return replace(
        own, forward_peak=max(0, cost.forward_peak - each_stage.kept),
        backward_peak=max(0, cost.backward_peak - each_stage.kept),
    )  # fmt: skip


def way_of(way: RunWay, costs: Sequence[LayerCost], recomputed: Sequence[LayerCost] | None, chain: Chain) -> Way:
    """The costs of one way for the search, with the costs of recomputed blocks if they were measured."""
    others = () if recomputed is None else tuple(
        cost if chain.can_recompute(layer) else None for layer, cost in enumerate(recomputed[:-1])
    )  # fmt: skip
    return Way(str(way), way.split != "whole", tuple(costs[:-1]), others, costs[-1])
