"""Traces of profilers become the times that they were made from, or are refused (PP163, PP164)."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.cli.main import main
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.interop.profiles.profile_from_traces import profile_of_files
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.profile_file import read_profile
from tests.cli.commands import invoke
from tests.interop.profiles.simulated_traces import (
    events_of,
    host_traces,
    kineto_of,
    write_kineto,
)
from tests.plans import plan_dict, plan_file, subject

COST = {"forward_us": [120, 90], "backward_us": [200, 310], "p2p_latency_us": 7, "p2p": "rendezvous"}


def profile_of(files, message_us=None, **sections):
    return profile_of_files(files, plan_from_dict(plan_dict(**sections)), message_us)


def medians(profile):
    return {(s.stage, op.kind): op.whole.median_us for s in profile.stages for op in s.ops}


def refused(files, code="PP164", message_us=None, **sections):
    with pytest.raises(BadPlanError) as error:
        profile_of(files, message_us, **sections)
    (finding,) = error.value.findings
    assert finding.code == code
    assert finding.help
    return finding.message


# --- exact times ---

SCHEDULES = (
    {"kind": "1f1b"},
    {"kind": "gpipe"},
    {"kind": "zb_h1"},
    {"kind": "interleaved", "num_chunks": 2},
)


@st.composite
def timed_plans(draw):
    """A plan with drawn times for each stage; a schedule with split backwards has times of both parts."""
    schedule = draw(st.sampled_from(SCHEDULES))
    pp = draw(st.integers(2, 3))
    stages = pp * schedule.get("num_chunks", 1)
    times = st.lists(st.integers(1, 5000), min_size=stages, max_size=stages)
    cost = {"forward_us": draw(times), "p2p_latency_us": draw(st.integers(1, 400)), "p2p": "rendezvous"}
    if schedule["kind"].startswith("zb"):
        cost |= {"backward_input_us": draw(times), "backward_weight_us": draw(times)}
    else:
        cost["backward_us"] = draw(times)
    micro_batches = pp * draw(st.integers(1, 2))
    return {
        "model": {"num_layers": stages},
        "topology": {"pp": pp},
        "schedule": {**schedule, "num_micro_batches": micro_batches},
        "cost": cost,
    }


@pytest.mark.many_examples
@settings(deadline=None)
@given(sections=timed_plans(), form=st.sampled_from(["pipeproof:", "PP:"]), step_us=st.integers(1, 900))
def test_a_simulated_timeline_gives_back_its_durations(sections, form, step_us):
    of = subject(**sections)
    cost = sections["cost"]
    with tempfile.TemporaryDirectory() as folder:
        files = write_kineto(Path(folder), events_of(of, prefix=form, optimizer_us=step_us), compress=step_us % 2)
        profile = profile_of(files, **sections)
    kinds = {"F": "forward_us", "B": "backward_us", "I": "backward_input_us", "W": "backward_weight_us"}
    expected = {
        (stage, kind): time for kind, key in kinds.items() for stage, time in enumerate(cost.get(key, ()))
    }  # fmt: skip
    found = medians(profile)
    assert {key: time for key, time in found.items() if key[1] != "STEP"} == expected
    chunks = sections["schedule"].get("num_chunks", 1)
    assert {time for key, time in found.items() if key[1] == "STEP"} == {step_us * 1000 // chunks / 1000}
    assert {point.median_us for point in profile.messages} == {cost["p2p_latency_us"]}
    assert profile.source.step_us == pytest.approx(float(simulate(of.plan).makespan), abs=0.01)


def test_the_profile_of_a_simulation_simulates_the_same(tmp_path):
    files = write_kineto(tmp_path, events_of(subject(cost=COST)))
    plan = plan_file(tmp_path / "plan.json", cost={"profile": "profile.out", "p2p": "rendezvous"})
    arguments = ["import", "profile", *map(str, files), "--plan", str(plan), "-o", str(tmp_path / "profile.out")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "a step takes" in result.output
    assert read_profile(tmp_path / "profile.out").source.format == "kineto"
    simulated = invoke("simulate", plan, "--format", "json")
    expected = simulate(subject(cost=COST).plan).makespan
    assert json.loads(simulated.output)["makespan"] == expected
    slower = plan_dict(cost={"profile": str(tmp_path / "profile.out")}, schedule={"kind": "gpipe"})
    assert simulate(subject(**slower).plan).makespan > 0


@pytest.mark.parametrize("prefix", ["pipeproof:", "PP:"])
def test_ranges_of_processors_leave_waits_out(tmp_path, prefix):
    of = subject(cost=COST)
    files = [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    traces = host_traces(of, prefix=prefix)
    for rank, trace in traces.items():
        files[rank].write_text(json.dumps(trace))
    profile = profile_of(files)
    expected = {(0, "F"): 119.9, (1, "F"): 89.9, (0, "B"): 199.9, (1, "B"): 309.9}  # less what posts take
    assert {key: time for key, time in medians(profile).items() if key[1] != "STEP"} == expected
    assert [point.median_us for point in profile.messages] == pytest.approx([7], abs=0.1)
    assert profile.source.step_us == pytest.approx(float(simulate(of.plan).makespan) - 0.1)
    traces[1]["host_name"] = "another"  # whose clock may show another time
    files[1].write_text(json.dumps(traces[1]))
    assert "no message" in refused(files)


def test_names_of_gpipe_have_the_stage_of_their_rank(tmp_path):
    sections = {"schedule": {"kind": "gpipe"}, "cost": COST}
    events = events_of(subject(**sections))
    for of_rank in events.values():
        for event in of_rank:
            name, number = event.name.removeprefix("pipeproof:"), event.name[-1]
            if name[1:2] in "FB" and event.op is not None:
                event.name = f"{'Forward' if name[1] == 'F' else 'Backward'} {number}"
    files = write_kineto(
        tmp_path, {rank: [e for e in of_rank if e.name[0] in "FBO"] for rank, of_rank in events.items()}
    )
    assert medians(profile_of(files, 7, **sections))[1, "B"] == 310
    chunks = {"schedule": {"kind": "interleaved", "num_chunks": 2}}
    assert "names no stage" in refused(files, message_us=7, **chunks)


def test_kernels_of_communication_are_not_computation(tmp_path):
    events = events_of(subject(cost=COST))
    for event in events[0]:
        if str(event.op) == "0B3":  # a sum of gradients that ends after the backward
            event.kernels.append(
                ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", event.kernels[0][1], event.kernels[1][2] + 9999)
            )
    profile = profile_of(write_kineto(tmp_path, events))
    assert medians(profile)[0, "B"] == 200
    assert profile.stages[0].ops[1].whole.q3_us == 200


def test_ranks_of_replicas_are_those_of_the_mesh(tmp_path):
    sections = {"topology": {"pp": 2, "dp": 2}, "cost": COST}
    of = subject(topology={"pp": 2}, cost=COST)
    events = events_of(of)
    ranks = {pp: [rank for rank in range(4) if subject(**sections).plan.mesh.coords(rank)["pp"] == pp] for pp in (0, 1)}
    files = []
    for pp, of_pp in ranks.items():
        for rank in of_pp:
            (tmp_path / f"{rank}.json").write_text(json.dumps(kineto_of(events[pp], rank, 4)))
            files.append(tmp_path / f"{rank}.json")
    profile = profile_of(files, **sections)
    assert medians(profile)[1, "B"] == 310
    assert profile.stages[1].ops[0].whole.count == 2 * 2 * 4
    assert profile.messages[0].median_us == 7
    some = profile_of([files[0], files[2]], **sections)
    assert any("2 of 4 ranks" in note for note in some.source.assumptions)


# --- refused ---


def test_another_order_is_refused(tmp_path):
    files = write_kineto(tmp_path, events_of(subject(cost=COST)))
    text = refused(files, schedule={"kind": "gpipe"})
    assert "0B0" in text
    assert "0F2" in text


def test_messages_without_a_time_need_one(tmp_path):
    events = events_of(subject(cost=COST))
    for of_rank in events.values():
        of_rank[:] = [event for event in of_rank if "SEND" not in event.name and "RECV" not in event.name]
    files = write_kineto(tmp_path, events)
    assert "no message" in refused(files)
    profile = profile_of(files, 5)
    assert [point.median_us for point in profile.bare_messages] == [5]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda trace: trace["distributedInfo"].update(rank=7), "rank 7"),
        (lambda trace: trace["distributedInfo"].update(rank=1), "another file"),
        (lambda trace: trace["traceEvents"].append(
            {"ph": "X", "cat": "user_annotation", "name": "pipeproof:0Q1", "ts": 1, "dur": 1}), "names no operation"),
        (lambda trace: trace["traceEvents"].append(
            {"ph": "X", "cat": "user_annotation", "name": "pipeproof:0F9", "ts": 1, "dur": 9000}), "overlap"),
        (lambda trace: trace.update(traceEvents=[e for e in trace["traceEvents"] if e.get("cat") != "kernel"
                                                 or e["name"] != "gemm"]), "no work was launched"),
        (lambda trace: trace.update(traceEvents=[e for e in trace["traceEvents"] if e.get("cat") != "user_annotation"]),
         "no range names an operation"),
    ],
    ids=["rank", "twice", "name", "overlap", "kernels", "names"],
)  # fmt: skip
def test_traces_that_do_not_fit_are_refused(tmp_path, change, words):
    events = events_of(subject(cost=COST))
    files = write_kineto(tmp_path, events)
    trace = kineto_of(events[0], 0, 2)
    change(trace)
    files[0].write_text(json.dumps(trace))
    assert words in refused(files)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"traceEvents": [{"ph": "X", "cat": "kernel"', "at character"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k"}]}', "no time"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": -4}]}', "no time"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1e400}]}', "no time"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "ts": 1' + 5000 * "0" + "}]}", "not a JSON value"),
        ('{"traceEvents": ' + 5000 * "[", "not a JSON value"),
        ('{"other": 1}', "without `traceEvents`"),
        ("PK\x03\x04", "it is not a trace"),
        ("", "it is not a trace"),
    ],
)
def test_files_that_are_no_traces_are_refused(tmp_path, content, words):
    path = tmp_path / "rank0.json"
    path.write_text(content)
    assert words in refused([path], "PP163")


def test_limits_of_a_trace(tmp_path, monkeypatch):
    files = write_kineto(tmp_path, events_of(subject(cost=COST)))
    monkeypatch.setattr("pipeproof.interop.profiles.kineto_trace.MAX_KEPT", 20)
    assert "more than 20 events" in refused(files, "PP163")
    monkeypatch.undo()
    monkeypatch.setattr("pipeproof.interop.profiles.kineto_trace.MAX_TEXT", 0)
    monkeypatch.setattr("pipeproof.interop.json_stream._CHUNK", 100)
    assert "the text has more than 0 characters" in refused(files, "PP163")


def test_a_damaged_archive_is_refused(tmp_path):
    files = write_kineto(tmp_path, events_of(subject(cost=COST)), compress=True)
    content = bytearray(files[0].read_bytes())
    content[len(content) // 2] ^= 255
    files[0].write_bytes(content)
    assert "cannot be read" in refused(files, "PP163")
    files[0].write_bytes(content[:500])
    assert "cannot be read" in refused(files, "PP163")


def test_host_times_of_a_gpu_are_refused(tmp_path):
    events = events_of(subject(cost=COST))
    for of_rank in events.values():
        for event in of_rank:
            event.kernels = []
    run = {"backend": "torch", "device": "gpu"}
    assert "no kernels" in refused(write_kineto(tmp_path, events), run=run)


# --- the command ---
