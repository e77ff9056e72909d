"""Output of commands fits the published schemas."""

import json
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from pipeproof.analysis.align.record_format import Shard
from pipeproof.comm.accumulation_order import Accumulation
from pipeproof.diagnostics.finding import Finding, Severity
from pipeproof.diagnostics.text_output import finding_to_json
from pipeproof.exec.compare.compare_gradients import GradientResult, StepResult
from pipeproof.exec.launch.run_report import RunReport, measured_timeline
from pipeproof.exec.rank.op_log import LogEntry
from pipeproof.schedule.op_table import build_graph
from pipeproof.specs.load_plan import load_plan
from pipeproof.state.state_index import state_json_schema
from pipeproof.verify.certificate import graph_digest
from pipeproof.verify.check_plan import check_subject
from tests.cli.commands import invoke
from tests.plans import plan_dict, plan_file, subject

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "schemas"
SCHEMAS = {
    path.name.removesuffix(".schema.json"): json.loads(path.read_text()) for path in FOLDER.glob("*.schema.json")
}


def strict_json(text):
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def fits(name, content):
    return Draft202012Validator(SCHEMAS[name]).is_valid(content)


def require_fit(name, content):
    Draft202012Validator(SCHEMAS[name]).validate(content)


def test_all_commands_with_json_have_a_schema():
    assert set(SCHEMAS) == {
        "check", "compare", "simulate", "run", "profile", "doctor", "schedule", "sweep",
        "align", "record", "rehearse", "rehearsal_profile", "state", "reshard", "checkpoint",
        "aoa", "tune", "hang",
    }  # fmt: skip


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_the_schema_is_one_and_closed(name):
    """Every object lists its keys, and allows no others (mappings by name apart)."""
    Draft202012Validator.check_schema(SCHEMAS[name])

    def look(schema):
        if isinstance(schema, dict):
            if schema.get("type") == "object":
                closed = schema.get("additionalProperties")
                assert closed is False or isinstance(closed, dict)
                assert schema["required"] or "properties" not in schema
            for value in schema.values():
                look(value)
        elif isinstance(schema, list):
            for value in schema:
                look(value)

    look(SCHEMAS[name])


def test_findings_have_one_form():
    for part in ("finding", "location", "ranges_witness", "range", "cycle_witness", "ops_witness", "op"):
        assert SCHEMAS["check"]["$defs"][part] == SCHEMAS["run"]["$defs"][part]


# --- check ---


def check_json(path, *options):
    result = invoke("check", path, "--format", "json", *options)
    return result.exit_code, strict_json(result.stdout)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
def test_check_of_examples(example):
    status, content = check_json(example)
    require_fit("check", content)
    errors = [finding for finding in content["findings"] if finding["severity"] == "error"]
    assert (status == 1) == bool(errors)
    assert len(content["in_flight"]) == load_plan(example).spec.topology.num_ranks


def test_check_with_a_note(tmp_path):
    quiet = {"kind": "gpipe"}  # of 1f1b there is a warning
    plan = plan_file(tmp_path / "plan.json", schedule=quiet, transport="partial")  # tp 1: sends are full
    status, content = check_json(plan)
    require_fit("check", content)
    assert status == 0
    assert {finding["severity"] for finding in content["findings"]} == {"note"}


@pytest.mark.parametrize(
    "text", ["", "pipeproof: 1\nmodel: {", "pipeproof: 1\nmodle: {}\nmodle: {}\n", "\ttopology: 1", "[1, 2]"]
)
def test_check_of_bad_input(tmp_path, text):
    plan = tmp_path / "plan.yaml"
    plan.write_text(text)
    status, content = check_json(plan)
    require_fit("check", content)
    assert status == 2
    assert content["digest"] is None


def test_check_of_mutants_with_every_kind_of_witness():
    base = subject()
    rows = base.graph.rows()
    texts = [str(row.op) for row in rows[0]]
    first, second = texts.index("0SEND_F0"), texts.index("0SEND_F1")
    rows[0][first], rows[0][second] = rows[0][second], rows[0][first]
    swapped = base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))
    del rows[1][[str(row.op) for row in rows[1]].index("1RECV_F0")]
    missing = base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))
    kinds = set()
    for mutant in (swapped, missing, subject(topology={"tp": 2, "sequence_parallel": True}, transport="partial")):
        content = strict_json(json.dumps(check_subject(mutant).to_json()))
        require_fit("check", content)
        kinds |= {finding["witness"]["kind"] for finding in content["findings"] if finding["witness"]}
    assert kinds >= {"ranges", "ops"}


IN_FLIGHT = [{"rank": 0, "peak_activations": 1, "boundary_bytes": 8}]
CERTIFIED = {
    "digest": "0" * 64,
    "certified": True,
    "findings": [],
    "suppressed": [],
    "not_run": [],
    "in_flight": IN_FLIGHT,
}


def test_check_of_some_rules_and_with_suppressions(tmp_path):
    known = [{"code": "PP202", "reason": "known"}]
    plan = plan_file(tmp_path / "plan.json", schedule={"kind": "gpipe"}, transport="partial", suppress=known)
    status, content = check_json(plan)
    require_fit("check", content)
    assert (status, content["findings"], content["certified"]) == (0, [], True)
    assert {(entry["code"], entry["reason"]) for entry in content["suppressed"]} == {("PP202", "known")}
    status, content = check_json(plan, "--ignore", "4xx")
    require_fit("check", content)
    assert not content["certified"]
    assert {code[:3] for code in content["not_run"]} == {"PP4"}


