"""Helpers of the tests of V-Min and V-Half: their sizes, and the shortest makespan of any order in their memory."""

from fractions import Fraction

from hypothesis import strategies as st

from pipeproof.schedule.generators.v_half import v_half
from pipeproof.schedule.generators.v_min import v_min
from tests.schedule.zero_bubble import run

KINDS = {"v_min": (v_min, lambda p: (p + 4) // 3), "v_half": (v_half, lambda p: p // 2 + 1)}
"""The generator, and the micro-batches whose activations a rank has memory for, by the number of ranks."""
kinds = st.sampled_from(sorted(KINDS))


def shortest(p, m, num_held, tf=1, ti=1, tw=1, latency=0):
    """No order of stages in a V whose ranks hold 2 num_held chunk activations at most can end before.

    Rank p - 1 has F alone to run before its first I, and not more than memory
    takes; behind its last F there is a chain through all ranks.
    """
    held = 2 * min(m, num_held)
    before_first_i = 2 * p * tf + (p - 1) * ti + 3 * (p - 1) * latency
    behind_last_f = (p - 1) * tf + 2 * p * ti + tw + 3 * (p - 1) * latency
    if m > num_held:
        idle_at_the_end = max(0, behind_last_f - held * (ti + tw))
        return 2 * m * (tf + ti + tw) + before_first_i - held * tf + idle_at_the_end
    return max(before_first_i + held * (ti + tw), (p - 1) * (tf + latency) + held * tf + behind_last_f)


def time_of_one_more(schedule_of, p, even, latency=0):
    """The time that each further micro-batch adds to the makespan, once there are many."""
    few, many = 6 * p, 12 * p
    added = run(schedule_of(p, many), *even, latency).makespan - run(schedule_of(p, few), *even, latency).makespan
    return Fraction(added) / (many - few)
