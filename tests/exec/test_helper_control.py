"""Control of two computations in two threads: one runs at a time, errors of either one, and no thread that is left."""

import threading

import pytest

from pipeproof.exec.rank.overlapped_pair import AlternationEndedError, Helper


def helper_of(work, set_up=lambda: None):
    return Helper("a helper", work, set_up)


def has_helper():
    return any(thread.name == "a helper" for thread in threading.enumerate())


def test_each_thread_runs_only_while_it_has_control():
    seen = []

    def work():
        for number in range(3):
            seen.append(("helper", number, threading.current_thread().name))
            helper.give_back()

    helper = helper_of(work)
    for number in range(3):
        seen.append(("rank", number, threading.current_thread().name))
        helper.resume()
    assert not helper.has_ended
    helper.resume()
    assert helper.has_ended
    rank = threading.current_thread().name
    assert seen == [(side, n, name) for n in range(3) for side, name in (("rank", rank), ("helper", "a helper"))]
    assert not has_helper()


def test_another_thread_of_the_work_may_pass_control_back():
    def work():
        thread = threading.Thread(target=helper.give_back)  # as autograd's thread for a device does
        thread.start()
        thread.join()

    helper = helper_of(work)
    helper.resume()
    assert not helper.has_ended
    helper.resume()
    assert helper.has_ended


def test_an_error_of_the_helper_is_raised_in_the_ranks_thread():
    def work():
        helper.give_back()
        raise KeyError("of the helper")

    helper = helper_of(work)
    helper.resume()
    with pytest.raises(KeyError, match="of the helper"):
        helper.resume()
    helper.close()
    assert not has_helper()


def test_an_abandoned_helper_ends_at_the_place_where_it_passed_control_back():
    ends = []

    def work():
        try:
            helper.give_back()
        except AlternationEndedError:
            ends.append("first")
        try:
            helper.give_back()  # an error that was swallowed is raised again
        finally:
            ends.append("second")

    helper = helper_of(work)
    helper.resume()
    helper.close()
    assert ends == ["first", "second"]
    assert not has_helper()


def test_a_helper_that_never_ran_has_no_thread():
    helper = helper_of(lambda: pytest.fail("it never runs"))
    helper.close()
    assert not has_helper()


def test_the_thread_is_set_up_before_the_work():
    entered = []
    helper = helper_of(lambda: entered.append("work"), lambda: entered.append(threading.current_thread().name))
    helper.resume()
    assert entered == ["a helper", "work"]


@pytest.mark.needs_torch
def test_a_thread_computes_as_the_one_that_made_its_context():
    import torch

    from pipeproof.exec.rank.torch.arrays import as_this_thread

    def state():
        cast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        return torch.get_num_threads(), torch.is_grad_enabled(), cast

    found = []
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with torch.no_grad(), torch.autocast("cpu", torch.float16):
            expected = state()
            helper_of(lambda: found.append(state()), as_this_thread(torch.device("cpu"))).resume()
    finally:
        torch.set_num_threads(before)
    assert found == [expected]
