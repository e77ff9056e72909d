"""The cause of a hang, from dumps with the fields of PyTorch's Flight Recorder."""

import json
import pickle
import re

import pytest

from pipeproof.interop.hang.diagnose_hang import diagnose_dumps
from tests.cli.commands import invoke
from tests.interop.hang.written import recorders


def diagnosed(tmp_path, recorders, form="pickle"):
    for recorder in recorders:
        recorder.write(tmp_path, form)
    return diagnose_dumps(tmp_path)


def codes(report):
    return [finding.code for finding in report.findings]


def cycle(report):
    (finding,) = [finding for finding in report.findings if finding.code == "PP931"]
    return [f"{op.rank}: {op.op}" for op in finding.witness.ops]


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_two_ranks_that_both_send_first(tmp_path, form):
    a, b = recorders(2)
    for recorder, peer in ((a, 1), (b, 0)):
        recorder.collective("all_reduce", "completed")
        recorder.message("send", peer, "started")
        recorder.message("recv", peer, "scheduled")
    report = diagnosed(tmp_path, (a, b), form)
    assert codes(report) == ["PP931"]
    assert cycle(report) == ["0: send 0->1 #0", "1: recv 1<-0 #0", "1: send 1->0 #0", "0: recv 0<-1 #0"]
    (finding,) = report.findings
    assert finding.location.file == "/home/me/train.py"  # the caller, not PyTorch's own frame
    assert finding.location.line == 11
    assert "rank 1 waits in recv 1<-0 #0 at /home/me/train.py:12 for its own send 1->0 #0" in finding.message
    assert "batch_isend_irecv" in finding.help
    assert [program.numbers for program in finding.witness.programs] == [(0, 1, 4), (0, 3, 2)]


def test_receives_first_on_one_rank_are_no_cycle(tmp_path):
    a, b = recorders(2)
    a.message("send", 1, "started")
    a.message("recv", 1, "scheduled")
    b.message("recv", 0, "started")
    b.message("send", 0, "scheduled")
    assert codes(diagnosed(tmp_path, (a, b))) == ["PP935"]


def test_a_host_that_blocks_has_issued_no_more(tmp_path):
    a, b = recorders(2)
    a.message("send", 1, "started")
    b.message("send", 0, "started")
    assert cycle(diagnosed(tmp_path, (a, b))) == ["0: send 0->1 #0", "1: send 1->0 #0"]


def test_a_ring_of_collectives_in_different_orders(tmp_path):
    ranks = recorders(3, {"1": [0, 1], "2": [1, 2], "3": [0, 2]})
    for recorder, group in zip(ranks, "123", strict=True):
        recorder.collective("all_reduce", "started", group=group)
    report = diagnosed(tmp_path, ranks)
    assert cycle(report) == [
        "0: all_reduce #1 of group 1", "1: all_reduce #1 of group 2", "2: all_reduce #1 of group 3",
    ]  # fmt: skip
    assert "one global order" in report.findings[0].help


def test_groups_whose_members_are_not_the_first_ranks(tmp_path):
    ranks = recorders(4, {"1": [1, 3]})
    ranks[1].message("send", 3, "started", group="1")
    ranks[3].message("send", 1, "started", group="1")
    assert cycle(diagnosed(tmp_path, ranks)) == ["1: send 1->3 #0", "3: send 3->1 #0"]


def test_batches_are_done_together(tmp_path):
    a, b = recorders(2)
    a.batch([("send", 1), ("recv", 1)], "completed")
    b.batch([("recv", 0), ("send", 0)], "completed")
    a.batch([("send", 1), ("recv", 1)], "started")
    b.batch([("recv", 0)], "started")
    report = diagnosed(tmp_path, (a, b))
    assert report.num_pending == 2
    assert cycle(report) == ["0: recv 0<-1 #1", "1: recv 1<-0 #1"]


@pytest.mark.parametrize(
    ("send", "receive", "message"),
    [
        ({"sizes": ((4, 8),)}, {"sizes": ((4, 9),)}, "differ in size: 32 elements against 36"),
        ({"dtype": "Float"}, {"dtype": "BFloat16"}, "differ in type: Float against BFloat16"),
        ({"sizes": ((4, 8),)}, {"sizes": ((32,),)}, None),
    ],
)
def test_the_ends_of_a_message(tmp_path, send, receive, message):
    a, b = recorders(2)
    for _ in range(2):
        a.message("send", 1, "completed")
        b.message("recv", 0, "completed")
    a.message("send", 1, "completed", **send)
    b.message("recv", 0, "completed", **receive)
    report = diagnosed(tmp_path, (a, b))
    assert codes(report) == ([] if message is None else ["PP932"])
    if message is not None:
        assert message in report.findings[0].message
        assert "send 0->1 #2" in report.findings[0].message


