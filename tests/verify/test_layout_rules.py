"""Each layout rule kills its mutants alone, with all other rules on, and leaves the correct ones close to them."""

import dataclasses

import pytest

from pipeproof.comm import lower as lowering
from pipeproof.diagnostics.finding import Severity
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import CHILD_KINDS, OpKind, parse_op
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.index_map import IndexMap
from pipeproof.stages.describe.typed_ops import ProgramBuilder
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.declared_facts import ExpertRouting, Facts, HeldTensor
from pipeproof.verify.registry import RULES
from pipeproof.verify.subject import graph_subject
from tests.describe import moe
from tests.plans import subject
from tests.verify.programs import codes

SIZES = {"s": 8, "b": 2, "h": 8, "f": 16, "v": 32, "a": 4, "d": 2, "g": 8}


def with_facts(**facts):
    return graph_subject(build_graph([[]], [], []), facts=Facts(**facts))


def program(name="layer", **mesh):
    return ProgramBuilder(name, mesh or {"tp": 2}, SIZES)


def whole_norm(*, reduced_over):
    """Without sequence parallelism every rank has the whole gradient of a norm, also over axes of one rank (cp)."""
    p = program(tp=2, cp=1)
    p.input("x", "s h", tp="I", cp="S(s)")
    p.parameter("g", "h", reduced_over=["cp", *reduced_over])
    p.result(p.apply("y", "x", "g", along="h"))
    return p


