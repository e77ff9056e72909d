"""Steps of a real pipeline under PyTorch's profiler, their profile, and the replay of their durations."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from dataclasses import replace
from statistics import median

import pytest

from pipeproof.interop.profiles.kineto_trace import read_kineto
from pipeproof.interop.profiles.op_ranges import steps_of_trace
from pipeproof.interop.profiles.profile_from_traces import measured_files, profile_of_files
from pipeproof.schedule.ops import COMPUTE_KINDS
from pipeproof.sim.fast_engine import run_fast
from pipeproof.sim.op_durations import durations_of
from pipeproof.sim.simulate import channel_model_of
from pipeproof.sim.timeline import makespan_of_times
from pipeproof.specs.load_plan import load_plan
from pipeproof.verify.subject import make_subject
from tests.train.launch import run

pytestmark = [pytest.mark.needs_torch, pytest.mark.slow]

_LIMIT = 0.03
"""Largest share by which the replay of a step may differ from the step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    run("traced_steps.py", 2, folder)
    return folder


@pytest.fixture(scope="module")
def subject(folder):
    loaded = load_plan(folder / "plan.yaml")
    cost = loaded.spec.cost.model_copy(update={"p2p": "backend"})
    return make_subject(replace(loaded, spec=loaded.spec.model_copy(update={"cost": cost})))


def test_the_profile_has_the_medians_of_the_ranges(folder):
    files = measured_files([folder / f"rank{rank}.json.gz" for rank in (0, 1)])
    profile = profile_of_files(files, load_plan(folder / "plan.yaml"), None)
    assert profile.steps.counted == 7
    for stage, path in enumerate(files):
        durations = defaultdict(list)
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
            name = event.get("name", "")
            for kind in "FB":
                if name.startswith(f"pipeproof:{stage}{kind}"):
                    durations[kind].append((event["ts"], event["dur"]))
        for op in profile.stages[stage].ops:
            if op.kind in durations:
                in_order = [duration for _, duration in sorted(durations[op.kind])]
                assert len(in_order) == 32
                assert op.whole.median_us == pytest.approx(median(in_order[4:]), abs=0.001)
                assert op.whole.count == 28
    assert profile.messages[0].num_bytes == 2 * 16 * 4


def test_recorded_steps_replay_within_three_percent(folder, subject):
    """The durations of a step and the order of the plan give its length; other programs disturb some steps, not all."""
    graph, plan = subject.graph, subject.plan
    traces = [read_kineto(folder / f"rank{rank}.json.gz") for rank in (0, 1)]
    programs = [[graph.ops[i] for i in graph.rank_ops(rank) if graph.ops[i].kind in COMPUTE_KINDS] for rank in (0, 1)]
    steps = [steps_of_trace(trace, program).steps for trace, program in zip(traces, programs, strict=True)]
    errors = []
    for of_ranks in zip(*steps, strict=True):
        ticks = [0] * graph.num_ops
        for rank, step in enumerate(of_ranks):
            times = {each.ops[0]: each.end_ns - each.start_ns for each in step.computations}
            for op_id in graph.rank_ops(rank):
                ticks[op_id] = times.get(graph.ops[op_id], 0)
        durations = replace(durations_of(plan), ticks=tuple(ticks), ticks_per_us=1000)
        replayed = makespan_of_times(run_fast(graph, durations, channel_model_of(plan)), 1000)
        computations = [each for step in of_ranks for each in step.computations]
        start, end = min(each.start_ns for each in computations), max(each.end_ns for each in computations)
        errors.append(abs(float(replayed) * 1000 / (end - start) - 1))
    assert len(errors) == 8
    assert min(errors) <= _LIMIT, errors
