"""Findings in logs: by the rules for plans, and by facts that only a log shows."""

from __future__ import annotations

import json

import pytest

from pipeproof.diagnostics.finding import CycleWitness, Severity
from pipeproof.interop.traces.check_traces import check_log
from pipeproof.interop.traces.recorder import Call
from pipeproof.specs.load_plan import load_plan
from tests.cli.commands import invoke
from tests.interop.record.logs import end, ranks
from tests.interop.record.processes import ROOT


def found(directory, **options):
    """The findings by code, both errors and warnings."""
    by_code = {}
    for finding in check_log(directory, **options).findings:
        by_code.setdefault(finding.code, []).append(finding)
    return by_code


def test_messages_and_collectives_that_agree_are_clean(tmp_path):
    first, second = ranks(tmp_path)
    with first.recorder.mark(stage=0, micro_batch=0, kind="F"):
        sent = first.send(1)
    with second.recorder.mark(stage=1, micro_batch=0, kind="F"):
        received = second.recv(0)
    first.wait(sent)
    second.wait(received)
    for rank in (first, second):
        rank.wait(rank.collective("all_reduce", 8, reduction="sum"))
        rank.wait(rank.collective("barrier"))
        rank.end()
    report = check_log(tmp_path)
    assert report.findings == ()
    assert report.not_run == ()
    assert report.subject.graph.num_ops == 2 * 6


def test_receives_in_another_order_than_the_sends(tmp_path):
    first, second = ranks(tmp_path)
    for micro_batch in (1, 0):
        with first.recorder.mark(stage=0, micro_batch=micro_batch, kind="F"):
            first.wait(first.send(1))
    for micro_batch in (0, 1):
        with second.recorder.mark(stage=1, micro_batch=micro_batch, kind="F"):
            second.wait(second.recv(0))
    end(first, second)
    (one, two) = found(tmp_path)["PP302"]
    assert (
        "send 0->1 #0 (F 1 of stage 0) and means recv 1<-0 (F 1 of stage 1), but the receive there is " in one.message
    )
    assert "recv 1<-0 #0 (F 0 of stage 1)" in one.message
    assert "rank 0 issued send 0->1 (F 1 of stage 0) of float32[4] at " in one.message
    assert "logs.py:" in one.message
    assert one.location.file.endswith("rank_0.jsonl")
    assert json.loads((tmp_path / "rank_0.jsonl").read_text().splitlines()[one.location.line - 1])["op"] == "send"
    assert "#1" in two.message


def test_an_activation_that_meets_the_receive_of_a_gradient(tmp_path):
    first, second = ranks(tmp_path)
    with first.recorder.mark(stage=2, micro_batch=0, kind="F"):
        first.wait(first.send(1))
    with second.recorder.mark(stage=1, micro_batch=0, kind="B"):
        second.wait(second.recv(0))
    end(first, second)
    assert list(found(tmp_path)) == ["PP302"]


def test_sizes_and_types(tmp_path):
    first, second = ranks(tmp_path)
    first.wait(first.send(1, first.tensor(8)))
    second.wait(second.recv(0, second.tensor(4)))
    first.wait(first.send(1, first.tensor(4, dtype="bfloat16")))
    second.wait(second.recv(0, second.tensor(2, 2, dtype="float16")))
    end(first, second)
    by_code = found(tmp_path)
    assert sorted(by_code) == ["PP303", "PP304"]
    assert "sends 8 elements" in by_code["PP303"][0].message
    assert "sends bfloat16" in by_code["PP304"][0].message


def test_a_send_that_nothing_receives(tmp_path):
    first, second = ranks(tmp_path)
    first.wait(first.send(1))
    end(first, second)
    by_code = found(tmp_path)
    assert sorted(by_code) == ["PP301", "PP402"]
    assert "rank 1 never issues its counterpart recv 1<-0 #0" in by_code["PP402"][0].message


