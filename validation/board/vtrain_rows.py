"""Iteration times of GPTs on A100s that vTrain was validated with (Megatron-DeepSpeed, 1F1B, full recomputation)."""

from __future__ import annotations

from functools import partial
from typing import Any

from validation.board.measurement import (
    Cells,
    Measurement,
    NoPlanError,
    Quantity,
    divided,
    measured_with_plan,
)

COLUMNS = frozenset(
    {
        "# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length",
        "tensor parallelism", "data parallelism", "pipeline parallelism", "iteration time (ms)",
    }
)  # fmt: skip
_VOCABULARY = 51200
"""GPT-2's vocabulary as Megatron-LM pads it for eight tensor-parallel ranks."""
_RANKS_PER_NODE = 8
_RANKS_PER_CARD = 2
"""Four cards of 200 Gb/s for the eight GPUs of a node (``inter_node_bandwidth`` of vTrain's validation, 800 Gb/s)."""


def vtrain_rows(cells: Cells) -> tuple[Measurement]:
    """Return the measurement of a row; up to eight GPUs are one node.

    Raises:
        MeasurementFileError: a cell cannot be read.
    """
    gpus, batch, size, hidden, layers, tp, dp, pp = (
        cells.count(name)
        for name in ("# GPUs", "global batch", "micro batch", "hidden size", "# layers", "tensor parallelism",
                     "data parallelism", "pipeline parallelism")
    )  # fmt: skip
    group = "vTrain, one node" if gpus <= _RANKS_PER_NODE else "vTrain, several nodes"
    name = f"{gpus} A100, hidden {hidden}, {layers} blocks, tp {tp} dp {dp} pp {pp}, batch {batch} of {size}"
    measured = cells.number("iteration time (ms)") / 1000
    of = {"system": group, "model": f"GPT, hidden {hidden}"}
    return (measured_with_plan(group, name, Quantity.STEP, measured, partial(_plan, cells, (tp, dp, pp)), **of),)


def _plan(cells: Cells, mesh: tuple[int, int, int]) -> dict[str, Any]:
    tp, dp, pp = mesh
    size = cells.count("micro batch")
    num_micro_batches = divided(cells.count("global batch"), size * dp, "the batch over micro-batches")
    if tp * dp * pp != cells.count("# GPUs"):
        raise NoPlanError(f"tp x dp x pp is {tp * dp * pp}")
    hidden = cells.count("hidden size")
    analytic = {"device": "a100", "dtype": "bfloat16", "attention": "unfused"}
    cost: dict[str, Any] = {"analytic": {**analytic, "fused_residual": True, "fused_softmax": True}}
    if tp * dp * pp > _RANKS_PER_NODE:
        cost["network"] = {"ranks_per_nic": _RANKS_PER_CARD}
    return {
        "pipeproof": 1,
        "model": {
            "kind": "gpt", "num_layers": cells.count("# layers"), "hidden_size": hidden,
            "num_heads": cells.count("attention heads"), "ffn_size": 4 * hidden, "vocab_size": _VOCABULARY,
            "seq_length": cells.count("sequence length"), "norm": "layer", "positions": "learned",
            "mlp": "gelu_tanh", "biases": "all", "tied_embedding": True, "dropout": 0.1,
        },
        "topology": {"tp": tp, "dp": dp, "pp": pp},
        "schedule": {
            "kind": "1f1b", "num_micro_batches": num_micro_batches, "micro_batch_size": size,
        },
        "cost": cost,
        "memory": {"recompute": "full", "cross_entropy": "in_place"},
        **({"transport": "partial"} if tp > 1 else {}),
    }  # fmt: skip
