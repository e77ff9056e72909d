"""Reach of the layout rules: the entries, computations and axes that they check, and their findings."""

import dataclasses

import pytest

from pipeproof.schedule.op_table import Row, build_graph
from pipeproof.schedule.ops import CHILD_KINDS, parse_op
from pipeproof.stages.describe.index_map import IndexMap
from pipeproof.stages.describe.typed_ops import ProgramBuilder
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.declared_facts import ExpertRouting, Facts, HeldTensor, MapUse
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
        mine += [Row(parse_op(text)) for text in ("7F0", "7F9", "2F0", "2F2")]
        mine += [
            Row(parse_op(text)) for text in ("0F2", "1F2") if "last_micro_batch_size" in schedule
        ]  # of which size?
    assert found_in("PP208", base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))) == []


def without_collectives(base, *ops):
    """The subject with nothing issued by these computations."""
    return changed(base, lambda row: None if row.op.kind in CHILD_KINDS and str(row.op.target) in ops else row)


def test_the_micro_batches_of_each_stage_and_kind_are_counted():
    base = subject(topology={"pp": 2, "tp": 2}, schedule={"last_micro_batch_size": 1})
    wrong = without_collectives(base, "0F0", "0F1", "1F2", "0B0", "0B1", "0B2", "1B3")
    messages = {f.message.split()[0]: f.message.partition("; so in ")[2] for f in found_in("PP208", wrong)}
    assert messages == {"0F0": "2 micro-batches", "1F2": "", "0B0": "3 micro-batches", "1B3": ""}


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


def test_a_collective_more_at_the_last_computation_of_all():
    base = subject(topology={"pp": 2, "tp": 2}, schedule={"kind": "zb_h1", "num_micro_batches": 2})
    rows = base.graph.rows()
    group = next(row.group for row in rows[-1] if row.op.kind in CHILD_KINDS)
    for mine in rows[2:]:
        place = next(i for i, row in enumerate(mine) if str(row.op) == "1W1")
        mine.insert(place + 1, Row(parse_op("1W1/0.ALL_REDUCE:tp"), group=group, stop=8))
    (found,) = found_in("PP208", base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups)))
    assert "1W1 on rank 2" in found.message
    assert "issues all_reduce of 8 over tp" in found.message.lower()


def test_a_collective_of_no_computation_is_none_of_the_last_one():
    base = subject(topology={"pp": 2, "tp": 2})
    rows = base.graph.rows()
    rows[0].insert(0, Row(parse_op("0BARRIER:tp"), group=0))
    rows[-1].append(Row(parse_op("7F0")))
    assert found_in("PP208", base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))) == []


def test_the_first_collective_that_is_not_as_needed_is_named_wherever_ranges_begin():
    def moved(row):
        if row.op.kind not in CHILD_KINDS:
            return row
        return None if str(row.op).startswith("0F0/3.") else dataclasses.replace(row, start=8, stop=row.stop + 8)

    (found,) = found_in("PP208", changed(subject(topology={"pp": 2, "tp": 2}), moved))
    assert "issues 4 collectives and needs 5: number 4 should be ALL_REDUCE of 256" in found.message


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


def test_elements_beyond_the_end_are_named_as_such():
    (found,) = found_in("PP210", with_facts(held_tensors=(HeldTensor("w", 4, {0: IndexMap.of([(0, 0, 6)])}),)))
    assert found.message == "`w` of 4 elements: elements 4..6 do not exist and are held"


def test_the_witness_of_what_is_held_twice_is_that_range_at_both_holders():
    """Elements 0..4 are missing, and 4..8 are held by two of three ranks, each at another place of its memory."""
    parts = {2: IndexMap.of([(0, 8, 4)]), 0: IndexMap.of([(2, 4, 4)]), 1: IndexMap.of([(0, 4, 4), (4, 12, 4)])}
    (found,) = found_in("PP210", with_facts(held_tensors=(HeldTensor("w", 16, parts),)))
    assert found.message == (
        "`w` of 16 elements: no rank holds elements 0..4; elements 4..8 are held 2 times, not once"
    )
    assert [(r.rank, r.source_rank, r.start, r.stop, r.covers) for r in found.witness.foreign] == [
        (1, 0, 2, 6, "global 4 .. 7")
    ]


# --- 217: experts ---


def test_each_sender_is_named_with_its_first_mistake():
    lists = {
        "dispatch": {0: (0, 1, 2), 1: (1, 0, 2, 3), 2: (0, 1, 2, 3)},
        "combine": dict.fromkeys(range(3), (0, 1, 2, 3)),
    }
    computes = {0: (0,), 1: (1, 2), 2: (3,)}
    routing = ExpertRouting("experts", (0, 1, 2), lists["dispatch"], computes, lists["combine"])
    assert [found.message for found in found_in("PP217", with_facts(expert_routings=(routing,)))] == [
        "`experts`: rank 0 sends 3 blocks of rows and takes 4 back; the group computes 4 of each sender",
        "`experts`: rank 1 sends block 0 for expert 1, and rank 0 computes it with expert 0",
    ]


def test_of_a_sender_that_takes_back_other_results_the_first_one_is_named():
    everyone = dict.fromkeys(range(2), (0, 1, 2, 3))
    routing = ExpertRouting("experts", (0, 1), everyone, {0: (0, 1), 1: (2, 3)}, {**everyone, 0: (0, 2, 1, 3)})
    assert [found.message for found in found_in("PP217", with_facts(expert_routings=(routing,)))] == [
        "`experts`: rank 0 computes block 1 of rank 0 with expert 1, and rank 0 takes the result for that of expert 2"
    ]


# --- 209: layers that are empty ---


def test_a_stage_with_one_empty_layer_among_others_makes_the_layout_of_the_others():
    one = subject(
        model={"num_layers": 2, "empty_layers": {"head": 1}},
        topology={"pp": 2, "tp": 2, "sequence_parallel": True},
        stages=[["embed", "layer.0"], ["empty.0", "layer.1", "norm", "head"]],
        boundaries=[{**RIGHT, "tp": "sharded(s)", "receiver_tp": "invariant"}],
    )
    assert [f.message.partition(", and ")[2] for f in found_in("PP209", one)] == ["the layers take it sharded(s)"]