def test_tags_are_channels_on_gloo_and_nothing_on_nccl(tmp_path):
    for backend in ("gloo", "nccl"):
        first, second = ranks(tmp_path / backend, backend=backend)
        first.wait(first.send(1, first.tensor(8), tag=1))
        first.wait(first.send(1, first.tensor(4), tag=2))
        second.wait(second.recv(0, second.tensor(4), tag=2))
        second.wait(second.recv(0, second.tensor(8), tag=1))
        end(first, second)
    assert sorted(found(tmp_path / "gloo")) == ["PP401"]  # a send that waits blocks the second one
    assert sorted(found(tmp_path / "nccl")) == ["PP303"]


def crossing(directory, *, waits_last: bool):
    """Both ranks send, then receive; the sends are waited for last, or at once."""
    for rank in ranks(directory):
        peer = 1 - rank.recorder.path.name.count("1")
        send = rank.send(peer)
        if not waits_last:
            rank.wait(send)
        rank.wait(rank.recv(peer))
        if waits_last:
            rank.wait(send)
        rank.end()


def test_a_deadlock_that_another_runtime_would_have(tmp_path):
    crossing(tmp_path, waits_last=True)
    assert {f.severity for f in check_log(tmp_path).findings} == {Severity.NOTE}
    (finding,) = found(tmp_path, queue="pair")["PP401"]
    assert isinstance(finding.witness, CycleWitness)
    assert "send 0->1 #0" in finding.message
    assert finding.help is not None
    assert "0SEND" not in finding.message + finding.help


def test_a_deadlock_of_waits(tmp_path):
    crossing(tmp_path, waits_last=False)
    assert "PP401" in found(tmp_path)


def test_a_batch_has_no_order(tmp_path):
    for rank in ranks(tmp_path, backend="nccl"):
        peer = 1 - rank.recorder.path.name.count("1")
        rank.recorder.begin_batch()
        rank.send(peer)
        rank.recv(peer)
        rank.wait(*rank.recorder.end_batch())
        rank.end()
    report = check_log(tmp_path)
    assert report.findings == ()
    assert report.subject.backend.queue == "communicator"


def test_collectives_that_differ(tmp_path):
    first, second = ranks(tmp_path)
    first.wait(first.collective("all_reduce", 8, reduction="sum"))
    second.wait(second.collective("all_gather", 8))
    for rank, root in ((first, 0), (second, 1)):
        rank.wait(rank.collective("reduce", 8, peer=root, reduction="sum"))
        rank.end()
    (finding,) = found(tmp_path)["PP306"]
    assert "is all_reduce #0 of group 0 of 8 elements in float32 (sum) on rank 0 but" in finding.message


def test_roots_that_differ(tmp_path):
    for rank, root in zip(ranks(tmp_path), (0, 1), strict=True):
        rank.wait(rank.collective("reduce", 8, peer=root, reduction="sum"))
        rank.end()
    assert "PP306" in found(tmp_path)


def exchange(directory, taken: int):
    for rank, sent, received in zip(ranks(directory), ((4, 12), (6, 2)), ((4, 6), (taken, 2)), strict=True):
        tensors = (rank.tensor(sum(sent)),), (rank.tensor(sum(received)),)
        call = Call("all_to_all", rank.group(), *tensors, sent_splits=sent, received_splits=received)
        rank.wait(rank.issue(call))
        rank.end()
    return found(directory)


def test_uneven_exchanges(tmp_path):
    assert exchange(tmp_path / "right", 12) == {}
    (finding,) = exchange(tmp_path / "wrong", 8)["PP945"]
    assert "rank 0 sends 12 elements to rank 1" in finding.message
    assert "which receives 8 from it" in finding.message


def test_groups_made_in_other_orders(tmp_path):
    for rank, order in zip(ranks(tmp_path), (([0, 1], [1, 0]), ([1, 0], [0, 1])), strict=True):
        for members in order:
            rank.recorder.write("create", ranks=members)
        rank.wait(rank.collective("barrier"))
        rank.end()
    assert list(found(tmp_path)) == ["PP310"]


