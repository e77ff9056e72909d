"""The assertions: plans that pass, and the messages on plans that do not."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeproof.testing
from pipeproof.specs.axis_layout import parse_placement
from pipeproof.specs.load_plan import load_plan
from pipeproof.testing import assert_plan_sound
from pipeproof.verify.check_plan import CHECK_CODES
from tests.plans import plan_dict
from tests.testing.strategies import layouts, schedules, topologies

pytestmark = pytest.mark.usefixtures("known_notes")

LOSSY = plan_dict(topology={"tp": 2, "sequence_parallel": True}, transport="partial")


# --- plans ---


def test_a_proved_plan_gives_its_report_whatever_it_is_read_from(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text('{"pipeproof": 1, "model": {"kind": "gpt", "num_layers": 2, "hidden_size": 8, "num_heads": 2, '
                    '"ffn_size": 8, "vocab_size": 8, "seq_length": 4}, "topology": {"pp": 2}, '
                    '"schedule": {"kind": "1f1b", "num_micro_batches": 2, "micro_batch_size": 1}}')  # fmt: skip
    reports = [assert_plan_sound(plan) for plan in (path, str(path), load_plan(path))]
    assert len({report.certificate.graph_digest for report in reports}) == 1
    assert assert_plan_sound(plan_dict()).errors == ()


def test_a_refused_plan_fails_with_what_check_prints(tmp_path):
    with pytest.raises(AssertionError) as caught:
        assert_plan_sound(LOSSY)
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(LOSSY))
    done = subprocess.run([sys.executable, "-m", "pipeproof", "check", str(path)], capture_output=True, text=True)
    assert done.returncode == 1
    last = str(caught.value).splitlines()[-2:]
    assert last == done.stdout.rstrip().splitlines()[-2:]  # the verdict and the digest
    assert "error[PP201]: boundary 0->1, forward" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_what_is_allowed_does_not_fail_and_strict_means_warnings():
    assert {finding.code for finding in assert_plan_sound(LOSSY, allow={"PP201"}).errors} == {"PP201"}
    noted = plan_dict()
    assert [finding.code for finding in assert_plan_sound(noted, strict=True).findings] == ["PP411"]
    programs = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]  # a deadlock: memory is not known
    schedule = {"kind": "custom", "num_micro_batches": 2, "programs": programs}
    warned = plan_dict(schedule=schedule, memory={"budget_gib": 1})
    errors = {finding.code for finding in assert_plan_sound(warned, allow=CHECK_CODES).errors}
    assert_plan_sound(warned, allow=errors)
    with pytest.raises(AssertionError, match=r"PP702"):
        assert_plan_sound(warned, allow=errors, strict=True)
    assert_plan_sound(warned, strict=True, allow=[*errors, "PP702"])
    with pytest.raises(ValueError, match="no code PP999"):
        assert_plan_sound(noted, allow=["PP999"])


def test_a_plan_that_cannot_be_loaded_fails_with_its_findings(tmp_path):
    with pytest.raises(AssertionError, match=r"error\[PP1\d\d\]: .*missing.yaml"):
        assert_plan_sound(tmp_path / "missing.yaml")
    broken = tmp_path / "plan.yaml"
    broken.write_text("pipeproof: 1\nmodle: {}\n")
    with pytest.raises(AssertionError, match=r"plan.yaml:2:1(.|\n)*modle"):
        assert_plan_sound(broken)


@pytest.mark.slow
@pytest.mark.needs("hypothesis")
def test_the_example_project_passes(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "your_own_tests"
    copy = shutil.copytree(example, tmp_path / "project", ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n0", "-v"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_every_plan_is_proved[pretrain.yaml] PASSED" in done.stdout
    assert "13 passed" in done.stdout


# --- gradients ---


# --- strategies ---


@settings(max_examples=50)
@given(st.data())
def test_parts_that_are_drawn_are_what_was_asked_for(data):
    topology = data.draw(topologies(max_ranks=6, axes=("pp", "dp"), min_pp=2))
    assert 2 <= topology["pp"] <= 4
    assert topology["pp"] * topology["dp"] <= 6
    assert topology["tp"] == topology["cp"] == topology["ep"] == 1
    schedule = data.draw(schedules(topology["pp"], kinds=["interleaved"]))
    assert (schedule["kind"], schedule["num_chunks"] >= 2) == ("interleaved", True)
    assert parse_placement(data.draw(layouts(kinds=["partial"]))) == parse_placement("partial")


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (topologies(axes=("mp",)), "no topology has axes"),
        (topologies(max_ranks=2, min_pp=3), "no topology has axes"),
        (schedules(2, kinds=["pipedream"]), "no schedule is called pipedream"),
    ],
)
def test_strategies_refuse_what_there_is_not(strategy, message):
    @given(strategy)
    def draw(one):
        raise AssertionError(one)

    with pytest.raises(ValueError, match=message):
        draw()


# --- the public surface ---


def test_every_public_name_is_there_and_comes_from_its_home():
    for name in pipeproof.testing.__all__:
        assert getattr(pipeproof.testing, name) is not None
    assert set(pipeproof.testing._HOMES) == set(pipeproof.testing.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        pipeproof.testing.nonsense  # noqa: B018 - the access is the test
