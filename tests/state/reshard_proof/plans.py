"""Small plans, and the files of their ranks, for the proof."""

from pipeproof.comm.lower import lower
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.state.reshard.shard_layout import layout_of_plan
from tests.plans import plan_dict

DENSE = {"num_layers": 2, "num_kv_heads": 2, "vocab_size": 24, "tied_embedding": True}
EXPERTS = {"num_layers": 2, "moe": {"num_experts": 12, "top_k": 2, "ffn_size": 8}, "mtp": {"num_modules": 1}}
TOPOLOGIES = (
    {"pp": 1, "tp": 1},
    {"pp": 2, "tp": 1},
    {"pp": 2, "tp": 2},
    {"pp": 1, "tp": 2, "dp": 3},
    {"pp": 1, "tp": 2, "ep": 2},
)


def lowered(topology, model=None, *, sharded=True, **sections):
    """A lowered plan on these ranks, whose optimizer is sharded over its data-parallel ones."""
    run = {"optimizer": "adamw", "backend": "torch", **sections.pop("run", {})}
    memory = {"shard_optimizer": "dp"} if sharded and topology.get("dp", 1) > 1 else {}
    plan = plan_dict(model=DENSE if model is None else model, topology=topology, memory=memory, run=run, **sections)
    return lower(plan_from_dict(plan).spec)


def layout(topology, model=None, name="plan", **sections):
    """Return the layout that the ranks of such a plan write."""
    return layout_of_plan(lowered(topology, model, **sections), name)
