"""Table rows: arithmetic without communication, recomputation, sequence splits, dropout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pipeproof.stages.common.backend_ops import BackendOps, clamped_swiglu, gated
from pipeproof.stages.common.dropout import Dropouts
from pipeproof.stages.common.embedding_and_head import Positions
from pipeproof.stages.common.sequence_splits import EarlierSplits, GatheredKeys
from pipeproof.stages.common.stage import with_positions
from pipeproof.stages.describe.synthetic import DropoutKeys
from tests.stages.adjoints.regions import MLA
from tests.stages.adjoints.rows import per_layout, plain
from tests.stages.adjoints.world import Backend, Case, Held, Rank, make_plan


def functions(fw: Backend) -> list[Case]:
    """The arithmetic without communication."""
    ops, functional, fixed = fw.ops, fw.functional, fw.fixed
    causal_attention, swiglu = functional.causal_attention, functional.swiglu
    cos, sin, factors = fixed(5, 6), fixed(5, 6), fixed(2, 2, 3, 4, 5)
    attention = (2, 2, 3, 4, 6), (2, 2, 5, 6), (2, 2, 5, 3)
    turned = fw.rotary_tables(5, 4)
    limits = ({}, {"swiglu_limit": 0.6}, {"swiglu_limit": 0.6, "swiglu_formula": "silu"})
    models = [make_plan(model=limit).gpt for limit in limits]
    gelu, gelu_tanh = (functional.mlp_activation(make_plan(model={"mlp": mlp}).gpt) for mlp in ("gelu", "gelu_tanh"))
    return [
        plain("RMSNorm", "rms_norm", functional.rms_norm, (3, 4, 8)),
        plain("heads rotated", "rotated_heads", lambda x: functional.rotated_heads(x, cos, sin), (2, 3, 4, 5, 6)),
        *(
            plain(f"heads with {kind} positions", "Positions.grouped_heads", heads, (2, 3, 4, 5, 6))
            for kind, heads in _positions(fw).items()
        ),
        plain("GELU", "mlp_activation", lambda x: gelu(x) + gelu_tanh(x + 0.5), (3, 8)),
        plain("rotary embedding", "rotate", lambda x: functional.rotate(x, cos, sin), (2, 3, 5, 6)),
        plain("rotary tables", "rotary_tables", lambda x: functional.rotate(x, *turned), (2, 5, 4)),
        plain("SwiGLU", "swiglu", swiglu, (3, 8), (3, 8)),
        plain("clamped SwiGLU", "clamped_swiglu", lambda g, u: clamped_swiglu(g, u, 0.6, fw.clip), (6, 8), (6, 8)),
        plain(
            "the plan's SwiGLU",
            "gated",
            lambda g, u: sum(gated(swiglu, model, fw.clip)(g, u) for model in models),
            (6, 8),
            (6, 8),
        ),
        plain("attention", "causal_attention", causal_attention, (2, 2, 3, 4, 6), (2, 2, 4, 6), (2, 2, 4, 3)),
        plain("attention in groups", "causal_attention", causal_attention, *attention),
        plain("with dropout", "causal_attention", lambda q, k, v: causal_attention(q, k, v, factors), *attention),
        plain(
            "latent attention's positions",
            "with_positions",
            lambda q, k, s: with_positions(ops, q, k, s, MLA, fixed(5, 4), fixed(4, 5).t()),
            (2, 3, 5, 6),
            (2, 3, 5, 5),
            (2, 5, 4),
        ),
        plain(
            "recomputed",
            "",
            lambda *x: ops.recompute_in_backward(causal_attention, *x),
            *attention,
        ),
        Case("splits", ("EarlierSplits.join",), partial(_splits, ops), (Held((2, 2, 3, 4)),) * 6, in_turn=True),
        Case(
            "splits, recomputed",
            ("EarlierSplits.join",),
            partial(_splits_again, ops),
            (Held((2, 2, 3, 4)),) * 6,
            in_turn=True,
        ),
        Case("shared keys", ("GatheredKeys.join",), partial(_shared, ops), (Held((2, 2, 3, 4)),) * 2, num_ranks=3),
        *_dropped(fw),
    ]


def _positions(fw: Backend) -> dict[str, Callable[[Any], Any]]:
    """The heads of the second of two sequence splits, by kind of positions."""
    plans = {kind: make_plan(model={"positions": kind}) for kind in ("rotary", "learned")}
    tables = fw.fixed(10, 6), fw.fixed(10, 6)
    return {
        kind: partial(Positions(fw.ops, plan, fw.split_weights(), tables).grouped_heads, split=1)
        for kind, plan in plans.items()
    }


class _OverContext:
    """The ranks' collectives, asked for by axis."""

    def __init__(self, rank: Rank) -> None:
        self._ranks = rank.region.collectives

    def all_gather(self, tensor: Any, dim: int, *, label: str, axis: str) -> Any:
        assert axis == "cp"
        return self._ranks.all_gather(tensor.contiguous(), dim, label=label)

    def reduce_scatter(self, tensor: Any, dim: int, *, label: str, axis: str) -> Any:
        assert axis == "cp"
        return self._ranks.reduce_scatter(tensor.contiguous(), dim, label=label)