PROGRAMS = {
    "reduced though complete": ("PP206", whole_norm(reduced_over=["tp"]), whole_norm(reduced_over=[])),
    **{f"moe: {bug}": ({"operand": "PP203", "relabel": "PP204", "side_input": "PP205"}[reason], moe.block(bug),
                       moe.block()) for bug, (reason, _) in moe.BUGS.items()},
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_typed_programs(name):
    code, wrong, right = PROGRAMS[name]
    assert codes(with_facts(typed_programs=(wrong.build(),))) == {code}
    assert codes(with_facts(typed_programs=(right.build(),))) == set()


ALL_EXPERTS = ((0, 1, 2, 3),) * 2


def routing(dispatch=ALL_EXPERTS, computes=((0, 1), (2, 3)), combine=ALL_EXPERTS):
    """Four experts on two ranks."""
    return ExpertRouting("experts", (0, 1), *(dict(enumerate(lists)) for lists in (dispatch, computes, combine)))


MAPS = {
    "held once, not by both replicas": (
        "PP210",
        {"held_tensors": (HeldTensor("w", 4, {0: IndexMap.of([(0, 0, 4)]), 1: IndexMap.of([(0, 0, 3)])}, 2),)},
        {"held_tensors": (HeldTensor("w", 4, {0: IndexMap.of([(0, 0, 4)]), 1: IndexMap.of([(0, 0, 4)])}, 2),)},
    ),
    "held beyond the end": (
        "PP210",
        {"held_tensors": (HeldTensor("w", 4, {0: IndexMap.of([(0, 0, 6)])}),)},
        {"held_tensors": (HeldTensor("w", 6, {0: IndexMap.of([(0, 0, 6)])}),)},
    ),
    "one local range for two": (
        "PP210",
        {"held_tensors": (HeldTensor("w", 6, {0: IndexMap.of([(0, 0, 3), (2, 3, 3)])}),)},
        {"held_tensors": (HeldTensor("w", 6, {0: IndexMap.of([(0, 0, 3), (3, 3, 3)])}),)},
    ),
    "results are taken back for other experts": (
        "PP217",
        {"expert_routings": (routing(combine=((0, 1, 2, 3), (2, 3, 0, 1))),)},
        {"expert_routings": (routing(),)},
    ),
    "the experts of two ranks are exchanged on dispatch": (
        "PP217",
        {"expert_routings": (routing(dispatch=((2, 3, 0, 1),) * 2, combine=((2, 3, 0, 1),) * 2),)},
        {"expert_routings": (routing(((2, 3, 0, 1),) * 2, ((2, 3), (0, 1)), ((2, 3, 0, 1),) * 2),)},
    ),
    "a rank numbers its experts from 0": (
        "PP217",
        {"expert_routings": (routing(computes=((0, 1), (0, 1))),)},
        {"expert_routings": (routing(),)},
    ),
    "a sender leaves out an expert": (
        "PP217",
        {"expert_routings": (routing(dispatch=((0, 1, 2, 3), (0, 1, 2))),)},
        {"expert_routings": (routing(),)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPS)
def test_index_maps(name):
    code, wrong, right = MAPS[name]
    assert codes(with_facts(**wrong)) == {code}
    assert codes(with_facts(**right)) == set()


def test_a_wrong_expert_is_named_with_both_ranks():
    _, wrong, _ = MAPS["results are taken back for other experts"]
    assert [found.message for found in check_subject(with_facts(**wrong)).findings] == [
        "`experts`: rank 0 computes block 0 of rank 1 with expert 0, and rank 1 takes it for the result of expert 2"
    ]


# --- the plan's layers ---

SP = {"topology": {"pp": 2, "tp": 2, "sequence_parallel": True}}


def described(one, change):
    layers = tuple(change(layer) for layer in one.plan.layers)
    return dataclasses.replace(one, lowered=dataclasses.replace(one.plan, layers=layers))


def without_backward_gather(layer):
    kept = [c for c in layer.backward_collectives if not c.label.endswith("attn.out.grad")]
    return dataclasses.replace(layer, backward_collectives=tuple(kept))


def test_a_layer_that_leaves_out_a_collective_of_its_way_back():
    one = subject(**SP)
    assert codes(one) == set()
    wrong = described(one, without_backward_gather)
    assert codes(wrong) == {"PP207"}
    found = [f for f in check_subject(wrong).findings if f.code == "PP207"]
    assert len(found) == 4
    assert "collective 2 of the backward of `layer.0`" in found[0].message
    assert "need all_gather of 128 elements over tp" in found[0].message


def test_a_layer_that_lists_one_too_many():
    def doubled(layer):
        return dataclasses.replace(layer, forward_collectives=layer.forward_collectives * 2)

    assert codes(described(subject(**SP), doubled)) == {"PP207"}


def test_a_norm_under_sequence_parallelism_that_is_not_marked_partial(monkeypatch):
    """Lowered from the wrong description: the graph lacks the reduction, too."""

    def unmarked(plan, *size):
        return tuple(
            dataclasses.replace(
                layer, parameters=tuple(dataclasses.replace(p, partial_over=()) for p in layer.parameters)
            )
            for layer in describe_gpt(plan, *size)
        )

    monkeypatch.setattr(lowering, "describe_layers", unmarked)
    wrong = subject(**SP)
    assert not any(op.kind is OpKind.REDUCE_GRAD for op in wrong.graph.ops)
    found = [f for f in check_subject(wrong).findings if f.severity is Severity.ERROR]
    assert {f.code for f in found} == {"PP206"}
    assert found[0].message == (
        "each rank has an addend of the gradient of `layer.0.attn_norm.weight` over tp, and no reduction there is "
        "declared"
    )


# --- issued collectives ---


def mutated(base, change):
    rows = base.graph.rows()
    for rank_rows in rows:
        change(rank_rows)
    return base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))


def remove(text):
    def change(rows):
        rows[:] = [row for row in rows if str(row.op) != text]

    return change


def replace_row(text, **changes):
    def change(rows):
        rows[:] = [dataclasses.replace(row, **changes) if str(row.op) == text else row for row in rows]

    return change


def double(text):
    def change(rows):
        rows[:] = [one for row in rows for one in [row] * (2 if str(row.op) == text else 1)]

    return change


def swap(one, other):
    def change(rows):
        places = [i for i, row in enumerate(rows) if str(row.op) in (one, other)]
        if places:
            i, j = places
            rows[i], rows[j] = rows[j], rows[i]

    return change


ISSUED = {
    "missing": remove("0F1/1.ALL_REDUCE:tp"),
    "all missing": lambda rows: rows.__setitem__(
        slice(None), [row for row in rows if row.op.kind not in CHILD_KINDS or row.op.target.kind is not OpKind.FORWARD]
    ),
    "too short": replace_row("0F1/1.ALL_REDUCE:tp", stop=7),
    "another kind": replace_row("0F1/1.ALL_REDUCE:tp", op=parse_op("0F1/1.ALL_GATHER:tp")),
    "another reduction": replace_row("0F1/1.ALL_REDUCE:tp", reduction="max"),
    "in the loss, out of order": swap("1F0/5.ALL_REDUCE:tp", "1F0/4.ALL_REDUCE:tp"),
    "one too many": double("0B2/1.ALL_REDUCE:tp"),
}


@pytest.mark.parametrize("name", ISSUED)
def test_what_all_members_issue_alike_and_wrongly(name):
    base = subject(topology={"pp": 2, "tp": 2, "dp": 2})
    assert codes(base) == set()
    assert codes(mutated(base, ISSUED[name])) == {"PP208"}


def test_a_whole_data_parallel_replica_that_leaves_one_out():
    """The two members of one tensor-parallel group agree with each other; the other replica is right."""
    base = subject(topology={"pp": 2, "tp": 2, "dp": 2})
    rows = base.graph.rows()
    for rank in (0, 1):
        rows[rank] = [row for row in rows[rank] if str(row.op) != "0F1/1.ALL_REDUCE:tp"]
    wrong = base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))
    assert codes(wrong) == {"PP208"}
    (found,) = [f for f in check_subject(wrong).findings if f.code == "PP208"]
    assert found.message.startswith("0F1 on rank 0 (pp 0, dp 0, tp 0) issues 4 collectives and needs 5")


