"""Locations of findings on a program's text, and the queues by which a plan is checked."""

import pytest

from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.subject import program_subject
from tests.plans import subject


def places(text):
    """(code, line, column) of the findings on a program; without a place, the code alone."""
    found = check_subject(program_subject(text)).findings
    return [(f.code, f.location.line, f.location.column) if f.location else (f.code,) for f in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank 0: 0F0 0B0 0B0", ("PP122", 1, 13)),  # the first of two
        (
            "rank 0: 0F0 0SEND_F0{peer=1} 0F1 WAIT(0SEND_F0)\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1F1",
            ("PP125", 2, 45),  # the two transfers are missing: where the tensor is used
        ),
        ("rank 0: 0F0 0F1 0B0", ("PP121",)),  # all that it is about is missing
    ],
)
def test_a_finding_is_where_the_first_row_of_its_witness_does(text, expected):
    assert expected in places(text)


def test_a_rank_that_does_nothing_is_no_reason_to_refuse_a_program():
    one = program_subject("rank 0:\nrank 1: 0F0 0B0")
    assert one.graph.num_ranks == 2
    assert check_subject(one).errors == ()


def test_a_plan_that_declares_the_queues_of_its_backend_is_checked_by_that_backend():
    own = subject().backend
    assert subject(transport={"queue": own.queue}).backend == own
    other = next(queue for queue in ("rank", "directed_edge", "device") if queue != own.queue)
    declared = subject(transport={"queue": other}).backend
    assert declared.queue == other
    assert declared.name == f"{own.name} with one FIFO per {other.replace('_', ' ')}"
