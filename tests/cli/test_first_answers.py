"""What a newcomer meets first: what comes next, schedules by name, and errors that say what to do."""

import pytest

import pipeproof as pp
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from pipeproof.specs.pipeline_checks import TWO_CHUNKS
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


def test_the_number_of_chunks_follows_from_a_kind_that_has_one():
    assert set(TWO_CHUNKS) == {k.name for k in SCHEDULE_KINDS.values() if k.min_chunks == k.max_chunks == 2}
    for kind in TWO_CHUNKS:
        assert pp.plan_from_dict(plan_dict(schedule={"kind": kind})).spec.schedule.num_chunks == 2


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


def test_a_schedule_by_its_kind_has_a_picture_and_a_table(tmp_path):
    result = pp.make_schedule("zb_v", 4, 8)
    assert repr(result).startswith("<simulate: zb_v, 4 ranks, 51 us")
    assert "data:image/svg+xml" in result._repr_html_()
    assert [row["busy_us"] for row in result.to_records()] == [48.0] * 4
    assert result.save(tmp_path / "a.svg").stat().st_size > 1000
    with pytest.raises(pp.PlanFileError, match=r"`schedule\.kind` must be"):
        pp.make_schedule("no_such_kind", 4, 8)


def test_a_finding_is_its_message_and_errors_of_plans_have_no_other_error_before_them(tmp_path):
    finding = pp.check(EXAMPLES / "gpt_pp2_tp2_sp_partial.yaml").errors[0]
    assert str(finding) == finding.message
    for plan in (tmp_path / "none.yaml", plan_dict(schedule={"kind": "interleaved"}), {"pipeproof": 1}):
        with pytest.raises(pp.BadPlanError) as refused:
            pp.check(plan)
        assert refused.value.__cause__ is None
        assert refused.value.__context__ is None or refused.value.__suppress_context__


def test_importers_and_hang_are_public():
    assert pp.hang(EXAMPLES / "importing" / "dumps").causes == (0, 1)
    from pipeproof.interop import Flags

    assert pp.import_files("schedule", [ZB_V], Flags()).plan["topology"] == {"pp": 2}


@pytest.mark.parametrize(("module", "extra"), [("torch", "torch"), ("paddle", "cpu")])
def test_a_missing_framework_is_one_sentence_with_the_command(module, extra):
    code = f"import sys; sys.modules[{module!r}] = None\nimport pipeproof.{module}"
    done = python("-c", code)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: `pipeproof.{module}` needs P")
    assert f"[{extra}]" in last
    assert "During handling" not in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("check", "--nonsense"), ("chek",), ("tune", "llama3_8b", "--gpus", "8"), ("simulate",), ("--explain", "PP999"),
        ("schedule", "show", "1f1b"), ("compare", "a", "b", "-o", "c.gif"), ("check", "none.yaml"),
    ],
)  # fmt: skip
def test_errors_have_one_form(words):
    result = invoke(*words)
    assert result.exit_code == 2
    first, *rest = result.stderr.splitlines()
    assert first.startswith(("error: ", "error[PP"))
    assert any(line.startswith("  = help: ") for line in rest) or "--help` lists" in first


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


def test_the_picture_of_a_plan_has_its_unit():
    answer = invoke("schedule", "show", EXAMPLES / "gpt_pp4.yaml", "--as", "svg")
    assert "makespan 3.3 ms, axis in us</title>" in answer.stdout
