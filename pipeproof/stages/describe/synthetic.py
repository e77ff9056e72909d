"""Deterministic weights, tokens and dropout masks: all values that a run draws, computed with numpy alone.

The key of every draw is its purpose (seed, parameter name; seed, step, micro-batch), not the rank or the order of
draws. So all ranks and the reference get the same values for any topology.

Shape letters: S sequence, B micro-batch rows.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeproof.diagnostics.finding import BadPlanAtError, Finding, Severity
from pipeproof.foreign_text import MALFORMED, decode_json, open_foreign
from pipeproof.specs.model import ModelSpec, MoeSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import MicroBatchSize, micro_batch_size
from pipeproof.stages.describe.layer import Parameter

IGNORED = -100
"""The label of a position whose token is not counted in the loss."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: ``tokens`` and ``labels`` are int64 [B, S]; label ``IGNORED`` is not counted."""

    tokens: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]

    @property
    def num_counted(self) -> int:
        """The number of positions that count in the loss, at least one."""
        return int(np.count_nonzero(self.labels != IGNORED))


def initial_weight(parameter: Parameter, seed: int, dtype: str) -> npt.NDArray[Any]:
    """The whole initial weight of a parameter.

    It is normal with ``init_std``, or ``init_value`` everywhere if that is None. It is drawn in float64, then rounded,
    so float32 and float64 runs start from the same numbers.
    """
    if parameter.init_std is None:
        return np.full(parameter.shape, parameter.init_value, dtype=dtype)
    draws = _generator("weight", seed, parameter.name).standard_normal(parameter.shape)
    return (draws * parameter.init_std).astype(dtype)


def hash_tables(plan: PlanSpec, names: Iterable[str] | None = None) -> dict[str, npt.NDArray[np.int64]]:
    """The experts that each token id is sent to, in order, [V, k]; all k differ. Default: for all blocks.

    ``names`` are names of experts, such as ``layer.0.mlp``. A file with the tables is read once in a call.

    Raises:
        BadPlanAtError: PP106, the plan's file has not the tables of the plan.
    """
    chosen = hash_names(plan.gpt) if names is None else list(names)
    if not chosen:
        return {}
    moe = plan.gpt.moe
    assert moe is not None
    if moe.hash_tables is None:
        return {name: _drawn_table(plan, moe, name) for name in chosen}
    stored = stored_hash_tables(plan)
    return {name: stored[name] for name in chosen}


def hash_names(model: ModelSpec) -> list[str]:
    """The experts that a table chooses by token id, such as ``layer.0.mlp``."""
    return [f"layer.{number}.mlp" for number in range(model.num_layers) if model.routes_by_token(number)]


def _drawn_table(plan: PlanSpec, moe: MoeSpec, experts: str) -> npt.NDArray[np.int64]:
    generator = _generator("experts", plan.run.seed, experts)
    # The i-th draw is a place among the experts that the draws before it have left.
    table = generator.integers(0, moe.num_experts - np.arange(moe.top_k), size=(plan.gpt.vocab_size, moe.top_k))
    for i in range(1, moe.top_k):
        for taken in np.sort(table[:, :i], axis=1).T:
            table[:, i] += table[:, i] >= taken
    return table


_TABLE = re.compile(r"(?:model\.)?layers\.(\d+)\.(?:ffn|mlp)\.gate\.tid2eid")
_INTEGERS: Mapping[str, type[np.integer[Any]]] = MappingProxyType({"I32": np.int32, "I64": np.int64})


def stored_hash_tables(plan: PlanSpec) -> dict[str, npt.NDArray[np.int64]]:
    """The tables of ``moe.hash_tables`` by ``experts``; ids in the vocabulary's padding have the experts of id 0.

    Raises:
        BadPlanAtError: PP106, a table is missing, or is none of this model, or they have another SHA-256.
    """
    moe = plan.gpt.moe
    assert moe is not None
    assert moe.hash_tables is not None
    at, path = ("model", "moe", "hash_tables"), Path(moe.hash_tables.path)
    shape, by_layer = (plan.gpt.num_token_ids, moe.top_k), dict[int, npt.NDArray[np.int64]]()
    try:
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            by_layer |= _tables_of_file(file)
    except (OSError, *MALFORMED) as error:
        message = f"the tables of `{path}` cannot be read: {error}"
        raise BadPlanAtError(Finding("PP106", Severity.ERROR, message), (*at, "path")) from None
    tables = {}
    for name in hash_names(plan.gpt):
        number = int(name.split(".")[1])
        table = by_layer.get(number, np.empty(0, dtype=np.int64))
        if (fault := _fault_of(table, shape, moe.num_experts)) is not None:
            message = f"layers.{number}.ffn.gate.tid2eid of `{path}` {fault}"
            raise BadPlanAtError(Finding("PP106", Severity.ERROR, message), (*at, "path"))
        padding = np.repeat(table[:1], plan.gpt.vocab_size - len(table), axis=0)
        tables[name] = np.concatenate([table, padding])
    digest = hashlib.sha256(b"".join(table[: shape[0]].astype("<i8").tobytes() for table in tables.values()))
    if digest.hexdigest() != moe.hash_tables.sha256:
        message, fix = (
            f"the tables of `{path}` have another SHA-256",
            f"set it to {digest.hexdigest()}, or give their file",
        )
        raise BadPlanAtError(Finding("PP106", Severity.ERROR, message, help=fix), (*at, "sha256"))
    return tables


