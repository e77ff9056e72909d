"""Logs are read strictly, and as far as a rank came."""

from __future__ import annotations

import json

import pytest

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop.traces.trace_log import read_logs
from tests.interop.record.logs import Rank, ranks


def test_a_line_that_was_cut_short_is_left_out(tmp_path):
    rank = Rank(tmp_path, 0)
    rank.wait(rank.send(1))
    rank.end()
    path = tmp_path / "rank_0.jsonl"
    path.write_bytes(path.read_bytes()[:-12])
    (log,) = read_logs(tmp_path)
    assert not log.ended
    assert log.done == {0}
    assert log.waiting_for == ()


def lines(*events):
    return "".join(json.dumps(event) + "\n" for event in events)


START = {"event": "start", "version": 1, "rank": 0, "num_ranks": 2, "framework": "torch 2", "time_ns": 0}
GROUP = {"event": "group", "group": "0", "ranks": [0, 1], "backend": "gloo"}
CALL = {"event": "call", "seq": 0, "op": "send", "group": "0", "peer": 1}

FLAT = {"shape": [2, 2], "dtype": "float32", "strides": [1], "start": 0, "stop": 16}


@pytest.mark.parametrize(
    ("text", "fragment", "line"),
    [
        ("", "this log is empty", 1),
        (lines(GROUP), "`start`", 1),
        (lines(START, START), "`start`", 2),
        (lines({**START, "version": 2}), "it has version 2 of the format; 1 is read", 1),
        (lines({**START, "rank": 1}), "rank 1, and the file's name has 0", 1),
        (lines(START) + "{]\n", "Expecting property name", 2),
        (lines(START, [1]), "list indices", 2),
        (lines(START, {"time": 1}), "it lacks 'event'", 2),
        (lines(START, {"event": "sing"}), "'sing'", 2),
        (lines(START, CALL), "group '0'", 2),
        (lines(START, GROUP, {**CALL, "op": "shout"}), "'shout'", 3),
        (lines(START, GROUP, {**CALL, "peer": 7}), "rank 7 is not in group 0", 3),
        (lines(START, GROUP, {**CALL, "inputs": [FLAT]}), "shape [2, 2] has 1 strides", 3),
        (lines(START, GROUP, CALL, {"event": "wait", "of": [3]}), "number 3", 4),
        (lines(START, {"event": "end"}, {"event": "end"}), "after `end`", 3),
    ],
)
def test_an_invalid_log_is_refused_with_its_line(tmp_path, text, fragment, line):
    (tmp_path / "rank_0.jsonl").write_text(text)
    with pytest.raises(PlanFileError) as caught:
        read_logs(tmp_path)
    (finding,) = caught.value.findings
    assert finding.code == "PP940"
    assert fragment in finding.message
    assert finding.location.line == line


def test_logs_of_two_jobs(tmp_path):
    Rank(tmp_path, 0, 2).end()
    Rank(tmp_path, 1, 3).end()
    with pytest.raises(PlanFileError, match="this log is of 3 ranks on torch 2, rank 0's of 2 on torch 2"):
        read_logs(tmp_path)


def test_nothing_is_overwritten(tmp_path):
    ranks(tmp_path)[0].end()
    with pytest.raises(ValueError, match=r"rank_0\.jsonl exists"):
        Rank(tmp_path, 0)


def test_marks_are_checked(tmp_path):
    rank = Rank(tmp_path, 0)
    with pytest.raises(ValueError, match="a mark has a stage"), rank.recorder.mark(stage=-1, micro_batch=0, kind="F"):
        pass


def test_an_empty_directory(tmp_path):
    with pytest.raises(PlanFileError, match=r"has no `rank_N.jsonl`"):
        read_logs(tmp_path)
