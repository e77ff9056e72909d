"""Mutants of the zoo on real Paddle processes: each has the symptom that its rule predicts.

The programs that run are those that the rules checked, row by row.
"""

import pytest

from pipeproof.exec.measure.doctor import backend_pair
from pipeproof.schedule.ops import parse_op
from tests.exec.processes import Run
from tests.plans import plan_dict
from tests.zoo.on_processes import NUMEL, STALE, RunProgram, value_of
from tests.zoo.table import CASES

pytestmark = pytest.mark.needs_paddle

PATIENCE_S = 20.0
"""Limit of a program that ends: a hundred times its duration on an idle machine."""
HANG_S = 3.0
"""Wait for a program that hangs; a right form on the same pair of processes ends before, in a hundredth of this
time."""

CASE = {case.id: case for case in CASES}
HANGING = ("B1", "B6", "C3")
WRONG = {
    "B10": {"1RECV_F0": [value_of(0, 1)] * NUMEL, "1RECV_F1": [value_of(0, 0)] * NUMEL},
    "C7": {"1RECV_F0": [value_of(0, 0)] * 6 + [STALE] * 2},
    "I13": {"1RECV_F0": [value_of(0, 1)] * NUMEL, "1RECV_F1": [value_of(0, 1)] * NUMEL},
}
"""Tensors that the mutants' receives bring: each other's tensors, a rest of old values, the later tensor twice."""
ABORTING = "C7.longer"
CORRUPT = "A1"


def test_what_the_table_says_was_seen_is_seen_here():
    assert {case.id for case in CASES if case.ran} == {*HANGING, *WRONG, ABORTING, CORRUPT}


def body(subject, late=None):
    """Body of both processes: the rows of their ranks."""
    return RunProgram(tuple(map(tuple, subject.graph.rows())), late)


def received(outcomes):
    """Tensors that the receives of both ranks brought."""
    assert [outcome.kind for outcome in outcomes] == ["returned", "returned"]
    return {op: values for outcome in outcomes for op, values in outcome.value.items()}


def is_right(outcomes):
    """Return True if every receive brought the tensor of its name (neighbouring stage, own micro-batch)."""
    arrived = received(outcomes)
    return bool(arrived) and all(
        set(values) == {value_of(op.stage - 1 if op.is_forward else op.stage + 1, op.micro_batch)}
        for op, values in ((parse_op(text), values) for text, values in arrived.items())
    )


@pytest.mark.slow(but=["B1"])
@pytest.mark.parametrize("name", HANGING)
def test_a_deadlock_hangs_both_processes(name):
    case = CASE[name]
    assert "PP401" in case.kills
    with backend_pair("paddle") as pair:
        assert is_right(pair.run(body(case.correct()), PATIENCE_S))
        assert [outcome.kind for outcome in pair.run(body(case.mutant()), HANG_S)] == ["blocked", "blocked"]


def test_wrong_values_arrive_and_nothing_complains():
    with backend_pair("paddle") as pair:
        for name in WRONG:
            case = CASE[name]
            late = 1 if name == "I13" else None  # the buffer is then written before it is taken
            assert is_right(pair.run(body(case.correct(), late), PATIENCE_S))
            wrong = received(pair.run(body(case.mutant(), late), PATIENCE_S))
            assert wrong == WRONG[name], name


@pytest.mark.slow
def test_a_message_that_is_too_long_aborts_its_receiver():
    case = CASE[ABORTING]
    with backend_pair("paddle") as pair:
        assert is_right(pair.run(body(case.correct()), PATIENCE_S))
        _, receiver = pair.run(body(case.mutant()), HANG_S)
        assert (receiver.kind, receiver.detail) == ("died", "SIGABRT")


@pytest.mark.slow
def test_partial_transport_under_sequence_parallelism_trains_on_other_values(tmp_path):
    corrupt = plan_dict(topology={"pp": 2, "tp": 2, "sequence_parallel": True}, transport="partial", run={"steps": 1})
    ended = Run(tmp_path, corrupt, "--unsafe").end()
    assert ended.status == 1, ended.output
    assert "error[PP201]" in ended.output
    (step,) = ended.report["steps"]
    assert step["loss"] != step["reference_loss"]
    assert ended.report["log_matches_graph"]
