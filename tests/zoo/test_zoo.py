"""Every bug of the zoo is killed by exactly the rules that its table names, and nothing near it is called an error."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plans import subject
from tests.zoo.accept import ACCEPTED
from tests.zoo.case import error_codes
from tests.zoo.table import ACCEPTED_ROW, BUGS, CASES, ERROR_RULES, ONLY_A_RUN, RULE_MUTANTS, only_killer

ALL = (*CASES, *RULE_MUTANTS)


@pytest.mark.parametrize("case", ALL, ids=[case.id for case in ALL])
def test_the_right_form_has_no_error_and_the_mutant_is_killed_by_the_rules_of_the_table(case):
    assert error_codes(case.correct()) == ()
    assert case.kills
    assert error_codes(case.mutant()) == case.kills


def test_each_bug_is_a_case_or_waits_for_a_run_or_is_accepted():
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)
    assert {case.row for case in CASES} | {*ONLY_A_RUN, ACCEPTED_ROW} == set(BUGS)
    assert not {case.row for case in CASES} & {*ONLY_A_RUN, ACCEPTED_ROW}


@pytest.mark.parametrize("code", ERROR_RULES)
def test_each_error_rule_has_a_mutant_that_only_it_kills(code):
    assert only_killer(code), f"no mutant is killed by {code} alone"


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name):
    assert error_codes(ACCEPTED[name]()) == ()


@settings(max_examples=60)
@given(st.data())
def test_plans_of_our_generators_are_right_unless_partial_meets_sequence_parallelism(data):
    """Any topology and schedule that the plan format accepts, at small sizes; `partial` corrupts tensors that SP
    shards."""
    draw = data.draw
    pp, tp = draw(st.integers(1, 4), "pp"), draw(st.sampled_from([1, 2, 4]), "tp")
    kind = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]), "schedule")
    sequence_parallel = draw(st.booleans(), "sequence parallel")
    transports = st.sampled_from(["full", "partial"])
    transport = {side: draw(transports, side) for side in ("forward", "backward")}
    schedule = {"kind": kind, "num_micro_batches": draw(st.integers(1, 7), "micro-batches")}
    if kind == "interleaved":
        schedule["num_chunks"] = draw(st.integers(2, 3), "chunks")
        schedule["num_micro_batches"] = pp * draw(st.integers(1, 2), "rounds")
    one = subject(
        model={"num_layers": 12, "activation_order": draw(st.sampled_from(["sbh", "bsh"]), "dims")},
        topology={
            "pp": pp,
            "tp": tp,
            "dp": draw(st.integers(1, 2), "dp"),
            "cp": draw(st.integers(1, 2), "cp"),
            "ep": draw(st.integers(1, 2), "ep"),
            "sequence_parallel": sequence_parallel,
        },
        schedule=schedule,
        loss={"normalization": draw(st.sampled_from(["global_tokens", "mean_of_micro_batches"]), "loss")},
        transport=transport,
    )
    is_corrupt = sequence_parallel and tp > 1 and pp > 1 and "partial" in transport.values()
    assert error_codes(one) == error_codes(one.unfolded()) == (("PP201",) if is_corrupt else ())