@pytest.mark.parametrize(
    ("kinds", "sizes", "dtypes", "message"),
    [
        (("all_reduce", "all_gather"), ((4,), (4,)), ("Float", "Float"), "operation: all_reduce on rank 0, all_gather"),
        (("all_reduce",) * 2, ((4,), (5,)), ("Float", "Float"), "size: 4 on rank 0, 5 on rank 1"),
        (("all_reduce",) * 2, ((4,), (4,)), ("Float", "Half"), "type: Float on rank 0, Half on rank 1"),
        (("all_to_all",) * 2, ((4,), (6,)), ("Float", "Float"), None),
        (("broadcast",) * 2, ((4,), (2, 2)), ("Float", "Float"), None),
    ],
)
def test_the_members_of_a_collective(tmp_path, kinds, sizes, dtypes, message):
    ranks = recorders(2)
    for recorder, kind, size, dtype in zip(ranks, kinds, sizes, dtypes, strict=True):
        recorder.collective(kind, "completed", (size,), dtype)
    report = diagnosed(tmp_path, ranks)
    assert codes(report) == ([] if message is None else ["PP932"])
    assert (
        message is None or f"collective #1 of group 0 (default_pg) differs in {message}" in report.findings[0].message
    )


def test_an_all_to_all_receives_as_much_as_it_sends(tmp_path):
    a, b = recorders(2)
    a.collective("all_to_all", "started", ((4,),), out=((5,),))
    b.collective("all_to_all", "started", ((6,),), out=((6,),))
    (finding,) = diagnosed(tmp_path, (a, b)).findings
    assert finding.code == "PP932"
    assert re.search(r"sends 10 elements .* receives 11", finding.message)


def test_a_rank_that_took_another_branch(tmp_path):
    a, b = recorders(2)
    for recorder in (a, b):
        recorder.collective("barrier", "completed")
    a.collective("all_reduce", "started")
    report = diagnosed(tmp_path, (a, b))
    assert codes(report) == ["PP933"]
    (finding,) = report.findings
    assert finding.message.splitlines() == [
        "rank 1 never issued its part of all_reduce #2 of group 0 (default_pg)",
        "rank 0 waits in all_reduce #2 of group 0 (default_pg) at /home/me/train.py:11",
        "rank 1 issued barrier #1 of group 0 (default_pg) last, and finished it",
    ]


def test_waits_that_all_end_at_a_rank_without_a_dump_are_an_error_that_names_them(tmp_path):
    a, _, c = recorders(3)
    a.collective("all_reduce", "started")
    c.collective("all_reduce", "started")
    report = diagnosed(tmp_path, (a, c))
    assert [(finding.code, finding.severity) for finding in report.findings] == [("PP934", "error")]
    headline, *waiting = report.findings[0].message.splitlines()
    assert headline.startswith("1 of 3 ranks have no dump: rank 1; all waits end there, in all_reduce #1 of group 0")
    assert [line[:24] for line in waiting] == ["rank 0 waits in all_redu", "rank 2 waits in all_redu"]
    assert invoke("job", "hang", tmp_path).exit_code == 1


def test_ranks_that_wait_for_others_that_wait_are_listed_too(tmp_path):
    a, _, c = recorders(3, {"1": [0, 1]})
    a.collective("all_reduce", "started", group="1")
    c.message("recv", 0, "started")
    headline, first, second = diagnosed(tmp_path, (a, c)).findings[0].message.splitlines()
    assert headline.startswith("1 of 3 ranks have no dump: rank 1; all waits end there")
    assert first.startswith("rank 0 waits in all_reduce")
    assert second.startswith("rank 2 waits in recv 2<-0")
    assert second.endswith(" for rank 0, which has not issued its part")


def test_a_rank_without_a_dump_is_not_blamed_where_other_ranks_wait_for_each_other(tmp_path):
    a, b, _ = recorders(3, {"1": [0, 1]})
    for recorder in (a, b):
        recorder.collective("all_reduce", "completed")
    a.message("send", 1, "started", group="1")
    b.message("send", 0, "started", group="1")
    report = diagnosed(tmp_path, (a, b))
    assert [(finding.code, finding.severity) for finding in report.findings] == [
        ("PP934", "warning"), ("PP931", "error"),
    ]  # fmt: skip
    assert report.findings[0].message == "1 of 3 ranks have no dump: rank 2"


def test_a_full_buffer_is_aligned_at_what_is_not_done(tmp_path):
    a, b = recorders(2)
    for _ in range(3):
        a.message("send", 1, "completed", sizes=((7,),))
        b.message("recv", 0, "completed", sizes=((7,),))
    a.message("send", 1, "started", sizes=((8,),))
    b.message("recv", 0, "started", sizes=((8,),))
    del a.entries[:2]  # the oldest are overwritten
    assert codes(diagnosed(tmp_path, (a, b))) == ["PP935"]


