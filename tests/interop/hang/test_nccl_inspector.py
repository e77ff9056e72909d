"""Logs of NCCL's Inspector as its documentation shows them: versions 4.0, 4.2 and 4.3, and files that are not."""

import json
import random

import pytest

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.exec.monitor.inspector_report import report_logs
from pipeproof.interop.hang.nccl_inspector import inspector_files, read_inspector
from tests.cli.commands import invoke


def write_logs(directory, version, *, slow=1.0, num_ranks=3, steps=64, step_us=100_000, short_by=0, dropped=0):
    """Logs of a job with one all-reduce per step; rank 0 is slower by a factor, the last rank logs fewer."""
    draw = random.Random(0)
    lines = {rank: [] for rank in range(num_ranks)}
    now_us = 10**15
    for step in range(steps):
        arrivals = {rank: draw.uniform(0.95, 1.05) * step_us * (slow if rank == 0 else 1) for rank in range(num_ranks)}
        end = max(arrivals.values()) + 500
        now_us += int(end)
        for rank, arrival in arrivals.items():
            if rank == num_ranks - 1 and step >= steps - short_by:
                continue
            context = {
                "header": {"id": "0x7f", "rank": rank, "n_ranks": num_ranks, "nnodes": 1},
                "metadata": {
                    "inspector_output_format_version": version, "git_rev": "", "rec_mechanism": "x",
                    "dump_timestamp_us": now_us, "hostname": "node-1", "pid": 100 + rank,
                },
            }  # fmt: skip
            perf = {
                "coll": "AllReduce", "coll_sn": step, "coll_msg_size_bytes": 1 << 20,
                "coll_exec_time_us": int(end - arrival), "coll_algobw_gbs": 1.5, "coll_busbw_gbs": 2.0,
            }  # fmt: skip
            marker = {**context, "dump_stats": {"coll_records": 1, "coll_dropped_total": dropped}}
            if version == "v4.3":
                lines[rank] += [marker, {"coll_perf": perf}]
            else:
                lines[rank] += ([marker] if version == "v4.2" else []) + [{**context, "coll_perf": perf}]
    directory.mkdir(exist_ok=True)
    for rank, records in lines.items():
        text = "".join(json.dumps(record) + "\n" for record in records)
        (directory / f"node-1-pid{100 + rank}.log").write_text(text)


@pytest.mark.parametrize("version", ["v4.0", "v4.2", "v4.3"])
def test_the_straggler_and_the_last_operation_of_each_rank(tmp_path, version):
    write_logs(tmp_path / "logs", version, slow=1.3, short_by=1)
    result = invoke("job", "hang", tmp_path / "logs")
    assert result.exit_code == 0
    assert "PP955" in result.output
    assert "rank 0 came last to 63 of 63 collectives of group 0x7f" in result.output
    assert "ranks 0, 1: AllReduce #63" in result.output
    assert "rank 2 (PID 102 on node-1): AllReduce #62" in result.output
    data = json.loads(invoke("job", "hang", tmp_path / "logs", "--format", "json").output)
    assert [row["is_straggler"] for row in data["lateness"]] == [True, False, False]


def test_jitter_is_no_straggler_and_logs_of_the_end_have_no_lateness(tmp_path):
    write_logs(tmp_path / "logs", "v4.2", dropped=7)
    logs = read_inspector(inspector_files(tmp_path / "logs"))
    report = report_logs(logs)
    assert (report.findings, logs.num_lost) == ((), 21)
    assert len(report.lateness["0x7f"]) == 3
    for path in (tmp_path / "logs").iterdir():
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            record["metadata"]["dump_timestamp_us"] = 10**15
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert report_logs(read_inspector(inspector_files(tmp_path / "logs"))).lateness == {}


def test_a_line_that_is_being_written_is_left_out(tmp_path):
    write_logs(tmp_path, "v4.0", steps=3)
    path = tmp_path / "node-1-pid100.log"
    path.write_text(path.read_text() + '{"header": {"id": "0x')
    assert len(read_inspector(inspector_files(tmp_path)).ops) == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("v4.0", "v5.0"), "version v5.0 of the format"),
        (('"rank": 0', '"rank": 9'), "rank 9 of 3"),
        (('"coll_sn": 0', '"other": 0'), "line 1 is not understood: KeyError"),
        (('{"header"', '{"heade'), "line 1 is not understood"),
        (('"coll_exec_time_us": ', '"coll_exec_time_us": -'), "line 1 is not understood"),
    ],
)
def test_a_log_that_is_not_understood_is_refused(tmp_path, change, message):
    write_logs(tmp_path, "v4.0", steps=2)
    path = tmp_path / "node-1-pid100.log"
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(PlanFileError, match=message):
        read_inspector(inspector_files(tmp_path))
    result = invoke("job", "hang", tmp_path)
    assert result.exit_code == 2
    assert "PP930" in result.output + result.stderr


def test_options_that_need_rings_are_refused(tmp_path):
    write_logs(tmp_path, "v4.0", steps=2)
    result = invoke("job", "hang", tmp_path, "-o", tmp_path / "x.html")
    assert result.exit_code == 2
