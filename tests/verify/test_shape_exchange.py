"""Messages with shapes: lowering and cost of a plan, and every message that is missing, superfluous or late."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.comm.backends import TABLES, table_named
from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.rank.executor_support import require_executable, require_issuable
from pipeproof.schedule.columns import Row
from pipeproof.schedule.ops import META_KINDS, parse_op, wait_for
from pipeproof.sim.link_costs import bytes_of
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import PlanFileError, plan_from_dict
from pipeproof.verify.certificate import graph_digest
from pipeproof.verify.subject import program_subject
from tests.plans import plan_dict, subject
from tests.verify.programs import codes, finding_of, mutated
from tests.zoo.programs import program
from tests.zoo.rule_mutants import in_one_group_call

EXCHANGING = {"shape_exchange": "per_message"}

ONE = """
    rank 0: 0F0 0SEND_META_F0 0SEND_F0 WAIT(0SEND_META_F0) WAIT(0SEND_F0)
    rank 1: {}
"""


def exchanging(**sections):
    """A plan that sends the shape of each tensor ahead of it."""
    return subject(**{"transport": EXCHANGING, **sections})


def texts(one, rank):
    return [str(one.graph.ops[op_id]) for op_id in one.graph.rank_ops(rank)]


def test_a_plan_announces_each_tensor_and_posts_its_receive_when_the_shape_has_come():
    one = exchanging(schedule={"num_micro_batches": 1})
    assert texts(one, 0)[:7] == [
        "0F0", "0SEND_META_F0", "0SEND_F0", "0RECV_META_B0", "WAIT(0RECV_META_B0)", "0RECV_B0", "WAIT(0RECV_B0)",
    ]  # fmt: skip
    assert texts(one, 0)[7:10] == ["WAIT(0SEND_META_F0)", "WAIT(0SEND_F0)", "0B0"]
    assert texts(one, 1)[:5] == ["1RECV_META_F0", "WAIT(1RECV_META_F0)", "1RECV_F0", "WAIT(1RECV_F0)", "1F0"]
    assert codes(one) == set()


def test_a_plan_without_the_key_is_the_plan_it_was():
    assert graph_digest(subject(transport={"shape_exchange": "none"})) == graph_digest(subject())
    assert graph_digest(exchanging()) != graph_digest(subject())


@pytest.mark.parametrize(
    "sections",
    [
        {"topology": {"pp": 2, "tp": 2, "sequence_parallel": True}},
        {"topology": {"pp": 2, "tp": 2}, "transport": {**EXCHANGING, "forward": "partial", "backward": "partial"}},
        {"topology": {"pp": 2, "dp": 2}, "schedule": {"last_micro_batch_size": 1}},
        {"boundaries": [{"name": "hidden", "dims": "sbh"}, {"name": "tokens", "dims": "bs", "dtype": "int64"}]},
        {"schedule": {"kind": "zb_h1"}, "buffers": {"free_output": "after_send_done", "send_slots": 4}},
    ],
    ids=["sequence parallel", "partial", "small last micro-batch", "two tensors", "zero bubble"],
)
def test_every_kind_of_message_has_its_shape_ahead(sections):
    one = exchanging(**sections)
    transfers = one.graph.is_kind(META_KINDS).sum()
    assert transfers == (one.graph.channel >= 0).sum() / 2
    assert codes(one) == set()


def test_receives_are_not_posted_ahead_of_their_shapes():
    with pytest.raises(PlanFileError) as caught:
        plan_from_dict(plan_dict(transport={**EXCHANGING, "recv_order": "prefetch_one"}))
    assert [finding.code for finding in caught.value.findings] == ["PP106"]


@pytest.mark.parametrize("require", [require_executable, require_issuable])
def test_a_run_does_not_exchange_shapes(require):
    with pytest.raises(PipeproofError) as caught:
        require(exchanging())
    (found,) = caught.value.findings
    assert (found.code, "shape_exchange per_message" in found.message) == ("PP909", True)


# --- the price ---


@pytest.mark.parametrize(("p2p", "messages"), [("rendezvous", 4), ("async", 2)])
def test_a_tensor_begins_to_move_when_its_receive_is_posted_unless_sends_are_buffered(p2p, messages):
    """Two stages, one micro-batch: each way the latency of the shape, then the latency of the tensor."""
    sections = {
        "schedule": {"num_micro_batches": 1},
        "cost": {"forward_us": 10, "backward_us": 20, "p2p_latency_us": 7, "p2p": p2p},
    }
    assert simulate(subject(**sections).plan).makespan == 2 * 30 + 2 * 7
    assert simulate(exchanging(**sections).plan).makespan == 2 * 30 + messages * 7


def test_a_shape_is_an_int64_for_each_dim():
    network = {"node": {"bandwidth": 1, "latency_us": 3}, "between": {"bandwidth": 1}, "ranks_per_node": 2}
    one = exchanging(cost={"network": network}, boundaries=[{"name": "hidden", "dims": "sbh"}])
    num_bytes = bytes_of(one.plan, one.plan.links)
    assert set(num_bytes[one.graph.is_kind(META_KINDS)].tolist()) == {3 * 8}


# --- missing, superfluous and late messages ---


def test_a_missing_message_is_named_at_the_tensor_that_lacks_it():
    def remove(rows):
        for own in rows:
            own[:] = [row for row in own if "META_B2" not in str(row.op)]

    mutant = mutated(exchanging(), remove)
    found = finding_of(mutant, "PP314")
    assert codes(mutant) == {"PP314"}
    assert [(op.rank, op.op) for op in found.witness.ops] == [(0, "0RECV_B2"), (1, "1SEND_B2")]
    assert "1SEND_META_B2 on rank 1, and 0RECV_META_B2" in found.help
    assert "PP314" not in codes(mutated(subject(), remove))  # nothing says that shapes are exchanged


def test_a_message_without_a_tensor_is_named():
    right = program(ONE.format("1RECV_META_F0! 1RECV_F0! 1F0"))
    assert codes(right) == set()

    def twice(rows):
        rows[0][2:2] = [Row(parse_op("0SEND_META_F0"), peer=1), Row(parse_op("WAIT(0SEND_META_F0)"))]
        rows[1][2:2] = [Row(parse_op("1RECV_META_F0"), peer=0), Row(parse_op("WAIT(1RECV_META_F0)"))]

    mutant = mutated(right, twice)
    found = finding_of(mutant, "PP314")
    assert codes(mutant) == {"PP314"}
    assert [op.op_id for op in found.witness.ops] == [mutant.graph.offsets[1] + 2, 2]


@pytest.mark.parametrize(
    ("receiver", "found"),
    [
        ("1RECV_META_F0 WAIT(1RECV_META_F0) 1RECV_F0! 1F0", set()),
        ("1RECV_META_F0 WAIT(1RECV_META_F0){queue=host} 1RECV_F0! 1F0", set()),
        ("1RECV_META_F0 1RECV_F0 WAIT(1RECV_META_F0) WAIT(1RECV_F0) 1F0", {"PP315"}),
        ("1RECV_META_F0 WAIT(1RECV_META_F0){queue=side} 1RECV_F0! 1F0", {"PP315"}),
        ("1RECV_META_F0 1RECV_F0! 1F0", {"PP505"}),
        ("1RECV_F0 1RECV_META_F0 WAIT(1RECV_F0) WAIT(1RECV_META_F0) 1F0", {"PP302"}),
    ],
    ids=["waited", "by the host", "too late", "on a side queue", "never", "behind its tensor"],
)
def test_a_receive_is_posted_when_its_shape_is_known(receiver, found):
    assert codes(program(ONE.format(receiver))) == found


def test_a_shape_behind_its_tensor_on_both_sides_comes_too_late():
    text = """
        rank 0: 0F0 0SEND_F0 0SEND_META_F0 WAIT(0SEND_F0) WAIT(0SEND_META_F0)
        rank 1: 1RECV_F0! 1RECV_META_F0! 1F0
    """
    assert codes(program(text)) == {"PP315"}
    assert "1RECV_META_F0 comes later" in finding_of(program(text), "PP315").message


def test_shapes_that_are_announced_ahead_belong_to_their_own_tensors():
    text = """
        tensor short: shape=4 dtype=float32 dims=s
        tensor long: shape=8 dtype=float32 dims=s
        rank 0: 0F0 0F1 0SEND_META_F0!{tensor=0} 0SEND_META_F1!{tensor=1} 0SEND_F0!{tensor=0} 0SEND_F1!{tensor=1}
        rank 1: 1RECV_META_F0! 1RECV_META_F1! 1RECV_F0!{tensor=0} 1RECV_F1!{tensor=1} 1F0 1F1
    """
    assert codes(program(text)) == set()
    crossed = text.replace("META_F0!{tensor=0}", "META_F0!{tensor=1}")
    assert codes(program(crossed)) == {"PP313"}


@given(data=st.data())
def test_every_change_of_one_shape_message_is_found(data):
    """Dropped at one end or both, received behind its tensor, or sent on another communicator."""
    kind = data.draw(st.sampled_from(["1f1b", "gpipe", "zb_h1"]))
    base = exchanging(topology={"pp": data.draw(st.sampled_from([2, 4]))}, schedule={"kind": kind})
    graph = base.graph
    sends = [op_id for op_id in range(graph.num_ops) if str(graph.ops[op_id].kind).startswith("SEND_META")]
    send = data.draw(st.sampled_from(sends))
    receive = int(graph.match[send])
    change = data.draw(st.sampled_from(["both", "send", "receive", "late", "elsewhere"]))

    def places(rows, op_id):
        rank = int(graph.rank[op_id])
        own = rows[rank]
        op = graph.ops[op_id]
        return (
            own,
            op_id - int(graph.offsets[rank]),
            next(i for i, row in enumerate(own) if str(row.op) == f"WAIT({op})"),
        )

    def alter(rows):
        ends = {"both": (send, receive), "send": (send,), "receive": (receive,)}.get(change, ())
        for op_id in ends:
            own, place, wait = places(rows, op_id)
            del own[wait], own[place]
        if change == "late":
            own, _, wait = places(rows, receive)
            own.insert(wait + 1, own.pop(wait))
        if change == "elsewhere":
            own, place, _ = places(rows, send)
            own[place] = dataclasses.replace(own[place], communicator="elsewhere")

    assert codes(base) == set()
    found = codes(mutated(base, alter))
    assert found >= {{"both": "PP314", "late": "PP315"}.get(change, "PP301")}


# --- the size of a group call ---


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_a_group_call_is_too_large_for_nccl_only(table):
    large, full = (dataclasses.replace(in_one_group_call(size)(), backend=table) for size in (257, 256))
    assert codes(full) == set()
    assert codes(large) == ({"PP316"} if "nccl" in table.name else set())


def test_a_group_call_is_counted_by_rank_and_batch():
    found = finding_of(in_one_group_call(300)(), "PP316")
    assert "rank 0 issues 300 sends and receives in one batch" in found.message
    assert [op.op for op in found.witness.ops] == ["0SEND_F0", "0SEND_F256"]

    def divide(rows):
        rows[0][300:600] = [
            dataclasses.replace(row, batch=0 if i < 150 else 1) for i, row in enumerate(rows[0][300:600])
        ]

    assert codes(mutated(in_one_group_call(300)(), divide)) == set()


def test_transfers_in_no_batch_are_no_group_call():
    """More of them than one call may hold; all are posted one by one."""
    table = dataclasses.replace(table_named("torch-nccl"), max_batched_transfers=2)
    lines = (
        [f"0F{i} 0SEND_F{i}{{peer=1}}" for i in range(3)],
        [f"1RECV_F{i}{{peer=0}} WAIT(1RECV_F{i}) 1F{i}" for i in range(3)],
    )
    text = f"rank 0: {' '.join(lines[0])} WAIT(0SEND_F0) WAIT(0SEND_F1) WAIT(0SEND_F2)\nrank 1: {' '.join(lines[1])}"
    assert "PP316" not in codes(program_subject(text, backend=table))
    for sizes, expected in (([2, 1], set()), ([1, 2], set()), ([3], {"PP316"})):
        batches = [batch for batch, size in enumerate(sizes) for _ in range(size)]
        batched = " ".join(
            [*(f"0F{i}" for i in range(3)), *(f"0SEND_F{i}{{peer=1 batch={b}}}" for i, b in enumerate(batches))]
        )
        ends = f"rank 0: {batched} WAIT(0SEND_F0) WAIT(0SEND_F1) WAIT(0SEND_F2)\nrank 1: {' '.join(lines[1])}"
        assert {"PP316"} & codes(program_subject(ends, backend=table)) == expected


def announced(*receiver, sender):
    return program_subject(f"rank 0: {sender}\nrank 1: {' '.join(receiver)}")


def test_one_tensor_of_two_may_be_announced():
    """The second tensor has no message of its own, and is received into a buffer of the first one's shape."""
    sender = "0F0 0SEND_META_F0{peer=1} 0SEND_F0{peer=1} 0F1 0SEND_F1{peer=1} "
    sender += "WAIT(0SEND_META_F0) WAIT(0SEND_F0) WAIT(0SEND_F1)"
    receiver = ("1RECV_META_F0{peer=0}", "WAIT(1RECV_META_F0)", "1RECV_F0{peer=0}", "WAIT(1RECV_F0)", "1F0")
    later = ("1RECV_F1{peer=0}", "WAIT(1RECV_F1)", "1F1")
    assert codes(announced(*receiver, *later, sender=sender)) == set()
    early = ("1RECV_META_F0{peer=0}", "1RECV_F0{peer=0}", "WAIT(1RECV_META_F0)", "WAIT(1RECV_F0)", "1F0")
    found = finding_of(announced(*early, *later, sender=sender), "PP315")
    assert "it waits for 1RECV_META_F0 only later, or on another queue" in found.message
    assert [op.op for op in found.witness.ops] == ["1RECV_META_F0", "1RECV_F0"]


