"""The start of a pipeline over a store: one result or one error on every rank, and never a hang."""

import time

import pytest

from pipeproof.diagnostics.finding import BadPlanError, Finding, Location, Severity
from pipeproof.exec.store import agreement as module
from pipeproof.exec.store.agreement import STORE_LOST, Agreement, require_equal
from pipeproof.exec.store.train_errors import PipelineError, PlanRefused
from tests.train.fake_store import FakeStore, on_ranks

FINDING = Finding("PP123", Severity.ERROR, "wrong order", Location("plan.yaml", 3, 5, 9), "swap them")


def gathered(num_ranks, work, timeout_s=20.0):
    """Result of one phase on each rank; ``work`` has the rank."""
    store = FakeStore()
    return on_ranks(
        num_ranks, lambda rank: Agreement(store, rank, num_ranks, timeout_s).gather("phase", lambda: work(rank))
    )


def test_every_rank_gets_all_results_in_order():
    assert gathered(3, lambda rank: {"rank": rank}) == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def raises(error, on=None):
    def work(rank):
        if on is None or rank in on:
            raise error
        return rank

    return work


def test_an_error_of_one_rank_is_the_error_of_all_and_names_it():
    found = gathered(3, raises(ValueError("bad"), on=[1]))
    assert [str(error) for error in found] == ["rank 1: ValueError: bad"] * 3
    assert {type(error) for error in found} == {PipelineError}
    assert all(error.is_reported for error in found)


def test_the_rank_with_the_users_error_keeps_its_traceback_and_no_other():
    user = ValueError("bad")

    def work(rank):
        if rank == 1:
            raise PipelineError("stage 1 fails") from user

    found = gathered(2, work)
    assert [error.__cause__ for error in found] == [None, user]
    assert all(error.__suppress_context__ for error in found)


def test_the_same_error_on_all_ranks_names_none():
    assert {str(error) for error in gathered(2, raises(PipelineError("no example")))} == {"no example"}


def test_different_errors_are_listed_by_rank():
    def work(rank):
        raise PipelineError("odd" if rank % 2 else "even")

    assert {str(error) for error in gathered(4, work)} == {"ranks 0, 2: even\nranks 1, 3: odd"}


def test_an_error_that_passes_on_anothers_is_left_out():
    def work(rank):
        raise PipelineError.reported("stage 0 fails") if rank else PipelineError("stage 0 fails, first")

    assert {str(error) for error in gathered(3, work)} == {"rank 0: stage 0 fails, first"}


def test_a_refusal_of_rank_0_is_one_with_its_findings_on_every_rank():
    found = gathered(2, raises(PlanRefused((FINDING,)), on=[0]))
    assert {type(error) for error in found} == {PlanRefused}
    assert {error.findings for error in found} == {(FINDING,)}
    assert "plan.yaml:3:5: PP123: wrong order\n    help: swap them" in str(found[1])
    assert "rank 0" not in str(found[1])


def test_a_plan_that_is_not_valid_is_refused_and_names_the_rank_if_only_one_has_it():
    (everywhere, _), (_, elsewhere) = (gathered(2, raises(BadPlanError(FINDING), on=on)) for on in (None, [0]))
    assert str(everywhere).startswith("the plan is not valid:\n")
    assert str(elsewhere).startswith("rank 0: the plan is not valid:\n")
    assert elsewhere.findings == (FINDING,)


def test_a_rank_that_does_not_come_is_named_in_time():
    begin = time.monotonic()
    (error,) = on_ranks(1, lambda rank: Agreement(FakeStore(), 0, 2, 0.2).gather("start", lambda: None))
    assert isinstance(error, PipelineError)
    assert "rank 1" in str(error)
    assert "`start`" in str(error)
    assert "0.2 s" in str(error)
    assert time.monotonic() - begin < 10


def test_ranks_that_have_come_are_given_time_to_work():
    store = FakeStore()

    def work(rank):
        own = Agreement(store, rank, 2, 0.5)
        own.gather("start", lambda: None)
        return own.gather("work", lambda: time.sleep(1.0 * rank))

    assert on_ranks(2, work) == [[None, None]] * 2


def test_a_known_error_does_not_wait_for_ranks_that_do_not_come(monkeypatch):
    monkeypatch.setattr(module, "_LATE_S", 0.1)
    begin = time.monotonic()
    (error,) = on_ranks(1, lambda rank: Agreement(FakeStore(), 0, 3, 60.0).gather("start", raises_now))
    assert str(error) == "rank 0: bad"
    assert time.monotonic() - begin < 10


def raises_now():
    raise PipelineError("bad")


def test_who_waits_hears_of_a_failure_elsewhere():
    store = FakeStore()
    waiting, failing = Agreement(store, 0, 2, 60.0), Agreement(store, 1, 2, 60.0)
    begin = time.monotonic()
    answers = on_ranks(2, lambda rank: failing.fail("rank 1: it broke") if rank else waiting.read("later", "nothing"))
    assert str(answers[0]) == "rank 1: it broke"
    assert answers[0].is_reported
    assert time.monotonic() - begin < 10


def test_the_first_report_of_a_failure_counts():
    own = Agreement(FakeStore(), 0, 1, 1.0)
    assert own.failure() is None
    own.fail("first")
    own.fail("second")
    assert own.failure() == "first"


def test_a_store_whose_process_has_ended_is_explained():
    store = FakeStore()
    store.end()
    with pytest.raises(PipelineError, match="does not answer") as raised:
        Agreement(store, 0, 2, 1.0).gather("start", lambda: 1)
    assert str(raised.value) == STORE_LOST
    assert raised.value.__suppress_context__


def test_values_that_differ_are_shown_by_key_and_rank():
    require_equal([{"a": 1}, {"a": 1}], "it")
    with pytest.raises(PipelineError) as raised:
        require_equal([{"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, {"a": {"b": 1, "c": 2}}], "`plan`")
    assert str(raised.value) == "`plan` differs between the ranks: a.c is 2 on ranks 0, 2, 3 on rank 1"


def test_many_keys_and_long_values_are_shortened():
    with pytest.raises(PipelineError) as raised:
        require_equal([dict.fromkeys("abcde", "x" * 500), {}], "it")
    assert "and 2 more keys" in str(raised.value)
    assert len(str(raised.value)) < 1000
