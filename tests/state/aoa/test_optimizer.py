"""Moments go where weights go, counters next to them, in our names and in Paddle's; they keep their types."""

import pytest

from pipeproof.state.aoa.aoa_engine import program_map
from pipeproof.state.state_codes import AoaError
from tests.state.aoa.arrays import apply_map, meta, numbers, program

OWN_NAMES = ("optimizer/moment1/{}", "optimizer/moment2/{}")
THEIRS = ("{}.w_0", "{}.moment1_0", "{}.moment2_0")


def state_of(forms, counters, weight="float32", **shapes):
    metas = {name: meta(*shape, dtype=weight) for name, shape in shapes.items()}
    metas |= {form.format(name): meta(*shape) for name, shape in shapes.items() for form in forms}
    return metas | {form.format(name): meta(*shape) for name in shapes for form, shape in counters.items()}


@pytest.mark.parametrize(
    ("forms", "counters"),
    [(OWN_NAMES, {"optimizer/beta1_power/{}": ()}), (THEIRS, {"{}.beta1_pow_acc_0": (1,)})],
    ids=["ours", "Paddle's"],
)
@pytest.mark.parametrize("with_target", [True, False])
def test_states_go_as_their_weights_do(forms, counters, with_target):
    source = state_of(forms, counters, a=(2, 3), b=(2, 5), c=(4, 2))
    target = state_of(forms, counters, merged=(8, 2), half=(2, 2), other=(2, 2)) if with_target else None
    lines = ["a^T, b^T -> merged, axis=0", "c -> half, other, axis=0"]
    arrays = numbers(source)
    state_map = program_map(program(*lines), source, target)
    made, _ = apply_map(state_map, arrays)
    assert set(made) == set(state_of(forms, counters, merged=(8, 2), half=(2, 2), other=(2, 2)))
    for form in (*forms, "{}"):
        merged = [*arrays[form.format("a")].T.tolist(), *arrays[form.format("b")].T.tolist()]
        assert made[form.format("merged")].tolist() == merged
        assert made[form.format("other")].tolist() == arrays[form.format("c")][2:].tolist()
    for form in counters:
        assert made[form.format("merged")] == arrays[form.format("a")]  # of the first; the other is left out
        assert made[form.format("other")] == made[form.format("half")] == arrays[form.format("c")]
    assert state_map.removed == {form.format("b") for form in counters}


def test_a_cast_is_of_the_weight_alone():
    source = state_of(THEIRS, {}, weight="bfloat16", a=(2, 3))
    state_map = program_map(program('a -> b, dtype="float32"'), source, None)
    casts = {name: tensor.copies[0].casts for name, tensor in state_map.tensors.items()}
    assert casts == {"b": ("float32",), **{form.format("b"): () for form in THEIRS}}
    assert {tensor.dtype for tensor in state_map.tensors.values()} == {"float32"}


def test_what_is_removed_goes_with_its_states():
    source = state_of(OWN_NAMES, {"optimizer/step/{}": ()}, a=(2,), b=(2,))
    state_map = program_map(program("a -> _"), source, None)
    assert len(state_map.removed) == 4
    assert all(name.endswith("a") for name in state_map.removed)
    assert "optimizer/step/b" in state_map.tensors


@pytest.mark.parametrize(
    ("source", "target", "code", "said"),
    [
        ({"a": meta(2)}, {"b": meta(2), "b.w_0": meta(2)}, "PP181", "the source has no `a.w_0`"),
        (
            {"a": meta(2), "a.w_0": meta(2)},
            {"b": meta(2), "b.w_0": meta(2, dtype="float16")},
            "PP182",
            "states keep their type",
        ),
    ],
)
def test_states_that_cannot_be_made_are_named(source, target, code, said):
    with pytest.raises(AoaError) as error:
        program_map(program("a -> b"), source, target)
    assert error.value.findings[0].code == code
    assert said in error.value.findings[0].message


def test_a_counter_of_an_added_tensor_begins_at_zero_or_is_refused():
    source = state_of(OWN_NAMES, {"optimizer/step/{}": ()}, a=(2,))
    target = state_of(OWN_NAMES, {"optimizer/step/{}": ()}, a=(2,), z=(3,))
    state_map = program_map(program("_ -> z"), source, target)
    assert all(state_map.tensors[name].copies[0].source is None for name in target if name.endswith("z"))
    source, target = (
        state_of(OWN_NAMES, {"optimizer/beta1_power/{}": ()}, **one) for one in ({"a": (2,)}, {"z": (2,)})
    )
    with pytest.raises(AoaError, match="does not begin at zero"):
        program_map(program("a -> _", "_ -> z"), source, target)