def test_memory_used_under_a_message(tmp_path):
    first, second = ranks(tmp_path)
    buffer = second.tensor(4)
    one, two = second.recv(0, buffer), second.recv(0, second.tensor(4, at=buffer.start + 8))
    second.wait(one, two)
    written = first.tensor(4)
    sends = first.send(1, written), first.send(1)
    written.tensor["version"] += 1
    first.wait(*sends)
    end(first, second)
    by_code = found(tmp_path)
    assert sorted(by_code) == ["PP501", "PP502"]
    assert "was written in place after the call" in by_code["PP501"][0].message
    assert "writes memory that recv 1<-0 of float32[4]" in by_code["PP502"][0].message


def test_the_same_memory_after_the_wait_is_fine(tmp_path):
    first, second = ranks(tmp_path)
    buffer = second.tensor(4)
    for _ in range(2):
        first.wait(first.send(1))
        second.wait(second.recv(0, buffer))
    end(first, second)
    assert found(tmp_path) == {}


def test_a_request_that_nothing_waited_for(tmp_path):
    first, second = ranks(tmp_path)
    first.send(1)
    second.wait(second.recv(0))
    end(first, second)
    assert list(found(tmp_path)) == ["PP946"]


def test_ranks_that_were_killed_while_they_waited(tmp_path):
    for rank, peer in zip(ranks(tmp_path, 3), (1, 2, 0), strict=True):
        rank.recorder.waits([rank.recv(peer)])  # and no `done`, no `end`
    by_code = found(tmp_path)
    assert sorted(by_code) == ["PP931", "PP941"]
    (finding,) = by_code["PP931"]
    assert [op.rank for op in finding.witness.ops] == [0, 1, 2]
    assert "ranks 0, 1, 2 wait for each other" in finding.message
    assert len(by_code["PP941"]) == 3


def test_ranks_whose_waits_for_each_other_ended_with_an_error(tmp_path):
    """Two sends that block until they are received, on gloo: after its timeout, both ranks raise."""
    error = RuntimeError("timed out")
    for rank, peer in zip(ranks(tmp_path), (1, 0), strict=True):
        rank.recorder.failed((rank.send(peer, blocks=True),), error)
        rank.end(error)
    by_code = found(tmp_path)
    assert sorted(by_code) == ["PP931", "PP944"]
    assert [op.op[:9] for op in by_code["PP931"][0].witness.ops] == ["send 0->1", "send 1->0"]
    assert "batch" not in by_code["PP931"][0].help  # gloo has none


def test_a_rank_that_another_waits_for_has_ended(tmp_path):
    first, second = ranks(tmp_path)
    first.recorder.waits([first.recv(1)])
    second.end(ValueError("no data"))
    by_code = found(tmp_path)
    assert sorted(by_code) == ["PP933", "PP941", "PP944"]
    assert "rank 1 never issued its part" in by_code["PP933"][0].message
    assert "rank 1 raised ValueError: no data" in by_code["PP944"][0].message


def test_a_call_that_could_not_be_recorded(tmp_path):
    first, second = ranks(tmp_path)
    first.recorder.unread("send", TypeError("an argument of tomorrow"))
    end(first, second)
    (finding,) = found(tmp_path)["PP944"]
    assert finding.message == (
        "rank 0 issued a call of `send` that could not be recorded (TypeError: an argument of tomorrow)"
    )


def test_a_missing_log(tmp_path):
    first, _, third = ranks(tmp_path, 3)
    first.wait(first.send(1))
    third.wait(third.recv(1))
    first.wait(first.send(2))
    third.wait(third.recv(0))
    for rank in (first, third):
        rank.wait(rank.collective("barrier"))
        rank.end()
    (tmp_path / "rank_1.jsonl").unlink()
    assert list(found(tmp_path)) == ["PP942"]
    answer = run(tmp_path)
    assert answer.exit_code == 1
    assert "undecided: the answer depends on 1 gap in the logs (PP942)" in answer.output
    assert answer.output.splitlines()[-1] == f"next: copy rank_1.jsonl to {tmp_path}, and check again"


@pytest.mark.parametrize("number", [0, -1, 2**20 + 1, 10**9])
def test_a_number_of_ranks_that_no_job_has(tmp_path, number):
    (tmp_path / "rank_0.jsonl").write_text(
        f'{{"event": "start", "version": 1, "rank": 0, "num_ranks": {number}, "framework": "torch 2.13.0", '
        '"epoch_ns": 1, "time_ns": 1}\n'
    )
    answer = run(tmp_path)
    assert answer.exit_code == 2
    assert f"`num_ranks` is {number}, and a job has 1 to 1,048,576 ranks" in answer.output