def four_ranks(*ops):
    """Four ranks after a common barrier, each with its last operation (name, state), or none."""
    ranks = recorders(4)
    for recorder, op in zip(ranks, ops, strict=True):
        recorder.collective("barrier", "completed")
        if op is not None:
            recorder.collective(*op)
    return ranks


WAITING = ("all_reduce", "started")
KINDS = {
    "mismatch": ((("broadcast", "started"), WAITING, WAITING, WAITING), [0]),
    "absent": ((WAITING, WAITING, None, WAITING), [2]),
    "unfinished": ((WAITING, WAITING, WAITING, WAITING), []),
    "none": ((None, None, None, None), []),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_cause_and_the_last_operation_of_each_rank_are_in_every_output(tmp_path, kind):
    ops, causes = KINDS[kind]
    for recorder in four_ranks(*ops):
        recorder.write(tmp_path, "pickle")
    content = json.loads(invoke("job", "hang", tmp_path, "--format", "json").stdout)
    assert (content["kind"], content["causes"]) == (kind, causes)
    assert [rank["last"] for rank in content["ranks"]] == [
        {"op": f"{op[0]} #2 of group 0 (default_pg)", "at": "/home/me/train.py:11", "state": "started"}
        if op is not None
        else {"op": "barrier #1 of group 0 (default_pg)", "at": "/home/me/train.py:10", "state": "completed"}
        for op in ops
    ]
    text = invoke("job", "hang", tmp_path).stdout
    assert ("cause: rank 0" in text, "cause: rank 2" in text, "cause: rank unknown" in text) == (
        kind == "mismatch", kind == "absent", kind == "unfinished"
    )  # fmt: skip
    for rank, op in enumerate(ops if kind != "none" else ()):
        name, line = ("finished barrier #1", 10) if op is None else (f"is in {op[0]} #2", 11)
        assert re.search(rf"^rank {rank} {name} .* at /home/me/train.py:{line}$", text, re.MULTILINE)


def test_the_command_shows_the_cycle_and_fails(tmp_path):
    a, b = recorders(2)
    a.message("send", 1, "started")
    b.message("send", 0, "started")
    diagnosed(tmp_path, (a, b))
    result = invoke("job", "hang", tmp_path)
    assert result.exit_code == 1
    assert "rank 0 send 0->1 #0 waits for rank 1 send 1->0 #0" in result.output
    data = json.loads(invoke("job", "hang", tmp_path, "--format", "json").output)
    assert data["findings"][0]["witness"]["kind"] == "cycle"
    assert data["ranks"][1]["pending"] == ["send 1->0 #0"]


class Evil:
    def __reduce__(self):
        return (print, ("run",))


def written(content):
    return pickle.dumps(content, protocol=2)


GOOD = recorders(1)[0].content()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("trace_0", written(Evil()), "`__builtin__.print`, and a dump has plain values only"),
        ("trace_0", written(GOOD)[:-9], "is not a Flight Recorder dump, or is cut short"),
        ("trace_0", b"", "is not a Flight Recorder dump, or is cut short"),
        ("trace_0", b'{"version": "2.10"', "or is cut short"),
        ("trace_0", written([1]), "it has no version"),
        ("trace_0", written({**GOOD, "version": "3.0"}), "has version 3.0 of the format; 2.x is read"),
        ("trace_0", written({"version": "2.1", "entries": []}), "has no `pg_config`"),
        ("trace_0", written({**GOOD, "pg_config": {"0": {}}}), "the ranks of group 0 cannot be read"),
        ("trace_0", written({**GOOD, "entries": [{"record_id": 0}]}), "entry 0 has no `process_group`"),
        ("trace_0", written({**GOOD, "entries": "x"}), "`entries` is not a list"),
        ("trace_x", written(GOOD), "the name of each ends with its rank"),
    ],
)
def test_what_is_no_dump_is_refused_and_nothing_in_it_is_run(tmp_path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content)
    result = invoke("job", "hang", tmp_path)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "PP930" in result.stderr
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": "lost"}, "`lost` is not a state"),
        ({"profiling_name": "send"}, "is named `send`"),
        ({"profiling_name": "nccl:send 0->5"}, "names a rank outside of group 0"),
        ({"process_group": ("9", "other")}, "`pg_config` does not have group 9 (other)"),
        ({"collective_seq_id": "x", "profiling_name": "nccl:barrier"}, "wrong type"),
        ({"process_group": 5}, "wrong type"),
    ],
)
def test_entries_that_make_no_sense(tmp_path, change, message):
    a, b = recorders(2)
    a.message("send", 1, "started")
    a.entries[0].update(change)
    a.write(tmp_path)
    b.write(tmp_path)
    result = invoke("job", "hang", tmp_path)
    assert result.exit_code == 2
    assert message in result.stderr
