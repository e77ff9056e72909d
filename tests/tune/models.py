"""Small models to tune, on a few devices."""

from pipeproof.specs.load_plan import plan_from_dict

DENSE = {
    "kind": "gpt", "num_layers": 8, "hidden_size": 1024, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 2816,
    "vocab_size": 16000, "seq_length": 512,
}  # fmt: skip
EXPERTS = {**DENSE, "moe": {"num_experts": 8, "top_k": 2, "ffn_size": 512, "dense_layers": 1}}

LARGE_EXPERTS = {
    **DENSE, "hidden_size": 2048, "num_heads": 16, "moe": {"num_experts": 8, "top_k": 4, "ffn_size": 1024},
}  # fmt: skip
"""Experts whose exchanges take long enough to be hidden."""

REPLAYED = {"analytic": {"device": "h100", "execution": "graph"}}


def to_tune(model=DENSE, **sections):
    return plan_from_dict(
        {
            "pipeproof": 1,
            "model": model,
            "topology": {},
            "schedule": {"kind": "1f1b", "num_micro_batches": 1, "micro_batch_size": 1},
            **sections,
        }
    )
