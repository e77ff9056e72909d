"""First answers for a newcomer: the next step, schedules by name, and errors with a way out."""

import pytest

import pipeproof as pp
from tests.cli.commands import EXAMPLES, invoke, python
from tests.plans import plan_dict

ZB_V = EXAMPLES / "schedules" / "zbv_pp2.csv"


@pytest.mark.parametrize("name", ["gpt_pp4.yaml", "gpt_pp2_tp2_sp_partial.yaml", "schedules/two_by_two.txt"])
def test_the_last_line_of_a_check_says_what_comes_next(name):
    last = invoke("check", EXAMPLES / name).stdout.splitlines()[-1]
    assert last.startswith("next: ")
    for command in ("simulate", "run"):
        assert (f"`pipeproof {command} " in last) == (name == "gpt_pp4.yaml")
    assert ("PP201" in last) == ("partial" in name)


def test_a_schedule_file_is_compared_with_a_kind():
    result = invoke("compare", ZB_V, "zb_v")
    assert result.exit_code == 0
    assert "A and B take equally long" in result.stdout
    assert "less time than A" in invoke("compare", EXAMPLES / "gpt_pp4.yaml", "zb_h1").stdout


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_a_schedule_file_is_simulated_to_a_picture_and_a_page(tmp_path, suffix):
    path = tmp_path / f"zbv{suffix}"
    assert invoke("simulate", ZB_V, "-o", path).exit_code == 0
    assert path.stat().st_size > 1000


def test_a_finding_is_its_message_and_errors_of_plans_have_no_other_error_before_them(tmp_path):
    finding = pp.check(EXAMPLES / "gpt_pp2_tp2_sp_partial.yaml").errors[0]
    assert str(finding) == finding.message
    for plan in (tmp_path / "none.yaml", plan_dict(schedule={"kind": "interleaved"}), {"pipeproof": 1}):
        with pytest.raises(pp.BadPlanError) as refused:
            pp.check(plan)
        assert refused.value.__cause__ is None
        assert refused.value.__context__ is None or refused.value.__suppress_context__


@pytest.mark.parametrize(("module", "extra"), [("torch", "torch"), ("paddle", "cpu")])
def test_a_missing_framework_is_one_sentence_with_the_command(module, extra):
    code = f"import sys; sys.modules[{module!r}] = None\nimport pipeproof.{module}"
    done = python("-c", code)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: `pipeproof.{module}` needs P")
    assert f"[{extra}]" in last
    assert "During handling" not in done.stderr


def test_a_code_that_is_not_there_and_a_version_that_is_not_read():
    unknown = invoke("--explain", "PP999").stderr
    assert "did you mean PP9" in unknown
    assert len(unknown) < 300
    with pytest.raises(pp.BadPlanError) as refused:
        pp.plan_from_dict({**plan_dict(), "pipeproof": 2})
    (finding,) = refused.value.findings
    assert finding.message == "this release reads plans of version 1, found integer 2"
    assert finding.help == "write `pipeproof: 1`"


def test_an_undecided_check_ends_with_the_flags_that_decide():
    answer = invoke("check", EXAMPLES / "importing" / "strategy.prototxt")
    assert answer.stdout.splitlines()[-1] == (
        "next: give `--set topology.sequence_parallel=true` or `--set topology.sequence_parallel=false`, "
        "and check again"
    )