def test_the_finding_says_what_is_issued_and_what_is_needed():
    base = subject(topology={"pp": 2, "tp": 2})
    (found,) = [f for f in check_subject(mutated(base, ISSUED["too short"])).findings if f.code == "PP208"]
    assert found.message == (
        "0F1 on rank 0 (pp 0, tp 0) issues ALL_REDUCE of 7 over tp as its collective 1, and needs ALL_REDUCE of 256 "
        "over tp (attn.out of `layer.0`, stage 0)"
    )
    assert [op.op for op in found.witness.ops][:2] == ["0F1", "0F1/0.ALL_REDUCE:tp"]


HIDDEN = {"name": "hidden", "dims": "sbh"}


@pytest.mark.parametrize(
    ("sequence_parallel", "entry", "words"),
    [
        (True, HIDDEN, "`hidden` is declared invariant over tp, and the layers make it sharded(s)"),
        (True, {**HIDDEN, "tp": "sharded(s)"}, None),
        (True, {**HIDDEN, "tp": "sharded(s)", "receiver_tp": "invariant"}, "and the layers take it sharded(s)"),
        (False, {**HIDDEN, "tp": "sharded(h)"}, "is declared sharded(h) over tp, and the layers make it invariant"),
        (False, HIDDEN, None),
        (False, {"name": "memory", "dims": "sh", "tp": "sharded(s)"}, None),
    ],
)
def test_the_declared_layout_of_the_activation(sequence_parallel, entry, words):
    topology = {"pp": 2, "tp": 2, "sequence_parallel": sequence_parallel}
    found = [f for f in check_subject(subject(topology=topology, boundaries=[entry])).findings if f.code == "PP209"]
    assert [words in f.message for f in found] == ([True] if words else [])


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        ([("sharded(s)", "sharded(h)"), ("sharded(h)", "sharded(s)")], []),
        (
            [("sharded(s)", "sharded(b)"), ("sharded(h)", "sharded(s)")],
            ["sharded(h) over tp, and the layers make it sharded(b)"],
        ),
        (
            [("sharded(s)", "sharded(h)"), ("sharded(h)", "sharded(h)")],
            ["sharded(h) over tp, and the layers take it sharded(s)"],
        ),
        (
            [("sharded(h)", "sharded(h)"), ("sharded(h)", "sharded(s)")],
            ["sharded(h) over tp, and the layers make it sharded(s)"],
        ),
        ([None, ("sharded(h)", "sharded(s)")], ["sharded(h) over tp, and the layers make it sharded(s)"]),
    ],
)
def test_a_stage_of_empty_layers_takes_any_layout_and_hands_it_on(layouts, words):
    one = subject(
        model={"num_layers": 2, "empty_layers": {"head": 1}},
        topology={"pp": 3, "tp": 2, "sequence_parallel": True},
        stages=[["embed"], ["empty.0"], ["layer.0", "layer.1", "norm", "head"]],
        boundaries=[
            {**HIDDEN, "edge": edge, "tp": layout[0], "receiver_tp": layout[1]}
            for edge, layout in enumerate(layouts)
            if layout
        ],
    )
    messages = [found.message for found in check_subject(one).findings if found.code == "PP209"]
    assert [text in message for text, message in zip(words, messages, strict=True)] == [True] * len(words)


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.doc.code[2] == "2" and rule.doc.kind], ids=lambda rule: rule.doc.code
)
def test_the_examples_of_the_pages(rule):
    for text, expected in ((rule.doc.wrong, {rule.doc.code}), (rule.doc.right, set())):
        names = {}
        exec(text, names)
        assert codes(names["subject"]) == expected
