"""Waiting for a condition."""

from pipeproof.exec.store.rendezvous import wait_until


def test_a_condition_is_read_until_it_holds():
    reads = iter([False, False, True])
    assert wait_until(lambda: next(reads))
    assert not [*reads]


def test_a_condition_is_read_once_even_when_the_time_is_up():
    reads = [False, True]
    assert not wait_until(lambda: reads.pop(0), -1.0)
    assert wait_until(lambda: reads.pop(0), -1.0)
