"""Reach of the layout rules: the entries, computations and axes that they check, and their findings."""

import pytest

from pipeproof.schedule.op_table import Row, build_graph
from pipeproof.schedule.ops import CHILD_KINDS, parse_op
from pipeproof.stages.describe.index_map import IndexMap
from pipeproof.stages.describe.typed_ops import ProgramBuilder
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.declared_facts import Facts, MapUse
from pipeproof.verify.layouts import RULES
from pipeproof.verify.subject import graph_subject
from tests.plans import subject

RULE = {rule.doc.code: rule for rule in RULES}


def found_in(code, one):
    return list(RULE[code].check(one))


def with_facts(**facts):
    return graph_subject(build_graph([[]], [], []), facts=Facts(**facts))


def changed(base, change):
    """The subject with ``change`` applied to each row; None leaves a row out."""
    rows = [[new for row in mine if (new := change(row)) is not None] for mine in base.graph.rows()]
    return base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))


# --- 209: which entries stand for the activation ---

RIGHT = {"name": "hidden", "dims": "sbh"}
OTHERWISE = {"name": "skip", "dims": "sbh", "tp": "sharded(h)"}


@pytest.mark.parametrize(
    ("entries", "checked"),
    [
        ([OTHERWISE, RIGHT], 1),
        ([RIGHT, OTHERWISE], 0),  # the first of an edge is the activation; the second is a tensor of its own
        ([{**RIGHT, "edge": 0}, {**RIGHT, "edge": 1}, OTHERWISE], 0),  # next to both, and first on neither
        ([{**RIGHT, "edge": 1}, OTHERWISE], 1),  # ... which it is on edge 0 here
    ],
)
def test_the_first_entry_of_each_edge_is_the_activation(entries, checked):
    one = subject(model={"num_layers": 3}, topology={"pp": 3, "tp": 2}, boundaries=entries)
    assert [f.message.partition(" is")[0] for f in found_in("PP209", one)] == ["`skip`"] * checked


# --- 208: issued collectives ---


@pytest.mark.parametrize(
    ("sizes", "elements"),
    [
        ({"seq_lengths": [4, 8]}, {"0F0": 128, "0F1": 256}),
        ({"seq_lengths": [4, 4]}, {"0F0": 128, "0F1": 128}),
        ({"num_micro_batches": 1, "last_micro_batch_size": 1}, {"0F0": 128}),
    ],
)
def test_the_first_micro_batch_may_be_smaller_than_the_model_allows(sizes, elements):
    """Layers are described for 2 sequences of 8 tokens, 256 elements; issued sizes follow each micro-batch."""
    one = subject(topology={"pp": 2, "tp": 2}, schedule={"num_micro_batches": 2, **sizes})
    issued = {
        str(row.op.target): row.stop - row.start for row in one.graph.rows()[0] if "/0.ALL_REDUCE:tp" in str(row.op)
    }
    assert {op: issued[op] for op in elements} == elements
    assert check_subject(one).errors == ()


@pytest.mark.parametrize(
    "schedule",
    [
        {"num_micro_batches": 2},
        {"num_micro_batches": 2, "last_micro_batch_size": 1},
        {"num_micro_batches": 1, "last_micro_batch_size": 1},
    ],
)
def test_stages_and_micro_batches_that_the_plan_has_not_need_nothing(schedule):
    """The rules on completeness report them."""
    base = subject(topology={"pp": 2, "tp": 2}, schedule=schedule)
    rows = base.graph.rows()
    for mine in rows:
        mine += [Row(parse_op(text)) for text in ("7F0", "7F9", "2F0", "2F2")]
        mine += [
            Row(parse_op(text)) for text in ("0F2", "1F2") if "last_micro_batch_size" in schedule
        ]  # of unknown size
    assert found_in("PP208", base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))) == []


def without_collectives(base, *ops):
    """The subject with nothing issued by these computations."""
    return changed(base, lambda row: None if row.op.kind in CHILD_KINDS and str(row.op.target) in ops else row)


REGATHERED = {
    "topology": {"pp": 2, "tp": 2, "sequence_parallel": True},
    "memory": {"sequence_parallel_activations": "regather"},
}


@pytest.mark.parametrize(("kind", "op"), [("zb_h1", "0W1"), ("1f1b", "0B1")])
def test_what_is_gathered_again_is_needed_by_the_gradients_of_weights(kind, op):
    base = subject(schedule={"kind": kind, "num_micro_batches": 2}, **REGATHERED)
    assert found_in("PP208", base) == []
    (found,) = found_in("PP208", without_collectives(base, op))
    assert found.message.startswith(f"{op} on rank 0")
    foreign = base.graph.rows()
    for mine in foreign:  # a stage that the plan has not, with a collective
        mine += [Row(parse_op("7F0")), Row(parse_op("7F0/0.ALL_REDUCE:tp"), group=0, stop=7)]
    assert found_in("PP208", base.with_graph(build_graph(foreign, base.graph.tensors, base.graph.groups))) == []


# --- 206: axes ---


def test_an_axis_that_the_mesh_has_not_owes_no_reduction():
    program = ProgramBuilder("layer", {"tp": 2}, {"s": 8, "h": 4})
    program.input("x", "s h", tp="S(s)")
    program.parameter("g", "h", reduced_over=["tp", "cp"])
    program.result(program.apply("y", "x", "g", along="h"), tp="S(s)")
    assert found_in("PP206", with_facts(typed_programs=(program.build(),))) == []


# --- 210 and 211: index maps ---


def test_a_rank_that_only_one_side_names_is_compared_with_nothing():
    whole = IndexMap.of([(0, 0, 4)])
    (lacks,) = found_in("PP211", with_facts(map_uses=(MapUse("w", {0: whole}, {0: whole, 1: whole}),)))
    assert lacks.message == "`w`: local element 0 of rank 1 is nothing and is taken for global 0"
    assert [(r.rank, r.source_rank, r.start, r.stop) for r in lacks.witness.lost] == [(1, 0, 0, 4)]
    (surplus,) = found_in("PP211", with_facts(map_uses=(MapUse("w", {0: whole, 1: whole}, {0: whole}),)))
    assert surplus.message == "`w`: local element 0 of rank 1 is global 0 and is taken for nothing"
    assert check_subject(with_facts(map_uses=(MapUse("w", {0: whole}, {0: whole}),))).errors == ()


# --- 209: layers that are empty ---


def test_a_stage_with_one_empty_layer_among_others_makes_the_layout_of_the_others():
    one = subject(
        model={"num_layers": 2, "empty_layers": {"head": 1}},
        topology={"pp": 2, "tp": 2, "sequence_parallel": True},
        stages=[["embed", "layer.0"], ["empty.0", "layer.1", "norm", "head"]],
        boundaries=[{**RIGHT, "tp": "sharded(s)", "receiver_tp": "invariant"}],
    )
    assert [f.message.partition(", and ")[2] for f in found_in("PP209", one)] == ["the layers take it sharded(s)"]