def test_a_tensor_without_any_shape_hides_no_other_that_comes_too_early():
    sender = "0F0 0SEND_META_F0{peer=1} 0SEND_F0{peer=1} 0RECV_B0{peer=1} WAIT(0RECV_B0) 0B0 "
    sender += "WAIT(0SEND_META_F0) WAIT(0SEND_F0)"
    early = "1RECV_META_F0{peer=0} 1RECV_F0{peer=0} WAIT(1RECV_META_F0) WAIT(1RECV_F0) 1F0 1B0 "
    early += "1SEND_B0{peer=0} WAIT(1SEND_B0)"
    assert codes(announced(early, sender=sender)) == {"PP315"}


def test_a_plan_without_the_key_needs_no_shapes():
    """A plan without shape exchanges reports neither a tensor with an announced shape nor one without."""
    base = subject(schedule={"num_micro_batches": 2})

    def announce(rows):
        for rank, text, peer in ((0, "0SEND_F0", 1), (1, "1RECV_F0", 0)):
            place = next(i for i, row in enumerate(rows[rank]) if str(row.op) == text)
            meta = parse_op(text.replace("_F", "_META_F"))
            rows[rank][place:place] = [Row(meta, peer), Row(wait_for(meta))]

    assert "PP314" not in codes(mutated(base, announce))