def test_the_check_schema_refuses_what_is_not_so():
    good = CERTIFIED
    require_fit("check", good)
    error, note = (finding_to_json(Finding("PP401", severity, "m")) for severity in (Severity.ERROR, Severity.NOTE))
    suppressed = {**note, "reason": "known"}
    require_fit("check", {**good, "certified": False, "findings": [error], "suppressed": [suppressed]})
    bad_input = {"digest": None, "findings": [finding_to_json(Finding("PP100", Severity.ERROR, "m"))]}
    require_fit("check", bad_input)
    for content in (
        {**good, "digest": None},
        {**good, "digest": "0"},
        {**bad_input, "findings": []},
        {**bad_input, "in_flight": IN_FLIGHT},
        {key: good[key] for key in ("digest", "findings")},
        {**bad_input, "not_run": []},
        {**good, "findings": [error]},
        {**good, "not_run": ["PP401"]},
        {**good, "not_run": ["PP401", "PP401"], "certified": False},
        {**good, "suppressed": [note]},
        {**good, "suppressed": [{**suppressed, "severity": "error"}]},
        {**good, "suppressed": [{**suppressed, "reason": " "}]},
        {**good, "more": 1},
        {**good, "findings": [{**bad_input["findings"][0], "severity": "fatal"}]},
        {**good, "findings": [{**bad_input["findings"][0], "code": "P1"}]},
        {**good, "findings": [{**bad_input["findings"][0], "witness": {"kind": "other"}}]},
    ):
        assert not fits("check", content)


# --- run ---


def made_up_report(*, gradient=0.0, loss=5.5, log_findings=()):
    """A report of one step whose only gradient is off by ``gradient``, with a log of one operation per rank."""
    base = subject()
    result = GradientResult(
        step=0,
        stage=0,
        name="embed.weight",
        md5="0" * 32,
        reference_md5="0" * 32 if gradient == 0.0 else "1" * 32,
        max_rel_diff=gradient,
        unpartitioned_max_rel_diff=gradient,
        replicas_agree=True,
        shards=(Shard(0, "0" * 32, ((0, 32), (0, 16))),),
    )
    loss_value = np.float32(loss)
    step = StepResult(0, loss_value, np.float32(5.5), np.float32(5.5), (result,))
    logs = {0: [LogEntry(0, "compute", "0F0", 100, 1600)], 1: [LogEntry(0, "compute", "1F0", 2000, 2500)]}
    return RunReport(
        subject=base,
        digest=graph_digest(base),
        verified=True,
        steps=(step,),
        log_findings=log_findings,
        timeline=measured_timeline(base, logs),
        parallel_bound=0.0,
        threads=1,
        accumulation=Accumulation.IN_ORDER,
    )


def test_a_report_that_matches_fits():
    content = strict_json(json.dumps(made_up_report().to_json()))
    require_fit("run", content)
    assert content["passed"]
    assert content["findings"] == []
    assert [span["end_us"] for span in content["timeline"]] == [1.5, 2.4]


@pytest.mark.parametrize("distance", [0.25, float("inf"), float("nan")])
def test_a_report_that_does_not_match_fits(distance):
    content = strict_json(json.dumps(made_up_report(gradient=distance).to_json()))
    require_fit("run", content)
    assert not content["passed"]
    assert content["gradients"][0]["max_rel_diff"] == (0.25 if distance == 0.25 else None)
    assert "PP904" in {finding["code"] for finding in content["findings"]}


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_null(loss):
    content = strict_json(json.dumps(made_up_report(loss=loss).to_json()))
    require_fit("run", content)
    assert content["steps"][0]["loss"] is None
    assert content["steps"][0]["reference_loss"] == 5.5


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_the_report_of_a_real_run_fits(tmp_path):
    plan, report = tmp_path / "plan.json", tmp_path / "report.json"
    plan.write_text(json.dumps(plan_dict(schedule={"num_micro_batches": 2}, run={"steps": 2})))
    result = invoke("run", plan, "--report", report, "--timeout", "120")
    assert result.exit_code == 0, result.output
    content = strict_json(report.read_text())
    require_fit("run", content)
    assert content["passed"]
    assert [step["step"] for step in content["steps"]] == [0, 1]
    assert {span["rank"] for span in content["timeline"]} == {0, 1}


# --- doctor ---


def test_the_doctors_json_fits_without_a_backend(monkeypatch):
    from pipeproof.exec.measure import doctor
    from pipeproof.exec.measure.doctor import doctor_to_json

    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    content = strict_json(json.dumps(doctor_to_json(doctor.run_doctor())))
    require_fit("doctor", content)
    assert content["exit_status"] == 2
    assert content["rows"] == []
    assert not fits("doctor", {**content, "exit_status": 3})
    assert not fits("doctor", {**content, "problems": [""]})


def test_the_schema_of_a_states_index_is_the_models():
    assert SCHEMAS["state"] == state_json_schema()
