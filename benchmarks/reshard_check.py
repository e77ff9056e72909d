"""Time to prove a reshard of 1024 ranks, part by part, with no bytes: who writes what, and the proof.

From PP 16, TP 8 and DP 8, with shares of the moments, to PP 8, TP 4 and DP 32; 64 layers.

    python benchmarks/reshard_check.py
"""

from __future__ import annotations

import time

from pipeproof.comm.lower import lower
from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.state.reshard.reshard_proof import prove
from pipeproof.state.reshard.shard_layout import garbage_collection_paused, layout_of_plan
from pipeproof.state.tensor_map import identity_map

NUM_LAYERS = 64


def main() -> None:
    """Print how long each part took."""
    sides = []
    for name, (pp, tp, dp) in {"one": (16, 8, 8), "other": (8, 4, 32)}.items():
        plan = _plan(pp, tp, dp)
        started = time.perf_counter()
        sides.append(layout_of_plan(plan, name))
        num_parts = sum(map(len, sides[-1].shards.values()))
        took = time.perf_counter() - started
        print(f"pp {pp} x tp {tp} x dp {dp}: {num_parts:,} parts of {len(sides[-1].tensors):,} tensors, {took:.1f} s")
    source, target = sides
    started = time.perf_counter()
    with garbage_collection_paused():
        findings = prove(source, identity_map(source.tensors), target)
    print(f"the proof: {len(findings)} findings, {time.perf_counter() - started:.1f} s")


def _plan(pp: int, tp: int, dp: int) -> LoweredPlan:
    model = {
        "kind": "gpt", "num_layers": NUM_LAYERS, "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 8,
        "ffn_size": 4096, "vocab_size": 32768, "seq_length": 128,
    }  # fmt: skip
    return lower(
        plan_from_dict(
            {
                "pipeproof": 1,
                "model": model,
                "topology": {"pp": pp, "tp": tp, "dp": dp},
                "schedule": {"kind": "1f1b", "num_micro_batches": 512 // dp, "micro_batch_size": 1},
                "run": {"backend": "paddle", "optimizer": "adamw"},
                "memory": {"shard_optimizer": "dp"},
            }
        ).spec
    )


if __name__ == "__main__":
    main()
