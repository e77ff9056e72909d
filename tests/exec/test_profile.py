"""Profiles: figures of a log, the file and its schema, and real runs that write one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from pipeproof.cli.main import main
from pipeproof.exec.measure.profile_from_logs import measured_profile
from pipeproof.exec.rank.job_files import dump_plan
from pipeproof.exec.rank.op_log import HOST_QUEUE
from pipeproof.specs.load_plan import load_plan, plan_from_dict
from pipeproof.specs.profile_file import ProfileError, profile_json_schema, read_profile
from tests.exec.processes import Run
from tests.plans import plan_dict, subject
from tests.profiles import COST, DIGEST, bare_of, logs_of, plan_with_profile, profile_of, profile_text

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "profile.schema.json"


def changed(logs, rank, step, op, **times):
    """The logs with other times for one operation; times are added to its own."""
    found = 0
    for place, entry in enumerate(logs[rank]):
        if (entry.step, entry.op) == (step, op):
            logs[rank][place] = replace(entry, **{name: getattr(entry, name) + by for name, by in times.items()})
            found += 1
    assert found == 1


def profile_with(of, logs):
    return measured_profile(of, DIGEST, logs, bare_of(of), 1)


def op_of(profile, stage, kind):
    return next(op for op in profile.stages[stage].ops if op.kind == kind)


# --- from a log ---


def test_times_of_stages_leave_the_first_step_out():
    of = subject(cost=COST)
    logs = logs_of(of, num_steps=3)
    changed(logs, 0, 0, "0F0", end_ns=10**9)
    profile = profile_with(of, logs)
    assert (profile.steps.run, profile.steps.counted) == (3, 2)
    forward = op_of(profile, 0, "F").whole
    assert (forward.count, forward.q1_us, forward.median_us, forward.q3_us, forward.mean_us) == (8, 110, 110, 110, 110)
    assert op_of(profile, 1, "B").whole.median_us == 190
    assert {op.kind for op in profile.stages[0].ops} == {"F", "B", "STEP"}


def test_the_only_step_counts():
    of = subject(cost=COST)
    logs = logs_of(of, num_steps=1)
    changed(logs, 0, 0, "0F3", end_ns=-8000)
    profile = profile_with(of, logs)
    assert (profile.steps.run, profile.steps.counted) == (1, 1)
    assert op_of(profile, 0, "F").whole.mean_us == 108


def test_own_time_excludes_the_collectives_inside():
    of = subject(cost={"forward_us": 110}, topology={"pp": 1, "tp": 2})
    logs = logs_of(of, num_steps=2)
    children = [e.op for e in logs[0] if e.step == 1 and e.op.startswith("0F0/")]
    assert len(children) > 1
    whole, own = (op_of(profile_with(of, logs), 0, "F") for _ in range(2))
    for rank in (0, 1):
        for child in children[:2]:
            changed(logs, rank, 1, child, end_ns=3000)
    longer = op_of(profile_with(of, logs), 0, "F")
    assert longer.whole == whole.whole
    assert own.own.mean_us - longer.own.mean_us == pytest.approx(2 * 3.0 / 4, abs=0.001)  # one of four micro-batches


def test_a_message_counts_where_its_receiver_was_ready_first():
    of = subject(cost=COST)
    logs = logs_of(of, num_steps=2)
    (point,) = profile_with(of, logs).messages
    tensor = of.graph.tensors[0]
    assert (point.median_us, point.num_bytes) == (7, 4 * tensor.numel)
    count = point.count
    changed(logs, 1, 1, "1RECV_F0", posted_ns=10**6, start_ns=10**6)
    assert profile_with(of, logs).messages[0].count == count - 1


def test_a_message_begins_when_its_channel_is_free():
    of = subject(cost=COST)
    logs = logs_of(of, num_steps=2)
    before = profile_with(of, logs).messages[0]
    entries = {e.op: e for e in logs[0] if e.step == 1}
    gap = entries["0SEND_F1"].posted_ns - entries["0SEND_F0"].end_ns
    changed(logs, 0, 1, "0SEND_F1", posted_ns=-gap - 50_000)  # while the one before it is still under way
    after = profile_with(of, logs).messages[0]
    assert after.count in (before.count, before.count - 1)
    assert after.q3_us - before.q3_us < 50


def test_a_collective_lasts_from_the_arrival_of_its_last_member():
    of = subject(cost={"forward_us": 110}, topology={"pp": 1, "tp": 2})
    logs = logs_of(of, num_steps=2)
    child = next(e.op for e in logs[0] if e.step == 1 and e.op.startswith("0F0/0"))
    changed(logs, 0, 1, child, start_ns=-4000, end_ns=9000)
    changed(logs, 1, 1, child, end_ns=9000)
    kind = child.split(".")[1].split(":")[0]
    points = [p for p in profile_with(of, logs).collectives if p.kind == kind]
    assert sum(p.mean_us * p.count for p in points) == pytest.approx(18, abs=0.1)
    assert {p.axis_size for p in points} == {2}


def test_gathers_of_the_partial_transport_are_all_gathers():
    of = subject(cost=COST, topology={"pp": 2, "tp": 2}, transport="partial")
    (point,) = profile_of(of).collectives[:1]
    (gather,) = {
        int(of.graph.stop[i] - of.graph.start[i]) for i, op in enumerate(of.graph.ops) if op.kind == "GATHER_F"
    }
    assert (point.kind, point.num_bytes) == ("ALL_GATHER", 4 * gather)


def test_bare_messages_of_all_channels_are_counted_by_size():
    points = profile_of(subject(cost=COST)).bare_messages
    assert [(p.num_bytes, p.median_us, p.count) for p in points] == [(64, 5, 2), (4096, 9, 2)]


def test_the_host_is_measured_between_operations_and_after_waits():
    of = subject(cost=COST)
    logs = logs_of(of, num_steps=1)
    assert profile_with(of, logs).host.between_ops.q3_us == 0
    host = [e for e in logs[0] if e.queue == HOST_QUEUE]
    changed(logs, 0, 0, host[-1].op, start_ns=6000, end_ns=6000)
    gaps = profile_with(of, logs).host.between_ops
    assert gaps.mean_us * gaps.count == pytest.approx(6, abs=0.1)
    waits = [e.op for e in logs[1] if e.op == "WAIT(1RECV_F0)"]
    changed(logs, 1, 0, waits[0], end_ns=2000)
    delays = profile_with(of, logs).host.after_wait
    assert delays.mean_us * delays.count == pytest.approx(2, abs=0.1)


def test_the_profile_has_the_plan_without_defaults():
    of = subject(cost=COST, schedule={"num_micro_batches": 3})
    plan = profile_of(of).plan
    assert plan.model == plan_dict()["model"]
    assert plan.topology == {"pp": 2}
    assert (plan.schedule, plan.num_micro_batches, plan.digest) == ("1f1b", 3, DIGEST)
    assert plan.stages == of.plan.stages


# --- the file ---


def test_a_profile_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(profile_text())
    assert read_profile(path).to_json() == json.loads(path.read_text())


def test_the_published_schema_is_that_of_the_file():
    schema = json.loads(SCHEMA.read_text())
    assert schema == profile_json_schema()
    Draft202012Validator(schema).validate(json.loads(profile_text(topology={"tp": 2})))


def without(*path):
    content = json.loads(profile_text())
    at = content
    for part in path[:-1]:
        at = at[part]
    del at[path[-1]]
    return json.dumps(content)


def with_value(value, *path):
    content = json.loads(profile_text())
    at = content
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (profile_text()[:300], "PP161: not valid YAML"),
        ("", "PP161: a profile is a mapping of keys, found nothing"),
        ("[1]", "PP161: a profile is a mapping of keys, found a list of 1"),
        (json.dumps(plan_dict()), "PP161: `machine`: field required"),
        (without("stages", 1), "does not list stages 0 to 1"),
        (without("messages", 0, "bytes"), r"`messages\[0\].bytes`: field required"),
        (with_value(2, "profile"), "`profile`: input should be 1"),
        (with_value(-1, "messages", 0, "q1_us"), "greater than or equal to 0"),
        (with_value(99, "messages", 0, "q1_us"), "not in order"),
        (with_value("fast", "messages", 0, "median_us"), "valid number"),
        (with_value(True, "steps", "run"), "valid integer"),
        (with_value(64, "bare_messages", 1, "bytes"), "not in order of their sizes"),
        (with_value("B", "stages", 0, "ops", 0, "kind"), "stage 0 has an operation twice"),
    ],
)
def test_another_file_is_refused_with_the_location(tmp_path, text, said):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=said) as error:
        read_profile(path)
    assert all(finding.location.file == str(path) for finding in error.value.findings)


def test_of_much_that_is_wrong_a_part_is_shown(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"profile": 1, **dict.fromkeys("abcdef", 0)}))
    with pytest.raises(ProfileError, match=r"PP161: \d+ more problems of this kind") as error:
        read_profile(path)
    assert len(error.value.findings) == 6


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_profile_that_cannot_be_read_is_located_in_the_plan(tmp_path, name):
    plan = plan_with_profile(tmp_path, name)
    for command in ("check", "simulate", "tune", "run"):
        result = CliRunner().invoke(main, [command, str(plan)])
        assert result.exit_code == 2, result.output
        assert "error[PP160]: cannot read" in result.output
        assert f"--> {plan}:1:" in result.output
        assert "Traceback" not in result.output


def test_a_file_of_bytes_and_one_that_is_too_large(tmp_path, monkeypatch):
    path = tmp_path / "profile.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ProfileError, match="PP160: byte 0xff is not UTF-8"):
        read_profile(path)
    monkeypatch.setattr("pipeproof.specs.profile_file.MAX_BYTES", 10)
    path.write_text(profile_text())
    with pytest.raises(ProfileError, match="more than 10 bytes"):
        read_profile(path)


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        ({"profile": "p.json", "forward_us": 1}, "`cost.forward_us` is given together with `cost.profile`"),
        ({"profile": "p.json", "analytic": "h200"}, "`cost.profile` is given together with `cost.analytic`"),
        ({"profile": ""}, "at least 1 character"),
        ({"profile": 1}, "`cost.profile` must be a string"),
    ],
)
def test_a_profile_needs_no_other_file(cost, said, tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(plan_dict(cost=cost)))
    result = CliRunner().invoke(main, ["check", str(plan)])
    assert result.exit_code == 2
    assert said in result.output


# --- plans that name one ---


def test_a_profile_is_found_next_to_the_plan_from_any_directory(tmp_path, monkeypatch):
    plan = plan_with_profile(tmp_path, profile=profile_text())
    monkeypatch.chdir("/")
    given = json.loads(CliRunner().invoke(main, ["simulate", str(plan), "--format", "json"]).output)
    monkeypatch.chdir(tmp_path)
    assert json.loads(CliRunner().invoke(main, ["simulate", "plan.json", "--format", "json"]).output) == given
    dumped = dump_plan(load_plan("plan.json"))
    assert plan_from_dict(dumped).spec.cost.profile == str(tmp_path / "profile.json")


def test_tune_repartitions_measured_times(tmp_path):
    plan = plan_with_profile(tmp_path, profile=profile_text())
    result = CliRunner().invoke(main, ["tune", str(plan)])
    assert result.exit_code == 0, result.output
    assert "Every row has passed" in result.output


# --- real runs ---


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_a_run_writes_a_profile_that_its_plan_can_be_simulated_and_run_with(tmp_path):
    sections = {"topology": {"pp": 2, "tp": 2, "sequence_parallel": True}, "run": {"steps": 3}}
    files = {name: tmp_path / name for name in ("profile.json", "page.html")}
    ended = Run(
        tmp_path, plan_dict(**sections), "--profile", str(files["profile.json"]), "-o", str(files["page.html"])
    ).end()
    assert ended.status == 0, ended.output
    assert "profile of 2 of 3 steps" in ended.output
    assert f"timeline written to {files['page.html']}" in ended.output
    assert "measured" in files["page.html"].read_text()
    profile = read_profile(files["profile.json"])
    Draft202012Validator(json.loads(SCHEMA.read_text())).validate(profile.to_json())
    assert profile.machine.processes == 4
    forward = op_of(profile, 0, "F")
    assert forward.whole.count == 2 * 4 * 2  # ranks, micro-batches, steps
    assert 0 < forward.own.median_us < forward.whole.median_us
    assert {(p.kind, p.axis_size) for p in profile.collectives} == {
        ("ALL_GATHER", 2), ("ALL_REDUCE", 2), ("REDUCE_SCATTER", 2)
    }  # fmt: skip
    assert [p.num_bytes for p in profile.bare_messages] == [8, 512, 2**16, 2**20]
    assert all(p.median_us > 0 for p in (*profile.bare_messages, *profile.collectives))

    (tmp_path / "again").mkdir()
    text = files["profile.json"].read_text()
    plan = plan_with_profile(tmp_path / "again", profile=text, **sections)
    result = CliRunner().invoke(main, ["simulate", str(plan), "--format", "json"])
    assert result.exit_code == 0, result.output
    again = Run(tmp_path / "again", json.loads(plan.read_text())).end()
    assert again.status == 0, again.output
    assert "profile of" not in again.output
