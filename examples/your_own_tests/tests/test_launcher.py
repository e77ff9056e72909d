"""A property of this project's launcher, over generated plans."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof import lower, plan_from_dict

AXES = ["tp", "cp", "ep", "dp", "pp"]
MODEL = {
    "kind": "gpt",
    "num_layers": 2,
    "hidden_size": 8,
    "num_heads": 2,
    "ffn_size": 8,
    "vocab_size": 8,
    "seq_length": 4,
}
SCHEDULE = {"kind": "1f1b", "num_micro_batches": 2, "micro_batch_size": 1}


def ranks_of_stage_0(topology):
    """Return the global ranks of the first pipeline stage, as the launcher computes them; the first axis is fastest."""
    step = 1
    for axis in topology["order"][: topology["order"].index("pp")]:
        step *= topology[axis]
    num_ranks = topology["pp"] * topology["tp"] * topology["cp"] * topology["ep"] * topology["dp"]
    return [rank for rank in range(num_ranks) if rank // step % topology["pp"] == 0]


@settings(deadline=None, max_examples=30)
@given(st.fixed_dictionaries({axis: st.sampled_from([1, 2]) for axis in AXES} | {"order": st.permutations(AXES)}))
def test_the_launcher_numbers_ranks_as_the_proof_does(topology):
    plan = {"pipeproof": 1, "model": MODEL, "topology": topology, "schedule": SCHEDULE}
    mesh = lower(plan_from_dict(plan).spec).mesh
    assert ranks_of_stage_0(topology) == [r for r in range(mesh.num_ranks) if mesh.coords(r)["pp"] == 0]
