"""Pairs that take turns as a choice of advice, and a plan that has them."""

import pytest

from pipeproof.analysis.advise.candidates import Candidates
from pipeproof.analysis.advise.reasons import name_of
from pipeproof.analysis.advise.search import Group, advise
from pipeproof.analysis.tune.frameworks import FRAMEWORKS
from pipeproof.comm.lower import lower
from pipeproof.sim.simulate import simulate
from tests.comm.test_overlap_pairs import plan

SLOW = {"ranks_per_node": 8, "node": {"latency_us": 2, "bandwidth": 0.1}}
TIMES = {"forward_us": 300, "backward_input_us": 300, "backward_weight_us": 100, "network": SLOW}
INTERLEAVED = {"kind": "interleaved", "num_chunks": 2, "variant": "megatron", "num_micro_batches": 8}


def overlaps(framework=None, **sections):
    """(kind, overlap) of all choices."""
    candidates = Candidates(plan(**sections), None, framework=framework)
    return {(choice.kind, choice.overlap) for choice in candidates.choices(None) if choice.overlap is not None}


def test_kinds_with_pairs_are_tried_with_turns():
    kinds = ("dualpipe", "dualpipe_v", "1f1b", "interleaved", "optimal")
    assert overlaps(schedule={"kind": "gpipe"}) == {(kind, "pairs") for kind in kinds}


@pytest.mark.parametrize("sections", [{"topology": {"ep": 1}}, {"moe": None}, {"memory": {"recompute": "full"}}])
def test_plans_without_anything_to_hide_are_not(sections):
    assert overlaps(schedule={"kind": "1f1b"}, **sections) == set()


def test_a_framework_has_its_own():
    assert overlaps(FRAMEWORKS["megatron"], schedule={"kind": "1f1b"}) == {("interleaved", "pairs")}
    assert overlaps(FRAMEWORKS["paddle"], schedule={"kind": "1f1b"}) == set()


def test_a_given_order_stays_or_is_left_out():
    order = {"order": ["F", "B"]}
    candidates = Candidates(plan(schedule={**INTERLEAVED, "overlap": order}), None)
    found = [(choice.kind, choice.overlap) for choice in candidates.choices(None) if choice.num_micro_batches == 8]
    assert [pair for pair in found if pair[0] in ("1f1b", "zb_h1")] == [
        ("1f1b", order),
        ("1f1b", None),
        ("zb_h1", None),
    ]


def test_pairs_that_make_a_step_slower_are_advised_against():
    """With few micro-batches a backward of the last rank waits for a long forward of the first."""
    times = {"forward_us": [8000, 1000], "backward_input_us": [4000, 2000], "backward_weight_us": [5000, 1000]}
    schedule = {"kind": "1f1b", "num_micro_batches": 2, "overlap": "pairs"}
    result = advise(
        plan(schedule=schedule, cost={**times, "network": {**SLOW, "node": {"latency_us": 2, "bandwidth": 1}}})
    )
    better = {name_of(each.candidate.spec): each.candidate.figures.makespan_us for each in result.listed[Group.BETTER]}
    assert better["1f1b"] == 34000 < result.present.makespan_us


def test_pairs_are_advised_where_they_save_time():
    result = advise(plan(schedule=INTERLEAVED, cost=TIMES))
    assert result.best is not None
    assert name_of(result.best.candidate.spec) == "interleaved v=2 overlap=pairs"
    one = lower(result.best.candidate.spec)
    computed = max(s.end for s in simulate(one).timeline.spans if s.queue == "compute" and "F" in s.op)
    assert computed <= result.best.candidate.figures.makespan_us < result.present.makespan_us
