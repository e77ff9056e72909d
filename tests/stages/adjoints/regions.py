"""Table rows: operators into and out of the tensor-parallel region, and operations inside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pipeproof.specs.model import MlaSpec
from pipeproof.stages.common.compressed_attention import CompressedAttention
from pipeproof.stages.common.stage import latent_heads
from tests.stages.adjoints.rows import per_layout
from tests.stages.adjoints.world import Backend, Case, Rank, make_plan

MLA = MlaSpec(q_rank=6, kv_rank=4, nope_head_size=2, rope_head_size=4, value_head_size=3)
LABELS = np.array([[0, 11], [5, -100], [6, 7], [-100, 2]])
"""Words of a vocabulary of 12, on every rank, and two places that are not counted."""


def regions(fw: Backend) -> list[Case]:
    """Entries and exits of tensor-parallel regions, and their computations on compressed vectors."""
    cases = [
        *per_layout("enter", "TensorParallelRegion.enter", lambda r, x: r.region.enter(x, "in"),
                    ((4, 2, 3), "between"), output="own"),
        *per_layout("enter each", "TensorParallelRegion.enter_each",
                    lambda r, *x: r.region.enter_each(x, [str(i) for i in range(3)]),
                    *[((4, 2, size), "between") for size in (3, 4, 5)], output="own"),
        *per_layout("leave", "TensorParallelRegion.leave", lambda r, x: r.region.leave(x, "out"),
                    ((4, 2, 3), "own"), output="between"),
        *per_layout("sum", "TensorParallelRegion.sum", lambda r, x: r.region.sum(x, "sum"),
                    ((4, 2), "own"), output="replicated")[1:],
        *per_layout("embedding", "PaddleVocabulary.rows SplitWeights.rows", partial(_embedded, fw),
                    ((6, 3), "own", "weight"), output="own"),
        *per_layout("token losses", "token_losses", _losses(fw, fw.token_losses),
                    *[((4, 2, 6), "own")] * 2, output="replicated")[1:],
        *per_layout("sums of losses", "summed_cross_entropies", _losses(fw, fw.sums_of_losses),
                    *[((4, 2, 12), "own")] * 2, output="replicated"),
    ]  # fmt: skip
    for q_rank in (6, None):
        mla = MLA.model_copy(update={"q_rank": q_rank})
        query = {"q": ((7, 12), "own")} if q_rank is None else {"q_down": ((7, 6), "between"), "q_up": ((6, 12), "own")}
        used = {**query, "kv_down": ((7, 8), "between"), "kv_up": ((4, 10), "own")}
        name = f"latent heads of {'compressed' if q_rank else 'plain'} queries"
        inputs = [((4, 2, 7), "between"), *((*held, "weight") for held in used.values())]
        cases += per_layout(name, "latent_heads", _latent(fw, mla, list(used)), *inputs, output="own")
    for name, (kind, entries) in _OF_TYPES.items():
        used = _HEADS | entries
        function = _compressed(fw, kind, list(used))
        inputs = [((7, 2, 7), "between"), *((*held, "weight") for held in used.values())]
        cases += per_layout(
            f"compressed attention, {name}", "CompressedAttention.forward", function, *inputs, output="own"
        )
    return cases


_HEADS = {
    "q_down": ((7, 6), "between"), "kv": ((7, 4), "between"), "q_up": ((6, 16), "own"), "sinks": ((4,), "own"),
    "groups": ((2, 8, 3), "own"),
}  # fmt: skip
_OF_TYPES = {
    "near": ("sliding_attention", {}),
    "all entries": (
        "heavily_compressed_attention",
        {
            "compressor.kv": ((7, 4), "between"), "compressor.gate": ((7, 4), "between"),
            "compressor.positions": ((3, 4), "own"),
        },
    ),
    "chosen entries": (
        "compressed_sparse_attention",
        {
            "compressor.kv": ((7, 8), "between"), "compressor.gate": ((7, 8), "between"),
            "compressor.positions": ((2, 8), "own"),
        },
    ),
}  # fmt: skip
"""Weights of four heads in two groups on each rank. The indexer's weights have no gradient: they are drawn."""


def _compressed(fw: Backend, kind: str, names: Sequence[str]) -> Callable[..., Any]:
    draw = np.random.default_rng(4).standard_normal
    indexer = {"kv": (7, 8), "gate": (7, 8), "heads": (7, 3), "positions": (2, 8), "norm": (4,), "q": (6, 12)}
    drawn = {f"indexer.{part}": fw.weight(draw(shape)) for part, shape in indexer.items()}

    def function(rank: Rank, x: Any, *tensors: Any) -> Any:
        weights = drawn | dict(zip(names, tensors, strict=True))
        ranks = rank.region.num_ranks
        spec = {
            "layer_types": [kind], "q_lora_rank": 6, "qk_rope_head_dim": 2, "sliding_window": 3,
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
            "o_groups": 2 * ranks, "o_lora_rank": 3, "index_n_heads": 3, "index_head_dim": 4, "index_topk": 2,
        }  # fmt: skip
        length = x.shape[0] * (1 if rank.region.sequence_dim is None else ranks)
        model = {"num_heads": 4 * ranks, "head_size": 4, "seq_length": length, "compressed_attention": spec}
        attention = CompressedAttention(
            fw.ops, make_plan(model=model), rank.weights, rank.region,
            lambda y, name: rank.weights.product(y, weights[name.removeprefix("x.")]),
            lambda y, _: fw.functional.rms_norm(y),
            lambda name: weights[name.removeprefix("x.").removesuffix(".weight")], x, recomputes=False,
        )  # fmt: skip
        return attention.forward(x, "x", kind)

    return function


def _latent(fw: Backend, mla: MlaSpec, names: Sequence[str]) -> Callable[..., Any]:
    def function(rank: Rank, x: Any, *tensors: Any) -> tuple[Any, ...]:
        weights = dict(zip(names, tensors, strict=True))
        return latent_heads(
            fw.ops,
            x,
            mla,
            lambda y, part: rank.weights.product(y, weights[part]),
            lambda y, _: fw.functional.rms_norm(y),
            rank.region,
            "x",
        )

    return function


def _embedded(fw: Backend, rank: Rank, weight: Any) -> Any:
    """Two streams of tokens."""
    words = np.random.default_rng(3).integers(0, 6 * rank.region.num_ranks, (2, 5, 2))
    vocabulary = fw.vocabulary(rank.weights, tied=False)
    return vocabulary.rows([fw.tensor(stream) for stream in words], weight, rank.region, 1)


def _losses(fw: Backend, function: Callable[..., Any]) -> Callable[..., Any]:
    """Losses of two streams of logits, each rank with its part of the vocabulary."""

    def losses(rank: Rank, *logits: Any) -> list[Any]:
        labels = [fw.tensor(LABELS), fw.tensor(LABELS[::-1].copy())]
        made: list[Any] = function(list(logits), labels, rank.region)
        return made

    return losses
