"""Order of posted transfers: the channel's, a queue of another name, a stricter runtime's queue."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.rank.executor_support import require_executable
from pipeproof.exec.rank.group_channels import TaskQueue
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import SEND_KINDS, TRANSFER_KINDS
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]


class Channels:
    """Notes in which calls transfers were posted, and behind which others."""

    def __init__(self):
        self.posted = []

    def post(self, channel, buffer, after=()):
        transfer = SimpleNamespace(channel=channel, buffer=buffer, wait=lambda: None, behind=list(after))
        self.posted.append(transfer)
        return transfer


def posted(rewrite=lambda rows: None, queue=None):
    """The transfers of rank 0 of two stages, by operation, as they were posted."""
    import paddle

    from pipeproof.exec.rank.paddle.arrays import PaddleArrays
    from pipeproof.exec.rank.transfers import RankTransfers

    one = subject(schedule={"num_micro_batches": 3}, transport={"queue": queue})
    rows = one.graph.rows()
    rewrite(rows[0])
    plan = one.with_graph(build_graph(rows, one.graph.tensors, one.graph.groups)).plan
    channels = Channels()
    transfers = RankTransfers(plan, 0, channels, PaddleArrays())
    transfers.begin()
    texts, moments = [], []
    for op_id in plan.graph.rank_ops(0):
        row = plan.graph.row(op_id)
        if row.op.kind in TRANSFER_KINDS:
            unit = transfers.of(row.op)
            if row.op.kind in SEND_KINDS:
                unit.output = (paddle.zeros(list(plan.graph.tensors[row.tensor].shape)),)
            before = len(channels.posted)
            transfers.post(op_id)
            texts.append(str(row.op))
            moments.append(len(channels.posted) - before)
    names = dict(zip(map(id, channels.posted), texts, strict=True))
    behind = {text: {names[id(t)] for t in one.behind} for text, one in zip(texts, channels.posted, strict=True)}
    return behind, dict(zip(texts, moments, strict=True))


def change(rows, text, **more):
    (place,) = (place for place, row in enumerate(rows) if str(row.op) == text)
    rows[place] = replace(rows[place], **more)


def test_each_end_of_a_channel_has_an_order_of_its_own():
    behind, _ = posted()
    assert behind["0SEND_F0"] == set()
    assert behind["0SEND_F1"] == {"0SEND_F0"}
    assert behind["0RECV_B0"] == set()
    assert behind["0RECV_B1"] == {"0RECV_B0"}


def test_where_a_pair_shares_one_queue_each_transfer_comes_behind_the_one_before():
    behind, _ = posted(queue="pair")
    assert behind["0RECV_B0"] == {"0SEND_F1"}
    assert behind["0SEND_F2"] == {"0RECV_B0", "0SEND_F1"}
    directions, _ = posted(queue="direction")
    assert directions["0RECV_B0"] == set()


def test_a_queue_of_another_name_is_one_more_order():
    def both(rows):
        for op in ("0SEND_F1", "0RECV_B1"):
            change(rows, op, queue="side")

    behind, _ = posted(both)
    assert behind["0RECV_B1"] == {"0SEND_F1", "0RECV_B0"}
    assert behind["0RECV_B0"] == set()


def test_a_batch_is_posted_with_its_last_member_and_has_no_order_inside():
    def batch(rows):
        for op in ("0SEND_F1", "0RECV_B0"):
            change(rows, op, batch=0)

    behind, moments = posted(batch, queue="pair")
    assert (moments["0SEND_F1"], moments["0RECV_B0"]) == (0, 2)
    assert behind["0SEND_F1"] == behind["0RECV_B0"] == {"0SEND_F0"}
    assert behind["0SEND_F2"] == {"0SEND_F1", "0RECV_B0"}


def refused(one, rows, text):
    with pytest.raises(PipeproofError, match=text) as error:
        require_executable(one.with_graph(build_graph(rows, one.graph.tensors, one.graph.groups)))
    assert error.value.findings[0].code == "PP909"


def test_a_batch_that_is_closed_after_a_later_message_of_its_channel_is_not_executed():
    """It would be posted behind that message, and the peer would take the one for the other."""
    one = subject(schedule={"num_micro_batches": 3})
    rows = one.graph.rows()
    for op in ("0SEND_F0", "0SEND_F2"):
        change(rows[0], op, batch=0)
    refused(one, rows, "the batch of 0SEND_F0 is closed after 0SEND_F1")


@pytest.mark.parametrize(
    ("op", "attributes"),
    [
        ("1SEND_B0", {"scale": "1/2"}),
        ("0RECV_B0", {"scale": "2"}),
        ("1F0", {"scale": "1/global_tokens"}),
        ("0B0", {"reduction": "overwrite"}),
    ],
)
def test_a_factor_that_stages_do_not_apply_is_not_executed(op, attributes):
    one = subject(schedule={"num_micro_batches": 2})
    require_executable(one)
    rows = one.graph.rows()
    change(rows[int(op[0])], op, **attributes)
    refused(one, rows, f"{op} has (scale|reduction) ")


def test_an_end_of_a_channel_waits_for_what_it_comes_behind():
    seen, go = [], threading.Event()

    def slowly(buffer):
        go.wait(10)
        seen.append(buffer)

    first, second = TaskQueue("first"), TaskQueue("second")
    one = first.post("one", lambda: slowly("one"))
    two = second.post("two", lambda: seen.append("two"), [one])
    three = second.post("three", lambda: seen.append("three"))
    assert not two.done.wait(0.05)
    go.set()
    for transfer in (one, two, three):
        transfer.wait()
    assert seen == ["one", "two", "three"]
    assert one.end_ns <= two.start_ns
    for end in (first, second):
        end.close()
