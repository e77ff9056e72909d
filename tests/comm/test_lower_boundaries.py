"""Lowering of what crosses boundaries: several tensors, other layouts on the two sides, sizes of micro-batches."""

from dataclasses import replace

import numpy as np
import pytest

from pipeproof.schedule.formats.text_form import format_program
from pipeproof.schedule.op_table import NONE, build_graph
from pipeproof.schedule.ops import CHILD_KINDS, RECV_KINDS, SEND_KINDS, OpKind
from pipeproof.verify.certificate import graph_digest
from tests.plans import subject
from tests.verify.programs import codes

TP2 = {"pp": 2, "tp": 2}


def transfers(graph, rank, kinds=SEND_KINDS | RECV_KINDS):
    return [i for i in graph.rank_ops(rank) if graph.ops[i].kind in kinds]


def test_each_tensor_of_a_boundary_has_a_message_and_a_wait_of_its_own():
    one = subject(
        topology=TP2,
        schedule={"num_micro_batches": 1},
        boundaries=[
            {"name": "hidden", "dims": "sbh"},
            {"name": "mask", "dims": "bs", "tp": "replicated", "dtype": "bool"},
        ],
        transport="partial",
    )
    graph = one.graph
    assert [str(graph.ops[i]) for i in graph.rank_ops(2) if graph.ops[i].kind not in CHILD_KINDS][:7] == [
        "1RECV_F0", "1RECV_F0", "WAIT(1RECV_F0)", "WAIT(1RECV_F0)", "1GATHER_F0", "1GATHER_F0", "1F0",
    ]  # fmt: skip
    sent = [graph.tensors[int(graph.tensor[i])] for i in transfers(graph, 0, SEND_KINDS)]
    assert [(t.member, t.dtype, t.placement) for t in sent] == [
        ("hidden", "float32", "invariant"), ("mask", "bool", "replicated"),
    ]  # fmt: skip
    back = [graph.tensors[int(graph.tensor[i])].member for i in transfers(graph, 2, SEND_KINDS)]
    assert back == ["hidden"]  # a mask has no gradient
    assert not codes(one)


@pytest.mark.parametrize("shape_exchange", ["none", "per_message"])
def test_a_file_that_names_each_tensor_is_used_as_it_is(shape_exchange, tmp_path):
    """Its waits were made as many as the boundary has tensors, once more for each tensor."""
    sections = {
        "boundaries": [{"name": "hidden", "dims": "sbh"}, {"name": "mask", "dims": "bs", "dtype": "bool"}],
        "transport": {"shape_exchange": shape_exchange},
    }
    generated = subject(**sections)
    file = tmp_path / "program.txt"
    file.write_text(format_program(generated.graph))
    read = subject(**sections, schedule={"kind": "file", "path": str(file)})
    assert not codes(read)
    assert graph_digest(read) == graph_digest(generated)


@pytest.mark.parametrize(
    ("tp", "receiver_tp", "num_messages"),
    [("sharded(s)", "sharded(b)", 2), ("invariant", "sharded(s)", 1), ("sharded(s)", "invariant", 2)],
)
def test_where_layouts_differ_messages_bring_each_element_to_who_wants_it(tp, receiver_tp, num_messages):
    one = subject(
        topology=TP2, schedule={"num_micro_batches": 1, "micro_batch_size": 2},
        boundaries=[{"name": "extra", "dims": "sb", "tp": tp, "receiver_tp": receiver_tp}],
    )  # fmt: skip
    graph = one.graph
    for rank in (2, 3):
        receives = transfers(graph, rank, frozenset({OpKind.RECV_FORWARD}))
        assert len({int(graph.peer[i]) for i in receives}) == num_messages
        tensor = graph.tensors[int(graph.tensor[receives[0]])]
        assert sum(int(graph.stop[i] - graph.start[i]) for i in receives) == tensor.numel
    assert not codes(one)


def test_a_wrong_range_of_a_reshard_is_found():
    base = subject(
        topology=TP2, boundaries=[{"name": "extra", "dims": "sb", "tp": "sharded(s)", "receiver_tp": "sharded(b)"}]
    )
    rows = base.graph.rows()
    place = next(i for i, row in enumerate(rows[0]) if row.op.kind is OpKind.SEND_FORWARD)
    rows[0][place] = replace(rows[0][place], start=rows[0][place].start + 1, stop=rows[0][place].stop + 1)
    assert "PP201" in codes(base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups)))


def test_sizes_of_micro_batches_reach_messages_and_collectives():
    one = subject(topology={**TP2, "sequence_parallel": True}, schedule={"seq_lengths": [8, 4, 8, 2]})
    graph = one.graph
    sends = transfers(graph, 0, frozenset({OpKind.SEND_FORWARD}))
    assert [int(graph.stop[i]) for i in sends] == [4 * 2 * 16, 2 * 2 * 16, 4 * 2 * 16, 1 * 2 * 16]
    of_forward = {
        batch: int(graph.stop[i])
        for batch in range(4)
        for i in np.flatnonzero((graph.parent != NONE) & (graph.work_item == batch) & (graph.rank == 0))[:1]
    }
    assert of_forward == {0: 256, 1: 128, 2: 256, 3: 64}  # the embedding's reduce-scatter of all tokens
    assert not codes(one)
    assert not codes(subject(topology=TP2, schedule={"last_micro_batch_size": 1}))


@pytest.mark.parametrize("axes", [{"cp": 2}, {"ep": 2}, {"cp": 2, "tp": 2, "dp": 2, "sequence_parallel": True}])
def test_context_and_expert_axes_are_lowered_and_right(axes):
    one = subject(topology={"pp": 2, **axes}, schedule={"num_micro_batches": 2})
    graph = one.graph
    own = {group.axis for group in graph.groups}
    assert own == {axis for axis in ("tp", "cp", "ep", "dp") if axes.get(axis, 1) > 1}
    reductions = {op.axis for op in graph.ops if op.kind is OpKind.REDUCE_GRAD}
    assert reductions == own - (set() if axes.get("sequence_parallel") else {"tp"})
    assert not codes(one)
