"""Messages are looked into once for all that are alike: of two that differ in one respect, the damaged one is found.

Micro-batch 0 is right and comes first; micro-batch 1 is equal except for the change of the test.
"""

from pipeproof.schedule.op_table import Group, Row, TensorSpec, build_graph
from pipeproof.schedule.ops import parse_op
from pipeproof.verify.boundary_transport import RULES
from pipeproof.verify.subject import graph_subject
from tests.plans import subject

ROWS_CUT = TensorSpec("rows", (4, 4), "float32", "sharded(0)", "sh")
COLUMNS_CUT = TensorSpec("columns", (8, 2), "float32", "sharded(1)", "sh")


def message(rows, micro_batch, sender, receiver, *, sent=0, wanted=0, part=(0, 16)):
    """One message from stage 0 to stage 1, of a range of the sender's tensor into the same of the receiver's."""
    rows[sender].append(Row(parse_op(f"0SEND_F{micro_batch}"), receiver, sent, *part))
    rows[receiver].append(Row(parse_op(f"1RECV_F{micro_batch}"), sender, wanted, *part))


def graph_of(rows, *groups, tensors=(ROWS_CUT, COLUMNS_CUT)):
    return build_graph(rows, tensors, [Group("tp", ranks) for ranks in groups])


def damaged(one):
    """(receivers that lack something, the end of the message) of the one finding."""
    (finding,) = RULES[0].check(one)
    return {item.rank for item in finding.witness.lost}, finding.message.partition(" wrongly ")[2]


def between_teams(**changes):
    """Two tensor-parallel groups of two ranks, whole tensors; ``changes`` are of both messages of micro-batch 1."""
    rows = [[] for _ in range(4)]
    for k in range(2):
        message(rows, 0, k, 2 + k)
        message(rows, 1, k, 2 + k, **changes)
    return graph_subject(graph_of(rows, (0, 1), (2, 3)))


def test_all_alike_is_right():
    assert list(RULES[0].check(between_teams())) == []


def test_another_layout_at_the_receiver():
    assert damaged(between_teams(wanted=1)) == ({2, 3}, "in micro-batch 1")


def test_another_layout_at_the_sender():
    assert damaged(between_teams(sent=1)) == ({2, 3}, "in micro-batch 1")


def test_another_place_in_the_group():
    rows = [[] for _ in range(4)]
    for k in range(2):
        message(rows, 0, k, 2 + k)
        message(rows, 1, k, 3 - k)
    assert damaged(graph_subject(graph_of(rows, (0, 1), (2, 3)))) == ({2, 3}, "in micro-batch 1")


def test_a_slice_from_another_group():
    """Two groups send; in micro-batch 1 the second slice comes from the other one, from the same place in it."""
    tensor = TensorSpec("hidden", (16,), "float32", "invariant", "h")
    rows = [[] for _ in range(6)]
    for micro_batch, second in ((0, 1), (1, 3)):
        message(rows, micro_batch, 0, 4, part=(0, 8))
        message(rows, micro_batch, second, 5, part=(8, 16))
        for k, rank in enumerate((4, 5)):
            gather = parse_op(f"1GATHER_F{micro_batch}")
            rows[rank].append(Row(gather, tensor=0, start=8 * k, stop=8 * k + 8, group=2))
    one = graph_subject(graph_of(rows, (0, 1), (2, 3), (4, 5), tensors=[tensor]))
    receivers, where = damaged(one)
    assert where == "in micro-batch 1"
    assert receivers == {4, 5}  # 4 is sent the right slice itself, and gathers the other


def test_another_replica():
    """With data parallelism both stages have two replicas; in micro-batch 1 they send each other's tensors."""
    base = subject(topology={"pp": 2, "dp": 2}, schedule={"num_micro_batches": 2})
    rows = base.graph.rows()
    peers = {}
    for rank, mine in enumerate(rows):
        for place, row in enumerate(mine):
            if str(row.op) in ("0SEND_F1", "1RECV_F1"):
                peers[rank] = place, row.peer
    swapped = {0: 1, 1: 0, 2: 3, 3: 2}
    assert sorted(peers) == sorted(swapped)
    for rank, (place, peer) in peers.items():
        old = rows[rank][place]
        rows[rank][place] = Row(old.op, swapped[peer], old.tensor, old.start, old.stop)
    one = base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))
    assert damaged(one) == ({2, 3}, "in micro-batch 1")
    assert [finding.help for finding in RULES[0].check(one)] == [None]  # it is not the transport


def test_a_rank_of_a_group_represents_several():
    """Each of the ranks stands for two of a group of four, so the second has places 2 and 3 in it."""
    for swap, found in ((False, []), (True, [{2, 3}])):
        rows = [[] for _ in range(4)]
        for k in range(2):
            message(rows, 0, k, 3 - k if swap else 2 + k)
        graph = build_graph(rows, [ROWS_CUT], [Group("tp", (0, 1), 2), Group("tp", (2, 3), 2)])
        findings = RULES[0].check(graph_subject(graph))
        assert [{item.rank for item in finding.witness.lost} for finding in findings] == found