def _fault_of(table: npt.NDArray[np.int64], shape: tuple[int, int], num_experts: int) -> str | None:
    """The reason why a table does not fit this model; None if it fits."""
    if not table.size:
        return "is missing"
    if table.shape != shape:
        return f"is {list(table.shape)}, and for the model {list(shape)}"
    ordered = np.sort(table, axis=1)
    is_repeated = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    wrong = np.flatnonzero(is_repeated | (ordered[:, 0] < 0) | (ordered[:, -1] >= num_experts))
    if not len(wrong):
        return None
    return f"sends token id {wrong[0]} to {table[wrong[0]].tolist()}, and there are {num_experts} experts"


def _tables_of_file(file: Path) -> dict[int, npt.NDArray[np.int64]]:
    """The tables of a safetensors file by the number of their block."""
    tables = {}
    with open_foreign(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > os.fstat(stream.fileno()).st_size:
            raise ValueError(f"{file.name} is cut short, or no safetensors file")
        header = decode_json(stream.read(length))
        for name, entry in header.items():
            if (match := _TABLE.fullmatch(name)) is not None:
                start, stop = entry["data_offsets"]
                stream.seek(8 + length + start)
                numbers = np.frombuffer(stream.read(stop - start), _INTEGERS[entry["dtype"]])
                tables[int(match[1])] = numbers.reshape(entry["shape"]).astype(np.int64)
    return tables


def micro_batch(plan: PlanSpec, step: int, index: int) -> Batch:
    """The ``index``-th micro-batch of a step, counted over all data ranks: rank d's k-th is d * m + k.

    Data ranks have different micro-batches, over ``dp`` and ``ep``; the data rank at (dp, ep) is dp * (number of ep
    ranks) + ep.

    Low token ids are more frequent, which gives the model something to learn; no id is in the vocabulary's padding.
    Each row counts a random number of leading positions: micro-batches differ in their number of counted tokens, as in
    practice.
    """
    size = _size(plan, index)
    length = size.seq_length
    draws = _generator("tokens", plan.run.seed, step, index).random((size.num_rows, length + 1))
    text = np.floor(plan.gpt.num_token_ids * draws**2).astype(np.int64)
    is_counted = np.arange(length) < _counted_lengths(plan, step, index)[:, None]
    return Batch(text[:, :-1].copy(), np.where(is_counted, text[:, 1:], IGNORED))


def loss_scale(plan: PlanSpec, step: int, index: int) -> float:
    """The factor of the summed token losses of one micro-batch: with it the losses of a step can be added.

    ``global_tokens``: one over the counted tokens of the whole step. ``mean_of_micro_batches``: one over (this
    micro-batch's counted tokens times the number of micro-batches of all data ranks).
    """
    num_global = plan.topology.dp * plan.topology.ep * plan.schedule.num_micro_batches
    if plan.loss.normalization == "global_tokens":
        return 1.0 / sum(int(_counted_lengths(plan, step, i).sum()) for i in range(num_global))
    return 1.0 / (int(_counted_lengths(plan, step, index).sum()) * num_global)


def _counted_lengths(plan: PlanSpec, step: int, index: int) -> npt.NDArray[np.int64]:
    """Counted leading positions per row, [B], 0 to S each; one row has at least one."""
    generator = _generator("lengths", plan.run.seed, step, index)
    size = _size(plan, index)
    lengths = generator.integers(0, size.seq_length + 1, size=size.num_rows)
    if not lengths.any():
        lengths[0] = 1
    return lengths


def _size(plan: PlanSpec, index: int) -> MicroBatchSize:
    """The size of a micro-batch; all data-parallel ranks have the same sizes."""
    return micro_batch_size(plan, index % plan.schedule.num_micro_batches)


def key_of(purpose: str, *key: int | str) -> int:
    """A 128-bit number that differs for every purpose and key."""
    return _digest(purpose, *key) >> 128


def _generator(purpose: str, *key: int | str) -> np.random.Generator:
    return np.random.default_rng(_digest(purpose, *key))


def _digest(purpose: str, *key: int | str) -> int:
    text = "/".join(["pipeproof", purpose, *map(str, key)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest())


# Dropout masks that depend only on the element, not on the rank or the time of the draw.
#
# The key of a mask is the run's seed, the step, the micro-batch (counted over all data ranks), the layer and the site
# in it. The i-th 64-bit word of a counter-based generator (Philox, Salmon et al., SC 2011) belongs to the i-th element
# of the whole tensor, so a part of a mask can be drawn without the rest. The order of the whole tensor does not depend
# on the order of activations: rows, then positions, then the elements of a token; for attention rows, heads, queries,
# keys.


DropoutMask = npt.NDArray[np.bool_]
"""True for elements that are kept."""
DropoutSite = Literal["embedding", "attention", "hidden"]

MASK_BYTES = 1
"""Bytes of an element of a mask that frameworks store from forward to backward."""

WORDS_OF_COUNT = 4
"""Words per count of the generator."""


def dropout_rate(plan: PlanSpec, site: DropoutSite) -> float:
    """The fraction of elements that is dropped at a site; 0 without dropout."""
    dropout = plan.gpt.dropout
    rate: float = 0.0 if dropout is None else getattr(dropout, site)
    return rate


def dropout_sites(plan: PlanSpec) -> frozenset[DropoutSite]:
    """The sites with dropout in the plan."""
    sites: tuple[DropoutSite, ...] = ("embedding", "attention", "hidden")
    return frozenset(site for site in sites if dropout_rate(plan, site))


def dropout_gain(rate: float) -> float:
    """The factor of kept elements, which preserves the mean."""
    return 1.0 / (1.0 - rate)


def draw_threshold(rate: float) -> int:
    """The least word of an element that is kept."""
    return round(rate * 2.0**64)


def mask_key(plan: PlanSpec, step: int, index: int, layer: str, site: str) -> int:
    """The key of a mask, 128 bits; ``index`` counts over all data ranks."""
    return key_of("dropout", plan.run.seed, step, index, layer, site)


@dataclass(frozen=True, slots=True)
class DropoutKeys:
    """The masks of one micro-batch of a step; ``index`` counts over all data ranks."""

    plan: PlanSpec
    step: int
    index: int

    def of_tokens(self, layer: str, rate: float, positions: tuple[int, int]) -> DropoutMask:
        """The mask of an activation between layers for those positions of every row: [B, S, H]."""
        size = micro_batch_size(self.plan, self.index % self.plan.schedule.num_micro_batches)
        shape = size.num_rows, size.seq_length, self.plan.gpt.hidden_size
        return self._kept("hidden", layer, rate, shape, [(0, size.num_rows), positions])

    def of_attention(self, layer: str, rate: float, heads: tuple[int, int], queries: tuple[int, int]) -> DropoutMask:
        """The mask of attention's probabilities for some heads and queries, and all earlier keys: [B, A, Q, S]."""
        size = micro_batch_size(self.plan, self.index % self.plan.schedule.num_micro_batches)
        length = size.seq_length
        shape = size.num_rows, self.plan.gpt.num_heads, length, length
        return self._kept("attention", layer, rate, shape, [(0, size.num_rows), heads, queries])[..., : queries[1]]

    def _kept(
        self, site: str, layer: str, rate: float, shape: Sequence[int], ranges: Sequence[tuple[int, int]]
    ) -> DropoutMask:
        """The mask of ``ranges`` of all dims except the last, which is whole."""
        key = mask_key(self.plan, self.step, self.index, layer, site)
        threshold = np.uint64(draw_threshold(rate))
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        *outer, (start, stop) = ranges
        run = (stop - start) * shape[-1]  # consecutive elements
        words = np.empty((*(b - a for a, b in outer), run), dtype=np.uint64)
        for index in np.ndindex(words.shape[:-1]):
            first = sum((a + i) * stride for (a, _), i, stride in zip(outer, index, strides, strict=False))
            words[index] = _words(key, first + start * shape[-1], run)
        return (words >= threshold).reshape([*words.shape[:-1], stop - start, shape[-1]])


def _words(key: int, first: int, num_words: int) -> npt.NDArray[np.uint64]:
    """``num_words`` words of the key's generator, from word ``first`` on."""
    generator = np.random.Philox(key=key)
    generator.advance(first // WORDS_OF_COUNT)
    skipped = first % WORDS_OF_COUNT
    words: npt.NDArray[np.uint64] = generator.random_raw(skipped + num_words)
    return words[skipped:]
