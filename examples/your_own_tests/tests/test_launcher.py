"""A property of this project's launcher, over generated plans."""

from hypothesis import given, settings

from pipeproof.testing.strategies import plans


def ranks_of_stage_0(topology):
    """Return the global ranks of the first pipeline stage, as the launcher computes them; the first axis is fastest."""
    order = topology.get("order", ["tp", "cp", "ep", "dp", "pp"])
    step = 1
    for axis in order[: order.index("pp")]:
        step *= topology[axis]
    num_ranks = topology["pp"] * topology["tp"] * topology["cp"] * topology["ep"] * topology["dp"]
    return [rank for rank in range(num_ranks) if rank // step % topology["pp"] == 0]


@settings(deadline=None, max_examples=30)
@given(plans())
def test_the_launcher_numbers_ranks_as_the_proof_does(plan):
    from pipeproof import lower, plan_from_dict

    mesh = lower(plan_from_dict(plan).spec).mesh
    assert ranks_of_stage_0(plan["topology"]) == [r for r in range(mesh.num_ranks) if mesh.coords(r)["pp"] == 0]
