"""Outcomes of ``benchmarks/gpu/real_nccl.py`` for plans of four ranks: one over gloo, and verdicts on others."""

import argparse
import json
import subprocess
from pathlib import Path

import pytest

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check
from tests.exec.processes import REPOSITORY


@pytest.fixture
def real_nccl(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks" / "gpu"))
    import real_nccl

    return real_nccl


def checked(real_nccl, case):
    return check(plan_from_dict(real_nccl.plan_of(case, "torch", "gpu")))


@pytest.mark.slow
def test_what_is_expected_is_what_check_says(real_nccl):
    for case in real_nccl.cases("all"):
        codes = {finding.code for finding in checked(real_nccl, case).errors}
        assert codes == {"right": set(), "corrupt": {"PP201"}, "hang": {"PP401"}}[case.expects], case.name
        assert checked(real_nccl, case).subject.unfolded().graph.num_ranks == 4


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_two_ranks_really_hold_what_fleet_gave_them(real_nccl, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    (case,) = (one for one in real_nccl.cases("rehearse") if one.name == "golden")
    outcome = real_nccl.carry_out(case, argparse.Namespace(backend="paddle", device="cpu"))
    assert outcome.as_expected, outcome.detail
    assert outcome.fact == "both receivers hold [10, 20, 30, 40, 130, 140, 150, 160]"


def answers(monkeypatch, real_nccl, predicted, status, output, report=None):
    """Commands that say this."""

    def answer(*arguments):
        if arguments[0] == "check":
            return subprocess.CompletedProcess(arguments, 1, json.dumps(predicted), "")
        if report is not None:
            Path(arguments[arguments.index("--report") + 1]).write_text(json.dumps(report))
        return subprocess.CompletedProcess(arguments, status, output, "")

    monkeypatch.setattr(real_nccl, "_pipeproof", answer)


def outcome_of(real_nccl, name):
    (case,) = (one for one in real_nccl.cases("rehearse") if one.name == name)
    return real_nccl.carry_out(case, argparse.Namespace(backend="torch", device="gpu"))


@pytest.mark.parametrize("shift", [0, 1])
def test_ranges_that_differ_by_one_element_are_not_what_was_predicted(monkeypatch, real_nccl, shift):
    def finding(code, stop):
        one = {"rank": 2, "start": 4, "stop": stop, "source_rank": 0}
        return {"code": code, "message": "boundary 0->1, forward: x", "witness": {"lost": [one], "foreign": [one]}}

    predicted = {"findings": [finding("PP201", 8)]}
    answers(monkeypatch, real_nccl, predicted, 1, "", {"findings": [finding("PP915", 8 + shift)]})
    outcome = outcome_of(real_nccl, "pp2 tp2 sp partial")
    assert outcome.as_expected is (shift == 0)
    assert ("NOT" in outcome.fact) is (shift == 1)


@pytest.mark.parametrize(
    ("status", "output", "as_expected"),
    [
        (3, "error[PP903]: rank 2 (pp 2) hangs: no rank has made progress; it is at WAIT(2RECV_B0) of step 0; x", True),
        (3, "error[PP903]: rank 0 (pp 0) hangs: no rank has made progress; it is at 0F7 of step 0; x", False),
        (0, "right", False),
    ],
)
def test_a_hang_counts_where_it_is_in_the_predicted_cycle(monkeypatch, real_nccl, status, output, as_expected):
    predicted = {"findings": [{"code": "PP401", "witness": {"ops": ["WAIT(2RECV_B0)", "WAIT(3RECV_F1)"]}}]}
    answers(monkeypatch, real_nccl, predicted, status, output)
    assert outcome_of(real_nccl, "stuck").as_expected is as_expected


def test_a_plan_that_fails_is_otherwise_than_expected(monkeypatch, real_nccl):
    answers(monkeypatch, real_nccl, {"findings": [], "certified": True}, 3, "error[PP902]: rank 1 was killed")
    outcome = outcome_of(real_nccl, "1f1b pp4")
    assert not outcome.as_expected
    assert "status 3: error[PP902]: rank 1 was killed" in outcome.fact
