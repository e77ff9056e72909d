"""Buffers: each mutant is killed by exactly its rule with all rules on, and the correct program near it passes."""

import pytest

from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.subject import program_subject

SENDER = "0F0 0SEND_F0{peer=1} WAIT(0SEND_F0) 0F1 0SEND_F1{peer=1} WAIT(0SEND_F1)"
TAKER = "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1RECV_F1{peer=0} WAIT(1RECV_F1) 1F1"


def text_of(*ranks, groups=()):
    return "\n".join([*(f"group {g}" for g in groups), *(f"rank {i}: {text}" for i, text in enumerate(ranks))])


def findings(text):
    return [finding for finding in check_subject(program_subject(text)).findings if finding.severity == "error"]


def codes(text):
    return {finding.code for finding in findings(text)}


CASES = {
    "a receive into the buffer that is being sent on": (
        {"PP501"},
        text_of("0F0 0SEND_F0{peer=1} WAIT(0SEND_F0) 0F1 0SEND_F1{peer=1} WAIT(0SEND_F1)",
                "1RECV_F0{peer=0 writes=x} WAIT(1RECV_F0) 1F0{reads=x writes=x} 1SEND_F0{peer=2 reads=x} "
                "1RECV_F1{peer=0 writes=x} WAIT(1SEND_F0) WAIT(1RECV_F1) 1F1{reads=x writes=x} "
                "1SEND_F1{peer=2 reads=x} WAIT(1SEND_F1)",
                "2RECV_F0{peer=1} WAIT(2RECV_F0) 2F0 2RECV_F1{peer=1} WAIT(2RECV_F1) 2F1"),
        text_of("0F0 0SEND_F0{peer=1} WAIT(0SEND_F0) 0F1 0SEND_F1{peer=1} WAIT(0SEND_F1)",
                "1RECV_F0{peer=0 writes=x} WAIT(1RECV_F0) 1F0{reads=x writes=x} 1SEND_F0{peer=2 reads=x} "
                "WAIT(1SEND_F0) 1RECV_F1{peer=0 writes=x} WAIT(1RECV_F1) 1F1{reads=x writes=x} "
                "1SEND_F1{peer=2 reads=x} WAIT(1SEND_F1)",
                "2RECV_F0{peer=1} WAIT(2RECV_F0) 2F0 2RECV_F1{peer=1} WAIT(2RECV_F1) 2F1"),
    ),
    "a tensor is used before the wait for its receive": (
        {"PP502"},
        text_of(SENDER, "1RECV_F0{peer=0} 1F0 WAIT(1RECV_F0) 1RECV_F1{peer=0} WAIT(1RECV_F1) 1F1"),
        text_of(SENDER, TAKER),
    ),
    "double buffering with both receives under way": (
        {"PP502", "PP510"},  # one buffer too early, and the other one with the wrong micro-batch
        text_of(SENDER, "1RECV_F0{peer=0 writes=r[0]} 1RECV_F1{peer=0 writes=r[1]} WAIT(1RECV_F0) "
                "1F0{reads=r[1]} WAIT(1RECV_F1) 1F1{reads=r[0]}"),
        text_of(SENDER, "1RECV_F0{peer=0 writes=r[0]} 1RECV_F1{peer=0 writes=r[1]} WAIT(1RECV_F0) "
                "1F0{reads=r[0]} WAIT(1RECV_F1) 1F1{reads=r[1]}"),
    ),
    "I10, a tensor that the backward captured is freed": (
        {"PP503"}, text_of("0F0 FREE(0F0) 0B0"), text_of("0F0 0B0 FREE(0F0)"),
    ),
    "the same memory is freed twice": (
        {"PP503"}, text_of("0F0{writes=x} FREE(0F0) FREE(0F0)"), text_of("0F0{writes=x} FREE(0F0)"),
    ),
    "I3, freed on one queue while another reads (no record_stream)": (
        {"PP503"},
        text_of("0F0 0B0{writes=g} WAIT(0B0){queue=c} 0REDUCE_SCATTER:dp{queue=c reads=g group=0} 0STEP{frees=g} "
                "WAIT(0REDUCE_SCATTER:dp)", groups=["dp: 0"]),
        text_of("0F0 0B0{writes=g} WAIT(0B0){queue=c} 0REDUCE_SCATTER:dp{queue=c reads=g group=0} "
                "WAIT(0REDUCE_SCATTER:dp) 0STEP{frees=g}", groups=["dp: 0"]),
    ),
    "resharded weights are used": (
        {"PP503"}, text_of("0UNSHARD 0F0 0RESHARD 0B0"), text_of("0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD"),
    ),
    "an output is sent before it is computed": (
        {"PP506"},
        text_of("0SEND_F0{peer=1} WAIT(0SEND_F0) 0F0", "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"),
        text_of("0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)", "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"),
    ),
    "a stage computes before its receive is posted": (
        {"PP506"},
        text_of("0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)", "1F0 1RECV_F0{peer=0} WAIT(1RECV_F0)"),
        text_of("0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)", "1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0"),
    ),
    "I3, no wait in the other direction": (
        {"PP507"},
        text_of("0F0 0F1 0B0{writes=g} WAIT(0B0){queue=c} 0ALL_REDUCE0:dp{queue=c reads=g group=0} 0B1{writes=g} "
                "WAIT(0B1){queue=c} 0ALL_REDUCE1:dp{queue=c reads=g group=0} WAIT(0ALL_REDUCE1:dp)",
                groups=["dp: 0"]),
        text_of("0F0 0F1 0B0{writes=g} WAIT(0B0){queue=c} 0ALL_REDUCE0:dp{queue=c reads=g group=0} "
                "WAIT(0ALL_REDUCE0:dp) 0B1{writes=g} WAIT(0B1){queue=c} 0ALL_REDUCE1:dp{queue=c reads=g group=0} "
                "WAIT(0ALL_REDUCE1:dp)", groups=["dp: 0"]),
    ),
    "members of one batch write one buffer": (
        {"PP507"}, text_of("0F0{batch=0 writes=x} 0F1{batch=0 writes=x}"), text_of("0F0{writes=x} 0F1{writes=x}"),
    ),
    "I12, the buffer of a receive is the activation of the step before": (
        {"PP508"},
        text_of("0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)",
                "1RECV_F0{peer=0 writes=r} WAIT(1RECV_F0) 1F0 WAIT(1F0){queue=w} "
                "1ALL_REDUCE:dp{queue=w reads=r group=0}", groups=["dp: 1"]),
        text_of("0F0 0SEND_F0{peer=1} WAIT(0SEND_F0)",
                "1RECV_F0{peer=0 writes=r} WAIT(1RECV_F0) 1F0 WAIT(1F0){queue=w} "
                "1ALL_REDUCE:dp{queue=w reads=r group=0} WAIT(1ALL_REDUCE:dp)", groups=["dp: 1"]),
    ),
}  # fmt: skip
"""Mistake, its codes, the program, and a correct program close to it."""


@pytest.mark.parametrize("name", CASES)
def test_a_mutant_is_killed_by_exactly_its_rule(name):
    expected, wrong, _ = CASES[name]
    assert codes(wrong) == expected


@pytest.mark.parametrize("name", CASES)
def test_the_correct_program_near_it_passes(name):
    _, _, right = CASES[name]
    assert codes(right) == set()
