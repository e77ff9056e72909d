"""Advice about when receives are posted: what it saves or costs, and which deadlocks it lets in or keeps out."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from pipeproof.analysis.advise import candidates
from pipeproof.analysis.advise.receive_timing import other_posts
from pipeproof.analysis.advise.search import advise
from pipeproof.comm.lower import lower
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check
from pipeproof.verify.deadlock.deadlock_verdict import conditions
from tests.advise.plans import four_ranks
from tests.cli.commands import invoke

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "advise.schema.json").read_text())


def plan(recv_order="just_in_time", slowdown=None, **schedule):
    cost = {} if slowdown is None else {"recv_slowdown": slowdown}
    return {**four_ranks(cost=cost, **schedule), "transport": {"recv_order": recv_order}}


def found(data):
    loaded = plan_from_dict(data)
    report = check(loaded)
    return other_posts(loaded, report, simulate(report.subject.plan).makespan)


def makespan(data):
    return simulate(lower(plan_from_dict(data).spec)).makespan


def test_an_early_plan_that_pays_for_it_is_told_what_just_in_time_saves_and_lets_in():
    (other,) = found(plan("prefetch_one", 0.1))
    assert other.recv_order == "just_in_time"
    assert other.makespan_us == makespan(plan()) == 33 < makespan(plan("prefetch_one", 0.1))
    assert other.failing == conditions(check(plan_from_dict(plan())).subject) != ()


def test_an_early_plan_that_pays_nothing_is_told_nothing():
    assert found(plan("prefetch_one")) == ()
    assert found(plan("prefetch_one", 0)) == ()


@pytest.mark.parametrize("slowdown", [None, "1/2"])
def test_a_conditional_plan_is_told_what_makes_it_robust_and_costs(slowdown):
    (other,) = found(plan(slowdown=slowdown))
    assert (other.recv_order, other.failing) == ("prefetch_one", ())
    assert other.makespan_us == makespan(plan("prefetch_one", slowdown))
    assert (other.makespan_us > 33) == (slowdown is not None)


def test_what_one_ahead_leaves_conditional_is_posted_as_sent():
    (other,) = found(plan(kind="eager_1f1b"))
    assert (other.recv_order, other.failing) == ("send_order", ())


def test_a_robust_plan_is_told_nothing():
    assert found(plan(kind="gpipe")) == ()


def test_both_may_be_said_of_one_plan():
    """It pays for receives that are early, and not early enough to be robust."""
    both = found(plan("prefetch_one", 0.1, kind="eager_1f1b"))
    assert [other.recv_order for other in both] == ["just_in_time", "send_order"]


def test_times_of_candidates_count_what_receives_slow_down(monkeypatch):
    monkeypatch.setattr(candidates, "SCHEDULE_KINDS", {"zb_h1": candidates.SCHEDULE_KINDS["zb_h1"]})
    advice = advise(plan_from_dict(plan("send_order", "1/2")))
    assert advice.present.makespan_us == makespan(plan("send_order", "1/2"))
    listed = [verified for group in advice.listed.values() for verified in group]
    assert listed
    for verified in listed:
        spec = verified.candidate.spec
        assert spec.transport.recv_order == "send_order"
        assert verified.candidate.figures.makespan_us == simulate(lower(spec)).makespan
        assert verified.failing == ()


FILE = "rank 0: 0F0 0SEND_F0 0RECV_B0 WAIT(0RECV_B0) WAIT(0SEND_F0) 0B0\n"
FILE += "rank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0 1B0 1SEND_B0 WAIT(1SEND_B0)\n"


def test_receives_of_a_file_stay_where_they_are(tmp_path):
    data = plan()
    (tmp_path / "steps.txt").write_text(FILE)
    data["topology"]["pp"] = 2
    data["schedule"] = {"kind": "file", "path": "steps.txt", "num_micro_batches": 1, "micro_batch_size": 1}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(data))
    assert invoke("advise", tmp_path / "plan.yaml").exit_code == 0


def test_the_command_says_it_in_text_and_json(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan("prefetch_one", 0.1)))
    text = invoke("advise", path, "--top", "1").stdout
    early = makespan(plan("prefetch_one", 0.1))
    assert "With transport.recv_order: just_in_time the step takes 33 us, " in text
    assert "it is then conditional: safe on paddle-gloo, a deadlock with " in text
    content = json.loads(invoke("advise", path, "--top", "1", "--format", "json").stdout)
    Draft202012Validator(SCHEMA).validate(content)
    (other,) = content["receives"]
    assert other["set"] == [{"key": "transport.recv_order", "value": "just_in_time"}]
    assert Fraction(other.get("saved_exact", other["saved"])) == early - 33
    assert (other["deadlock"], other["why"] in text) == ("conditional", True)


def test_without_a_slowdown_the_text_does_not_promise_that_early_costs_nothing(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan()))
    text = invoke("advise", path, "--top", "1").stdout
    assert (
        "With transport.recv_order: prefetch_one the step takes as long, and is robust: no channel model makes" in text
    )
    assert "What receives that are under way cost your device is not known here (cost.recv_slowdown)." in text


def test_a_sentence_for_a_robust_plan_that_takes_longer(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plan(slowdown="1/2")))
    text = invoke("advise", path, "--top", "1").stdout
    assert "With transport.recv_order: prefetch_one the step takes " in text
    assert " us more (" in text
