"""A tied embedding on every kind of placement: bitwise the reference that adds in the declared order."""

import pytest

from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

PLANS = {
    "one rank": ({"pp": 1}, {"kind": "gpipe"}),
    "loop": ({}, {"kind": "1f1b"}),
    "chunks": ({}, {"kind": "interleaved", "num_chunks": 2}),
    "v": ({"dp": 2}, {"kind": "zb_v", "num_chunks": 2}),
    "copies": ({"dp": 2}, {"kind": "dualpipe"}),
}


def tied(name, **sections):
    topology, schedule = PLANS[name]
    return subject(
        model={"tied_embedding": True}, topology=topology, schedule=schedule, run={"steps": 2}, **sections
    ).unfolded().plan  # fmt: skip


@pytest.mark.slow(but=["loop", "v"])
@pytest.mark.parametrize("name", ["loop", "v", "copies"])
def test_every_placement_has_the_bits_of_its_reference(name):
    from pipeproof.stages.reference.bound import parallel_bound
    from tests.exec.in_memory import compared

    plan = tied(name)
    first, second = compared(plan)
    assert first.bitwise
    assert second.bitwise
    names = [gradient.name for gradient in first.gradients]
    assert names.count("embed.weight") == 1
    assert "head.weight" not in names
    (embedding,) = (one for one in first.gradients if one.name == "embed.weight")
    assert {plan.mesh.coords(shard.rank)["pp"] for shard in embedding.shards} == set(plan.holders[0] + plan.holders[-1])
    assert max(one.unpartitioned_max_rel_diff for one in first.gradients) <= parallel_bound(plan.spec)


@pytest.mark.slow
def test_placement_and_schedule_do_not_change_a_bit():
    from tests.exec.in_memory import compared

    first, *others = (compared(tied(name))[-1] for name in ("loop", "one rank", "chunks"))
    for other in others:
        assert other.loss.tobytes() == first.loss.tobytes()
        md5s, expected = ({one.name: one.md5 for one in step.gradients} for step in (other, first))
        assert md5s == expected
