"""Programs that the type rules accept have, on real numbers, the values and gradients of one rank."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.stages.describe.derive_types import derive_types
from pipeproof.stages.describe.typed_ops import ProgramBuilder
from tests.describe.typed_numbers import Numbers

MESH = {"tp": 2, "cp": 2}
SIZES = {"s": 4, "h": 4, "f": 4}
TYPES = {"s h": ["R", "I", "P", "S(s)", "S(h)"], "h f": ["I", "S(h)", "S(f)"], "f h": ["I", "S(f)", "S(h)"], "h": ["I"]}


def written(steps):
    """The program that the recorded calls of a builder write."""
    p = ProgramBuilder("random", MESH, SIZES)
    for method, arguments, options in steps:
        getattr(p, method)(*arguments, **options)
    return p.build()


@st.composite
def programs(draw):
    """A random program without a type problem: each operation is kept if the rules accept it."""
    steps = []
    for name, dims in (("x", "s h"), ("y", "s h")):
        steps.append(("input", (name, dims), {axis: draw(st.sampled_from(TYPES[dims])) for axis in MESH}))
    for name, dims in (("up", "h f"), ("down", "f h"), ("gain", "h")):
        steps.append(("parameter", (name, dims), {axis: draw(st.sampled_from(TYPES[dims])) for axis in MESH}))
    steps.append(("constant", ("mask", "s"), {axis: draw(st.sampled_from(["I", "S(s)"])) for axis in MESH}))
    for attempt in range(draw(st.integers(10, 30))):
        program = written(steps)
        values = [value.name for value in (*program.inputs, *(op.output for op in program.ops))]
        weights = [parameter.value.name for parameter in program.parameters]
        known = derive_types(program).values
        one = draw(st.sampled_from(values))
        other = draw(st.sampled_from([*values, *weights, *weights]))
        axis, dim = draw(st.sampled_from(list(MESH))), draw(st.sampled_from(list(SIZES)))
        name = f"v{attempt}"
        step = draw(
            st.sampled_from(
                [
                    ("add", (name, one, other), {}),
                    ("multiply", (name, one, other), {"over": dim}),
                    ("multiply", (name, one, other), {}),
                    ("multiply", (name, one), {"over": dim}),
                    ("apply", (name, one), {}),
                    ("apply", (name, one, other), {"along": dim}),
                    ("apply", (name, one, other), {"drop": dim}),
                    ("detach", (name, one), {}),
                    ("all_reduce", (name, one, axis), {"to": draw(st.sampled_from("RI"))}),
                    ("all_gather", (name, one, axis), {"to": draw(st.sampled_from("RI"))}),
                    ("reduce_scatter", (name, one, axis, dim), {}),
                    ("all_to_all", (name, one, axis, dim), {}),
                    ("cut", (name, one, axis, dim), {}),
                    ("relabel", (name, one, axis), {}),
                ]
            )
        )
        if dim not in known[one].dims and dim not in known[other].dims:
            continue
        try:
            if not derive_types(written([*steps, step])).problems:
                steps.append(step)
        except ValueError:  # a dim that the value lacks, or ranks that do not divide the rest of it
            continue
    return written(steps)


@settings(max_examples=150, deadline=None)
@given(program=programs(), seed=st.integers(0, 1000))
def test_random_programs_mean_what_their_types_say(program, seed):
    Numbers(derive_types(program), seed).check()


def feed_forward(*, sequence_parallel, relabelled=True):
    p = ProgramBuilder("mlp", MESH, SIZES)
    p.input("x", "s h", tp="S(s)" if sequence_parallel else "I", cp="S(s)")
    p.parameter("gain", "h")
    p.parameter("up", "h f", tp="S(f)")
    p.parameter("down", "f h", tp="S(f)")
    entered = p.apply("normed", "x", "gain", along="h")
    if sequence_parallel:
        entered = p.all_gather("in", entered, "tp")
    elif relabelled:
        entered = p.relabel("in", entered, "tp")
    p.multiply("addends", p.apply("act", p.multiply("inner", entered, "up", over="h")), "down", over="f")
    out = p.reduce_scatter("out", "addends", "tp", "s") if sequence_parallel else p.all_reduce("out", "addends", "tp")
    p.add("y", out, "x")
    return derive_types(p.build())


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_feed_forward_block(sequence_parallel):
    layer = feed_forward(sequence_parallel=sequence_parallel)
    assert layer.problems == ()
    assert layer.partial_over["gain"] == (("tp", "cp") if sequence_parallel else ("cp",))
    Numbers(layer, seed=1).check()


def test_the_numbers_see_a_reduction_that_is_left_out():
    """The check itself can fail: say that the norm's gradient is complete, and the numbers object."""
    layer = feed_forward(sequence_parallel=True)
    object.__setattr__(layer, "partial_over", {**layer.partial_over, "gain": ("cp",)})
    with pytest.raises(AssertionError, match="said to be equal"):
        Numbers(layer, seed=1).check()
