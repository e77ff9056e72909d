"""Real PyTorch programs on several processes over gloo: recorded, then judged."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from pipeproof.diagnostics.finding import Severity
from pipeproof.interop.traces.check_traces import check_log
from pipeproof.interop.traces.trace_log import read_logs
from pipeproof.specs.load_plan import load_plan
from tests.interop.record.processes import run_ranks

pytestmark = pytest.mark.needs_torch


def codes(directory, **options):
    return [finding.code for finding in check_log(directory, **options).findings]


PLAN = """\
pipeproof: 1
model: {kind: gpt, num_layers: 3, hidden_size: 8, num_heads: 2, ffn_size: 16, vocab_size: 32, seq_length: 2}
topology: {pp: 3}
schedule: {kind: KIND, num_micro_batches: 4, micro_batch_size: 1}
run: {backend: torch}
"""


def test_a_pipeline_of_pytorch_is_clean_and_does_as_the_plan_says(tmp_path):
    run_ranks("torch_programs.py", "plain", 3, tmp_path / "logs")
    report = check_log(tmp_path / "logs")
    assert [(f.code, f.severity) for f in report.findings] == [("PP411", Severity.NOTE)]
    marked = [[call for call in log.calls if call.mark is not None] for log in read_logs(tmp_path / "logs")]
    assert [len(calls) for calls in marked] == [8, 16, 8]
    first = [str(call.mark) for call in marked[0] if call.op == "send"]
    assert first == [f"F {micro_batch} of stage 0" for micro_batch in range(4)]
    for kind, expected in (("1f1b", ["PP411"]), ("gpipe", ["PP411", "PP943"])):
        plan = tmp_path / f"{kind}.yaml"
        plan.write_text(PLAN.replace("KIND", kind))
        assert sorted(set(codes(tmp_path / "logs", plan=load_plan(plan)))) == expected


def test_micro_batches_that_are_crossed_in_a_pipeline_are_found(tmp_path):
    run_ranks("torch_programs.py", "crossed", 2, tmp_path / "logs")
    findings = [f for f in check_log(tmp_path / "logs").findings if f.code == "PP302"]
    assert len(findings) == 2
    assert "send 0->1 #4 (F 1 of stage 0) and means recv 1<-0 (F 1 of stage 1)" in findings[0].message
    assert "torch_programs.py:" in findings[0].message
    for rank in range(2):
        times = [json.loads(line)["time_ns"] for line in (tmp_path / "logs" / f"rank_{rank}.jsonl").open()]
        assert all(one <= other for one, other in pairwise(times))


def test_every_collective_is_recorded_what_is_written_under_a_send_is_found_and_all_is_put_back(tmp_path):
    asked = {"LOGS": str(tmp_path / "asked")}
    run_ranks("torch_programs.py", "collectives", 2, tmp_path / "logs", environment=lambda rank: asked)
    (written,) = check_log(tmp_path / "asked").findings
    assert written.code == "PP501"
    assert "the tensor of send 0->1 of float32[4]" in written.message
    logs = read_logs(tmp_path / "logs")
    for log in logs:
        assert [call.op for call in log.calls] == [
            "all_reduce", "broadcast", "barrier", "all_gather", "all_gather", "reduce_scatter", "all_to_all",
            "all_to_all", "all_gather", "all_gather", "all_reduce", "all_reduce",
        ]  # fmt: skip
        assert log.ended
        assert log.error == "raised ZeroDivisionError: division by zero"
        assert log.done == frozenset(range(12))
        assert log.created == ((0, 1),)
        assert {call.at.partition(":")[0] for call in log.calls} == {"tests/interop/record/torch_programs.py"}
    assert [logs[0].calls[7].sent_splits, logs[0].calls[7].received_splits] == [(1, 3), (1, 2)]
    assert [call.reduction for call in logs[0].calls if call.op == "all_reduce"] == ["sum"] * 3
    assert codes(tmp_path / "logs") == ["PP944", "PP944"]


def test_the_logs_of_a_run_that_hung_and_was_killed(tmp_path):
    logs = tmp_path / "logs"

    def both_wait():
        files = [logs / f"rank_{rank}.jsonl" for rank in range(2)]
        return all(file.exists() and '"wait"' in file.read_text() for file in files)

    run_ranks("torch_programs.py", "hang", 2, logs, kill_when=both_wait)
    report = check_log(logs)
    assert [finding.code for finding in report.findings] == ["PP931", "PP941", "PP941"]
    cycle = report.findings[0]
    assert [op.op for op in cycle.witness.ops] == ["recv 0<-1 of float32[4]", "recv 1<-0 of float32[4]"]
    assert cycle.message.count("torch_programs.py:") == 2
