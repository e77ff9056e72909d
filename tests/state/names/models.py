"""Small models of every family that has names elsewhere; no two sizes are alike, and experts are more than ten."""

from pipeproof.specs.load_plan import plan_from_dict
from tests.plans import plan_dict

MLA = {"kv_rank": 10, "nope_head_size": 6, "rope_head_size": 4, "value_head_size": 5}
MOE = {"num_experts": 12, "top_k": 3, "ffn_size": 7}
SIGMOID = {"score": "sigmoid", "expert_bias_rate": 0.01}

MODELS = {
    "dense with grouped queries": {"num_kv_heads": 3},
    "dense, a head of another size": {"head_size": 6, "num_kv_heads": 2},
    "tied": {"tied_embedding": True},
    "tied with modules": {"tied_embedding": True, "num_kv_heads": 2, "mtp": {"num_modules": 2}},
    "experts as Mixtral": {"num_kv_heads": 2, "moe": MOE},
    "experts, some shared": {"moe": MOE | {"num_shared_experts": 2, "dense_layers": 1, "normalize": False}},
    "experts with biases": {
        "num_kv_heads": 3,
        "moe": MOE | SIGMOID | {"dense_layers": 1, "num_shared_experts": 1},
        "mtp": {"num_modules": 1},
    },
    "latent, dense": {"mla": MLA},
    "latent, experts": {"mla": MLA, "moe": MOE | {"num_shared_experts": 1}},
    "latent with modules": {
        "mla": MLA | {"q_rank": 9},
        "moe": MOE | SIGMOID | {"dense_layers": 1, "num_shared_experts": 1},
        "mtp": {"num_modules": 2},
    },
}


def plan_of(**model):
    """A plan with such a model, in float64."""
    sizes = {"num_layers": 2, "hidden_size": 24, "num_heads": 6, "ffn_size": 20, "vocab_size": 31, "seq_length": 7}
    return plan_from_dict(
        plan_dict(
            model=sizes | model,
            topology={"pp": 1},
            schedule={"kind": "1f1b", "num_micro_batches": 2, "micro_batch_size": 2},
            run={"dtype": "float64", "backend": "paddle"},
        )
    ).spec
