"""Costs of a tied embedding: memory of its copies, the optimizer's step on them, and the sum over its holders."""

import pytest

from pipeproof.cost.analytic_times import AnalyticCosts
from pipeproof.schedule.kinds import ends_share_ranks
from pipeproof.sim.memory_curve import Part
from pipeproof.sim.simulate import simulate
from tests.plans import plan_spec, subject

EMBEDDING = 32 * 16
"""Elements of the weight."""

SCHEDULES = {
    "1f1b": {"kind": "1f1b"},
    "interleaved": {"kind": "interleaved", "num_chunks": 2},
    "zb_v": {"kind": "zb_v", "num_chunks": 2},
    "dualpipe": {"kind": "dualpipe", "num_micro_batches": 8},
}


def lowered(kind, *, tied, **sections):
    model = {"tied_embedding": tied, "num_layers": 8, **sections.pop("model", {})}
    return subject(model=model, schedule=dict(SCHEDULES[kind]), **sections).plan


@pytest.mark.parametrize(
    ("kind", "saved"), [("1f1b", (0, 0)), ("interleaved", (0, 0)), ("zb_v", (1, 0)), ("dualpipe", (1, 1))]
)
def test_a_rank_has_the_weight_once_and_saves_where_it_has_both_ends(kind, saved):
    """Untied, the head's weight has as many elements as the embedding's."""
    plain, tied = (simulate(lowered(kind, tied=one)).memory for one in (False, True))
    for rank, times in enumerate(saved):
        difference = {part: plain[rank].make_up[part] - tied[rank].make_up[part] for part in Part}
        expected = {Part.PARAMETERS: 4, Part.GRADIENTS: 4, Part.OPTIMIZER: 8}
        assert {part: bytes_ for part, bytes_ in difference.items() if bytes_} == {
            part: times * size * EMBEDDING for part, size in expected.items() if times
        }


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_what_the_plan_says_of_its_ends_is_what_its_schedule_does(kind, pp):
    plan = lowered(kind, tied=True, topology={"pp": pp})
    assert ends_share_ranks(plan.spec) == (set(plan.holders[-1]) <= set(plan.holders[0]))


@pytest.mark.parametrize(
    ("schedule", "together"),
    [
        ({"kind": "looped_bfs", "num_chunks": 2, "placement": "v"}, True),
        ({"kind": "looped_bfs", "num_chunks": 3, "placement": "v"}, False),
        ({"kind": "looped_bfs", "num_chunks": 2, "placement": "loop"}, False),
        ({"kind": "looped_bfs", "placement": [[0, 3], [1, 2]]}, True),
        ({"kind": "looped_bfs", "placement": [[0, 2], [1, 3]]}, False),
    ],
)
def test_placements_of_ones_own(schedule, together):
    plan = subject(model={"num_layers": 8}, schedule=schedule).plan
    assert ends_share_ranks(plan.spec) is together
    assert (set(plan.holders[-1]) <= set(plan.holders[0])) is together


@pytest.mark.parametrize(("kind", "copied"), [("1f1b", True), ("zb_v", False)])
def test_the_optimizer_steps_on_a_copy_where_there_is_one(kind, copied):
    specs = (
        plan_spec(
            model={"tied_embedding": one},
            schedule=dict(SCHEDULES[kind]),
            cost={"analytic": {"device": "h200", "dtype": "bfloat16"}},
        )
        for one in (False, True)
    )
    plain, tied = (AnalyticCosts(spec, spec.cost.analytic).updates for spec in specs)
    assert tied[:-1] == plain[:-1]
    assert (tied[-1] == plain[-1]) is copied


def test_the_sum_over_the_holders_is_in_the_timeline_and_takes_time():
    analytic = {"device": "h200", "dtype": "bfloat16"}
    plan = lowered("1f1b", tied=True, cost={"analytic": analytic}, model={"vocab_size": 2**16, "hidden_size": 1024})
    sums = [span for span in simulate(plan).timeline.spans if span.op.endswith("REDUCE_GRAD:pp")]
    assert [span.op for span in sums] == ["0REDUCE_GRAD:pp", "1REDUCE_GRAD:pp"]
    first, second = sums
    assert first.end == second.end > max(first.start, second.start)
