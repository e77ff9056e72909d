"""Typed programs: signatures, the dual program, the plan's own GPT, and layout bugs from practice as programs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.derive_types import derive_types
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.type_rules import Reason
from pipeproof.stages.describe.typed_gpt import typed_gpt
from pipeproof.stages.describe.typed_ops import INVARIANT, PARTIAL, REPLICATED, VARYING, ProgramBuilder, axis_type, cut
from tests.describe import moe
from tests.plans import plan_spec

SIZES = {"s": 8, "b": 2, "h": 4, "f": 16, "v": 32, "a": 4, "d": 2, "g": 8}


def program(tp=2, **axes):
    return ProgramBuilder("layer", {"tp": tp, **axes}, SIZES)


def problems(builder):
    return [(p.place, p.axis, p.reason) for p in derive_types(builder.build()).problems]


def type_of(builder, name, axis="tp"):
    layer = derive_types(builder.build())
    assert layer.problems == ()
    return str(layer.values[name].over(axis))


@pytest.mark.parametrize(
    ("text", "dual"), [("R", "P"), ("I", "I"), ("S(s)", "S(s)"), ("P", "R"), ("V", "V")]
)  # fmt: skip
def test_duals_are_those_of_the_design(text, dual):
    assert str(axis_type(text).dual) == dual
    assert axis_type(text).dual.dual == axis_type(text)


@pytest.mark.parametrize("text", ["", "S", "S()", "r", "S(s", "Q", "S(s)x"])
def test_other_texts_are_no_types(text):
    with pytest.raises(ValueError, match="is not a type over an axis"):
        axis_type(text)


def product(x, w):
    p = program()
    p.input("x", "s h", tp=x)
    p.parameter("w", "h f", tp=w)
    p.multiply("y", "x", "w", over="h")
    return p


@pytest.mark.parametrize(
    ("x", "w", "made"),
    [
        ("R", "S(f)", "S(f)"),  # column-parallel
        ("S(h)", "S(h)", "P"),  # row-parallel
        ("S(s)", "I", "S(s)"),  # a whole weight on a part of the tokens
        ("R", "I", "R"),
        ("I", "I", "I"),
        ("P", "I", "P"),
        ("V", "I", "V"),
    ],
)
def test_matmul(x, w, made):
    assert type_of(product(x, w), "y") == made


@pytest.mark.parametrize(
    ("x", "w"),
    [
        ("I", "S(f)"),  # the gradient of x would be an addend on each rank: the way in is missing
        ("R", "S(h)"),  # the dim that is summed over is cut on one side only
        ("S(h)", "I"),
        ("S(s)", "S(f)"),  # each rank would meet its tokens with its columns only
        ("P", "S(f)"),
        ("V", "S(h)"),
    ],
)
def test_matmul_refuses(x, w):
    assert [reason for _, _, reason in problems(product(x, w))] == [Reason.OPERAND]


CHANGES = [
    # name, forward arguments, taken, made, collective forward, collective backward
    ("all_reduce", {"to": "I"}, "P", "I", "all_reduce", None),
    ("all_reduce", {"to": "R"}, "P", "R", "all_reduce", "all_reduce"),
    ("all_gather", {"to": "R"}, "S(s)", "R", "all_gather", "reduce_scatter"),
    ("all_gather", {"to": "I"}, "S(s)", "I", "all_gather", None),
    ("reduce_scatter", {"dim": "s"}, "P", "S(s)", "reduce_scatter", "all_gather"),
    ("all_to_all", {"dim": "h"}, "S(s)", "S(h)", "all_to_all", "all_to_all"),
    ("cut", {"dim": "s"}, "I", "S(s)", None, "all_gather"),
    ("cut", {"dim": "s"}, "R", "S(s)", None, None),
    ("relabel", {"to": "R"}, "I", "R", None, "all_reduce"),
    ("relabel", {"to": "V"}, "S(s)", "V", None, None),
]


@pytest.mark.parametrize(("name", "arguments", "taken", "made", "forward", "backward"), CHANGES)
def test_layout_changes_and_their_duals(name, arguments, taken, made, forward, backward):
    p = program(tp=4)
    p.input("x", "s h", tp=taken)
    getattr(p, name)("y", "x", "tp", **arguments)
    layer = derive_types(p.build())
    assert layer.problems == ()
    assert str(layer.values["y"].over("tp")) == made
    assert layer.gradient_of("y") == {"tp": axis_type(made).dual}
    whole, part = 32, 8
    numel = {"all_reduce": whole, "all_gather": part, "reduce_scatter": whole, "all_to_all": part}
    assert [(str(c.kind), c.numel) for c in layer.forward] == ([(forward, numel[forward])] if forward else [])
    assert [(str(c.kind), c.numel, c.label) for c in layer.backward] == (
        [(backward, numel[backward], "y.grad")] if backward else []
    )


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "cut"])
@pytest.mark.parametrize("taken", ["R", "I", "P", "V", "S(s)"])
def test_a_layout_change_refuses_what_it_does_not_take(name, taken):
    right = {"all_reduce": "P", "all_gather": "S", "reduce_scatter": "P", "all_to_all": "S", "cut": "RI"}[name]
    p = program()
    p.input("x", "s h", tp=taken)
    getattr(p, name)("y", "x", "tp", **({} if name in ("all_reduce", "all_gather") else {"dim": "h"}))
    assert bool(problems(p)) == (taken[0] not in right)


@pytest.mark.parametrize(
    ("taken", "to"), [("P", "R"), ("P", "I"), ("S(s)", "R"), ("R", "S(s)"), ("R", "I"), ("V", "S(s)"), ("R", "P")]
)
def test_other_relabels_are_refused(taken, to):
    p = program()
    p.input("x", "s h", tp=taken)
    p.relabel("y", "x", "tp", to=to)
    assert problems(p) == [("y", "tp", Reason.RELABEL)]


def test_after_a_problem_nothing_is_said_of_what_depends_on_it():
    p = program()
    p.input("x", "s h", tp="I")
    p.all_reduce("y", "x", "tp")
    p.apply("z", "y", along="h")
    p.result("z", tp="S(s)")
    assert [place for place, _, _ in problems(p)] == ["y"]


def test_a_bias_is_not_added_to_addends():
    p = program()
    p.input("x", "s h", tp="S(h)")
    p.parameter("w", "h f", tp="S(h)")
    p.parameter("bias", "f")
    p.add("y", p.multiply("addends", "x", "w", over="h"), "bias")
    (found,) = derive_types(p.build()).problems
    assert "once per rank" in found.message
    assert found.help == "reduce `addends` first"


def test_a_weight_that_is_used_inside_and_outside_of_the_parallel_region():
    p = program()
    p.input("x", "s h", tp="I")
    p.parameter("g", "h")
    p.apply("outside", "x", "g", along="h")
    p.apply("inside", p.relabel("entered", "x", "tp"), "g", along="h")
    assert problems(p) == [("inside", "tp", Reason.OPERAND)]


def test_a_coarser_axis_is_not_gathered_before_a_finer_one():
    def gathered(first, second):
        p = program(cp=2)
        p.input("x", "s h", tp="S(s)", cp="S(s)")
        p.all_gather("once", "x", first)
        p.all_gather("twice", "once", second)
        return problems(p)

    assert gathered("tp", "cp") == []
    assert gathered("cp", "tp") == [("once", "cp", Reason.OPERAND)]


def test_a_merged_dim_is_cut_along_its_major_part_only():
    def merged(kind):
        p = program()
        p.input("x", "s a d", tp=kind)
        p.merge("y", "x", "a d", "g")
        return p

    assert type_of(merged("S(a)"), "y") == "S(g)"
    assert problems(merged("S(d)")) == [("y", "tp", Reason.OPERAND)]


def test_a_split_dim_must_end_between_two_heads():
    p = program(tp=8)
    p.input("x", "s g", tp="S(g)")
    p.split("y", "x", "g", "a d")
    assert problems(p) == [("y", "tp", Reason.OPERAND)]


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda p: p.input("x", "s h"), "has a value x already"),
        (lambda p: p.apply("y", "nothing"), "has no value nothing"),
        (lambda p: p.input("y", "s q"), "has no dim q"),
        (lambda p: p.input("y", "s", tp="S(h)"), "cuts a dim that is not among"),
        (lambda p: p.reduce_scatter("y", "x", "tp", "v"), "x has no dim v"),
        (lambda p: p.split("y", "x", "h", "a d"), "a times d is not the size of h"),
        (lambda p: p.merge("y", "x", "s h", "v2"), "has no dim v2"),
    ],
)
def test_mistakes_in_writing_a_program_are_said(write, words):
    p = program()
    p.input("x", "s h")
    with pytest.raises(ValueError, match=words):
        write(p)


def test_a_cut_that_does_not_divide_is_said():
    p = ProgramBuilder("layer", {"tp": 3}, SIZES)
    p.input("x", "s h", tp="S(s)")
    p.all_gather("y", "x", "tp")
    with pytest.raises(ValueError, match="dim s of 8 does not divide over tp 3"):
        derive_types(p.build())


# --- the plan's own GPT ---


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    cp=st.sampled_from([1, 2]),
    sp=st.booleans(),
    order=st.sampled_from(["sbh", "bsh"]),
    size=st.sampled_from([None, MicroBatchSize(16, 1), MicroBatchSize(8, 3)]),
)
def test_the_description_by_hand_is_what_the_types_say(tp, cp, sp, order, size):
    spec = plan_spec(
        model={"activation_order": order, "seq_length": 16},
        topology={"pp": 2, "tp": tp, "cp": cp, "sequence_parallel": sp},
    )
    typed = typed_gpt(spec, size)
    for layer in describe_gpt(spec, size):
        needed = typed[layer.name if layer.name in typed else "block"]
        assert needed.problems == ()
        for listed, wanted in (
            (layer.forward_collectives, needed.forward),
            (layer.backward_collectives, needed.backward),
        ):
            assert [(c.kind, c.axis, c.numel, c.reduction) for c in listed] == [
                (c.kind, c.axis, c.numel, c.reduction) for c in wanted
            ]
            assert [c.label.removeprefix(f"{layer.name}.") for c in listed] == [c.label for c in wanted]
        for parameter in layer.parameters:
            owed = needed.partial_over[parameter.name.removeprefix(f"{layer.name}.")]
            assert parameter.partial_over == owed


def test_what_the_gpt_types_mean():
    spec = plan_spec(topology={"tp": 2, "cp": 2, "sequence_parallel": True})
    block = typed_gpt(spec)["block"]
    assert block.values["fused"].types == {"tp": cut("c"), "cp": cut("s")}
    assert block.values["mlp.addends"].over("tp") == PARTIAL
    assert block.values["kv"].types == {"tp": cut("a"), "cp": REPLICATED}
    assert block.gradient_of("kv") == {"tp": cut("a"), "cp": PARTIAL}
    assert block.partial_over["attn_norm.weight"] == ("tp", "cp")
    assert block.partial_over["mlp.up.weight"] == ("cp",)
    assert typed_gpt(spec)["head"].values["highest"].over("tp") == VARYING
    assert typed_gpt(spec)["head"].values["loss"].types == {"tp": INVARIANT, "cp": PARTIAL}


# --- mixture of experts ---


def test_the_right_mixture_of_experts_has_no_problem():
    layer = derive_types(moe.block().build())
    assert layer.problems == ()
    assert layer.partial_over == {"router": ("tp", "ep"), "up": (), "down": ()}
    assert [(str(c.kind), c.axis) for c in layer.forward] == [
        ("all_gather", "tp"), ("all_to_all", "ep"), ("all_to_all", "ep"), ("reduce_scatter", "tp"),
        ("all_reduce", "tp"), ("all_reduce", "ep"),
    ]  # fmt: skip
    assert [(str(c.kind), c.axis) for c in layer.backward] == [
        ("all_gather", "tp"), ("all_to_all", "ep"), ("all_to_all", "ep"), ("reduce_scatter", "tp"),
    ]  # fmt: skip


@pytest.mark.parametrize("bug", moe.BUGS)
def test_each_bug_of_a_mixture_of_experts_is_found(bug):
    reason, place = moe.BUGS[bug]
    found = derive_types(moe.block(bug).build()).problems
    assert [(p.place, p.reason) for p in found] == [(place, reason)]
