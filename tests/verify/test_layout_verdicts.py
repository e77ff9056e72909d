"""Reach of the layout rules: the entries, computations and axes that they check, and their findings."""

import dataclasses

import pytest

from pipeproof.schedule.op_table import Row, build_graph
from pipeproof.schedule.ops import CHILD_KINDS, parse_op
from pipeproof.stages.describe.index_map import IndexMap
from pipeproof.stages.describe.typed_ops import ProgramBuilder
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.declared_facts import Facts, HeldTensor, MapUse
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


# --- 208: what the graph issues ---


def test_each_stage_and_kind_that_issues_otherwise_is_named_once():
    base = subject(topology={"pp": 2, "tp": 2})
    wrong = changed(base, lambda row: None if row.op.kind in CHILD_KINDS else row)
    messages = [f.message for f in found_in("PP208", wrong)]
    assert sorted(message.split()[0] for message in messages) == ["0B0", "0F0", "1B0", "1F0"]
    assert all(message.endswith("; so in 4 micro-batches") for message in messages)


def test_the_size_of_a_collective_does_not_depend_on_where_its_range_begins():
    def moved(row):
        is_child = row.op.kind in CHILD_KINDS
        return dataclasses.replace(row, start=row.start + 8, stop=row.stop + 8) if is_child else row

    base = subject(topology={"pp": 2, "tp": 2})
    assert found_in("PP208", changed(base, moved)) == []


@pytest.mark.parametrize(
    ("sizes", "elements"),
    [
        ({"seq_lengths": [4, 8]}, {"0F0": 128, "0F1": 256}),
        ({"seq_lengths": [4, 4]}, {"0F0": 128, "0F1": 128}),
        ({"num_micro_batches": 1, "last_micro_batch_size": 1}, {"0F0": 128}),
    ],
)
def test_the_first_micro_batch_may_be_smaller_than_the_model_allows(sizes, elements):
    """Layers are described for 2 sequences of 8 tokens, 256 elements; what is issued goes with each micro-batch."""
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
        mine += [Row(parse_op("7F0")), Row(parse_op("7F9"))]
    assert found_in("PP208", base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))) == []


# --- 206: axes ---


def test_an_axis_that_the_mesh_has_not_owes_no_reduction():
    program = ProgramBuilder("layer", {"tp": 2}, {"s": 8, "h": 4})
    program.input("x", "s h", tp="S(s)")
    program.parameter("g", "h", reduced_over=["tp", "cp"])
    program.result(program.apply("y", "x", "g", along="h"), tp="S(s)")
    assert found_in("PP206", with_facts(typed_programs=(program.build(),))) == []


# --- 210 and 211: index maps ---


def test_the_first_rank_whose_pieces_overlap_is_named():
    twice = IndexMap.of([(0, 0, 3), (2, 3, 3)])
    held = HeldTensor("w", 6, {0: IndexMap.of([(0, 0, 6)]), 1: twice, 2: twice}, copies=3)
    (found,) = found_in("PP210", with_facts(held_tensors=(held,)))
    assert found.message == "`w` of 6 elements: two pieces of rank 1 claim the same local elements"


def test_a_range_that_some_replicas_lack_is_reported_with_both_numbers():
    whole, part = IndexMap.of([(0, 0, 4)]), IndexMap.of([(0, 0, 3)])
    (found,) = found_in("PP210", with_facts(held_tensors=(HeldTensor("w", 4, {0: whole, 1: whole, 2: part}, 3),)))
    assert found.message == "`w` of 4 elements: elements 3..4 are held 2 times, not 3 times"


def test_a_rank_that_only_one_side_names_is_compared_with_nothing():
    whole = IndexMap.of([(0, 0, 4)])
    (lacks,) = found_in("PP211", with_facts(map_uses=(MapUse("w", {0: whole}, {0: whole, 1: whole}),)))
    assert lacks.message == "`w`: local element 0 of rank 1 is nothing and is taken for global 0"
    assert [(r.rank, r.source_rank, r.start, r.stop) for r in lacks.witness.lost] == [(1, 0, 0, 4)]
    (surplus,) = found_in("PP211", with_facts(map_uses=(MapUse("w", {0: whole, 1: whole}, {0: whole}),)))
    assert surplus.message == "`w`: local element 0 of rank 1 is global 0 and is taken for nothing"
    assert check_subject(with_facts(map_uses=(MapUse("w", {0: whole}, {0: whole}),))).errors == ()
