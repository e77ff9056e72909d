"""Real Paddle programs on two processes over gloo, Fleet's own pipeline among them: recorded, then judged."""

from __future__ import annotations

import signal

import pytest

from pipeproof.interop.traces.check_traces import check_log
from pipeproof.interop.traces.trace_log import read_logs
from tests.interop.record.processes import run_ranks, world

pytestmark = pytest.mark.needs_paddle


@pytest.mark.needs_paddle
def test_fleets_own_pipeline_is_clean_and_swapped_messages_are_found(tmp_path):
    run_ranks("paddle_programs.py", "pipeline", 2, tmp_path, environment=world())
    assert check_log(tmp_path / "step").findings == ()
    first, second = read_logs(tmp_path / "step")
    messages = [(call.op, call.mark and call.mark.kind) for call in second.calls if call.is_message]
    assert messages == [
        ("recv", None), ("recv", None), ("recv", "F"),  # the shape travels once, ahead of the first micro-batch
        ("recv", "F"), ("send", "B"), ("recv", "F"), ("send", "B"), ("recv", "F"), ("send", "B"), ("send", "B"),
    ]  # fmt: skip
    assert all(call.at.partition(":")[0].endswith("paddle_programs.py") for call in first.calls)
    assert [call.op for call in first.calls[-2:]] == ["broadcast", "broadcast"]
    swapped = check_log(tmp_path / "swapped").findings
    assert [finding.code for finding in swapped] == ["PP302", "PP302"]
    assert "send 0->1 #0 (F 1 of stage 0) and means recv 1<-0 (F 1 of stage 1)" in swapped[0].message


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_the_log_of_a_process_that_gloo_aborts_says_why(tmp_path):
    exits = (0, -signal.SIGABRT, 1)
    run_ranks("paddle_programs.py", "aborts", 2, tmp_path, environment=world(), exits=exits)
    findings = check_log(tmp_path).findings
    assert {"PP303", "PP941"} <= {finding.code for finding in findings}
    sizes = [finding.message.partition(" elements")[0] for finding in findings if finding.code == "PP303"]
    assert sizes == ["send 0->1 #0 on rank 0 sends 4", "send 0->1 #1 on rank 0 sends 8"]