PLAN = """\
pipeproof: 1
model: {kind: gpt, num_layers: 2, hidden_size: 8, num_heads: 2, ffn_size: 16, vocab_size: 32, seq_length: 4}
topology: {pp: 2}
schedule: {kind: 1f1b, num_micro_batches: 2, micro_batch_size: 1}
run: {backend: torch}
"""


@pytest.mark.parametrize("wrong", [None, "order", "size", "number"])
def test_against_a_plan(tmp_path, wrong):
    (tmp_path / "plan.yaml").write_text(PLAN)
    first, second = ranks(tmp_path / "logs")
    orders = {0: [0, 1], 1: [0, 1]} if wrong != "order" else {0: [1, 0], 1: [1, 0]}
    for micro_batch in orders[0]:
        shape = (8, 8) if wrong == "size" and micro_batch else (4, 8)
        for rank, stage in ((first, 0), (second, 1)):
            with rank.recorder.mark(stage=stage, micro_batch=micro_batch, kind="F"):
                rank.wait(rank.recv(0, rank.tensor(*shape)) if stage else rank.send(1, rank.tensor(*shape)))
    for micro_batch in [0] if wrong == "number" else [0, 1]:
        for rank, stage in ((first, 0), (second, 1)):
            with rank.recorder.mark(stage=stage, micro_batch=micro_batch, kind="B"):
                rank.wait(rank.send(0, rank.tensor(4, 8)) if stage else rank.recv(1, rank.tensor(4, 8)))
    end(first, second)
    findings = found(tmp_path / "logs", plan=load_plan(tmp_path / "plan.yaml"))
    differences = findings.pop("PP943", [])
    assert findings == {}
    assert [f.message.partition(": the plan has")[0] for f in differences] == {
        None: [],
        "order": [
            "rank 0, sends, position 0: another micro-batch",
            "rank 1, receives F from rank 0, position 0: another micro-batch",
        ],
        "size": ["rank 0, sends, position 1: another size", "rank 1, receives F from rank 0, position 1: another size"],
        "number": [
            "rank 0, receives B from rank 1, position 1: another number of messages",
            "rank 1, sends, position 1: another number of messages",
        ],
    }[wrong]


def test_a_plan_of_another_size(tmp_path):
    (tmp_path / "plan.yaml").write_text(PLAN)
    for rank in ranks(tmp_path / "logs", 3):
        rank.end()
    (finding,) = found(tmp_path / "logs", plan=load_plan(tmp_path / "plan.yaml"))["PP943"]
    assert finding.message == "the plan has 2 ranks, the recorded job 3"


def run(*arguments):
    return invoke("check", *arguments)


def test_the_command(tmp_path):
    crossing(tmp_path, waits_last=True)
    safe = run(tmp_path)
    assert safe.exit_code == 0, safe.output
    assert "8 operations on 2 ranks" in safe.output
    assert "note[PP411]" in run(tmp_path, "--strict").output
    assert run(tmp_path, "--strict").exit_code == 0
    stricter = run(tmp_path, "--queue", "pair", "--format", "json")
    assert stricter.exit_code == 1
    assert {f["code"] for f in json.loads(stricter.output)["findings"]} == {"PP401"}
    sarif = run(tmp_path, "--queue", "pair", "--format", "sarif")
    assert json.loads(sarif.output)["runs"][0]["results"][0]["ruleId"] == "PP401"


def test_the_example_of_the_page():
    result = run("examples/recording/crossed", "--ignore", "PP411")
    assert result.exit_code == 1
    page = (ROOT / "docs" / "recording.md").read_text(encoding="utf-8")
    shown = page.partition("```text\nerror[PP302]")[2].partition("\n```")[0]
    assert "the send at FIFO position 4" in shown
    assert f"error[PP302]{shown}\n" in result.output
    assert result.output.count("error[PP302]") == 2