def _shared(ops: BackendOps, rank: Rank, key: Any, value: Any) -> Any:
    """Each of three ranks looks at the keys and values of the ranks up to it."""
    keys, values = GatheredKeys(ops, 3, _OverContext(rank)).join(
        key, value, micro_batch=0, layer="x", split=rank.number
    )
    return keys.tanh() * values


def _splits(ops: BackendOps, rank: Rank, *tensors: Any) -> list[Any]:
    """Three splits of a sequence: each looks at its own keys and values and at those before it."""
    earlier = EarlierSplits(ops, 3)
    return [_piece(earlier, number, *tensors[2 * number : 2 * number + 2]) for number in range(3)]


def _splits_again(ops: BackendOps, rank: Rank, *tensors: Any) -> list[Any]:
    """The same, with each split recomputed in backward."""
    earlier = EarlierSplits(ops, 3, recomputes=True)
    return [
        ops.recompute_in_backward(
            lambda k, v, n=number: _piece(earlier, n, k, v), *tensors[2 * number : 2 * number + 2]
        )
        for number in range(3)
    ]


def _piece(earlier: EarlierSplits, number: int, key: Any, value: Any) -> Any:
    keys, values = earlier.join(key, value, micro_batch=0, layer="x", split=number)
    return keys.tanh() * values


def _dropped(fw: Backend) -> list[Case]:
    def between(rank: Rank, x: Any) -> Any:
        plan = make_plan(model={"dropout": 0.4}, topology=_topology(rank))
        return Dropouts(fw.ops, DropoutKeys(plan, 0, 0), 0, rank.region).between(x, "hidden", "layer.0.attn")

    def attention(rank: Rank, *inputs: Any) -> Any:
        plan = make_plan(model={"dropout": 0.4}, topology=_topology(rank))
        dropouts = Dropouts(fw.ops, DropoutKeys(plan, 0, 0), 0, rank.region)
        return fw.functional.causal_attention(*inputs, dropouts.of_attention("layer.0.attn", inputs[0]))

    heads = [((2, 2, 1, 8, 4), "own"), ((2, 2, 8, 4), "own"), ((2, 2, 8, 4), "own")]
    of_attention = per_layout("dropout of attention", "Dropouts.of_attention", attention, *heads, output="own")[1:2]
    whole, _, cut = (
        per_layout("dropout", "Dropouts.between", between, ((length, 2, 16), "between"), output="between")[place]
        for place, length in enumerate((8, 8, 4))
    )
    return [whole, cut, *of_attention]


def _topology(rank: Rank) -> dict[str, Any]:
    return {"tp": rank.region.num_ranks, "sequence_parallel": rank.region.sequence_dim is not None}
