"""Statements inverted, as people would write them, and statements without an inverse."""

import pytest

from pipeproof.state.aoa.aoa_engine import program_map
from pipeproof.state.aoa.inverse import inverse
from pipeproof.state.aoa.statements import write_statements
from pipeproof.state.state_codes import AoaError
from tests.state.aoa.arrays import apply_map, meta, numbers, program, same

LAYERS = {f"l.{layer}.{name}": meta(4, width) for layer in (2, 10) for name, width in (("q", 8), ("k", 4))}
EXPERTS = {f"l.{layer}.e.{expert}": meta(2, 4) for layer in (2, 10) for expert in range(11)}


def inverse_statements(lines, source, target=None):
    back = inverse(program(*lines), source, target)
    forward = program_map(program(*lines), source, target)
    after, _ = apply_map(forward, numbers(source))
    made = target or {name: meta(*one.shape, dtype=one.dtype) for name, one in forward.tensors.items()}
    before, _ = apply_map(program_map(back, made, source), after)
    assert same(before, numbers(source))
    return write_statements(back).splitlines()


@pytest.mark.parametrize(
    ("lines", "source", "expected"),
    [
        (["a -> b", "b^T -> c"], {"a": meta(2, 3)}, ["c^T -> b", "b -> a"]),
        (['a -> b, permute="[2, 0, 1]"'], {"a": meta(2, 3, 4)}, ['b -> a, permute="[1, 2, 0]"']),
        (['a^T -> b, permute="[2, 0, 1]"'], {"a": meta(2, 3, 4)},
         ['b -> a.transposed, permute="[1, 2, 0]"', "a.transposed^T -> a"]),
        (["a, b -> c, axis=1"], {"a": meta(2, 3), "b": meta(2, 3)}, ["c -> a, b, axis=1"]),
        (
            ["a, b^T -> c, axis=1"],
            {"a": meta(2, 6), "b": meta(4, 2)},
            ["c -> c.part[0:5], axis=1", "c.part[0:3] -> a, axis=1", "c.part[3:5] -> b.transposed, axis=1",
             "b.transposed^T -> b"],
        ),
        (["a -> b[0:2], axis=0"], {"a": meta(4)}, ["b[0:2] -> a, axis=0"]),
        (['a -> b, dtype="float32"'], {"a": meta(4, dtype="bfloat16")}, ['b -> a, dtype="bfloat16"']),
        (
            ['a -> b, src_dtype="float16", dst_dtype="float32"'],
            {"a": meta(4, dtype="float16")},
            ['b -> a, src_dtype="float32", dst_dtype="float16"'],
        ),
        (["a -> b", "a -> c"], {"a": meta(4)}, ["c -> a", "b -> _"]),
        (["a, a -> b, axis=0"], {"a": meta(4)}, ["b -> a, a.again, axis=0", "a.again -> _"]),
        (["a -> t", "b -> a", "t -> b"], {"a": meta(4), "b": meta(4)}, ["b -> t", "a -> b", "t -> a"]),
        (
            ["l.$LAYER_ID.q, l.$LAYER_ID.k -> m.$LAYER_ID, axis=1"],
            LAYERS,
            [
                "m.$LAYER_ID -> m.$LAYER_ID.part[0:3], axis=1",
                "m.$LAYER_ID.part[0:2] -> l.$LAYER_ID.q, axis=1",
                "m.$LAYER_ID.part[2:3] -> l.$LAYER_ID.k, axis=1",
            ],
        ),
        (["l.$LAYER_ID.e.* -> m.$LAYER_ID, axis=0"], EXPERTS, ["m.$LAYER_ID -> l.$LAYER_ID.e.*, axis=0"]),
        (["l.$LAYER_ID.e.$EXPERT_ID^T -> m.$LAYER_ID.$EXPERT_ID"], EXPERTS,
         ["m.$LAYER_ID.$EXPERT_ID^T -> l.$LAYER_ID.e.$EXPERT_ID"]),
        (["a.$LAYER_ID_OFFSET -> b.$LAYER_ID_OFFSET"], {"a.1": meta(2), "a.2": meta(3)}, ["b.1 -> a.2", "b.0 -> a.1"]),
    ],
)  # fmt: skip
def test_the_inverse_is_what_a_person_would_write(lines, source, expected):
    assert inverse_statements(lines, source) == expected


def test_fused_forms_are_inverted_with_the_shards_of_both_sides():
    source, target = {"ffn": meta(2, 16, shards=2)}, {"out": meta(2, 16, shards=4)}
    assert inverse_statements(["ffn -> out, fused_ffn"], source, target) == ["out -> ffn, fused_ffn"]
    heads = "num_heads=4, num_key_value_groups=2"
    source, target = {"q": meta(2, 8), "k": meta(2, 4), "v": meta(2, 4)}, {"qkv": meta(2, 16, shards=2)}
    lines = [f"q, k, v -> qkv, fused_qkv_old, {heads}"]
    assert inverse_statements(lines, source, target) == [f"qkv -> q, k, v, fused_qkv_old, {heads}"]


def test_an_added_tensor_is_removed_on_the_way_back():
    source, target = {"a": meta(2)}, {"a": meta(2), "z": meta(3)}
    assert inverse_statements(["_ -> z"], source, target) == ["z -> _"]


def test_a_copy_next_to_the_tensor_itself_is_removed():
    source, target = {"a": meta(2)}, {"a": meta(2), "b": meta(2)}
    assert inverse_statements(["a -> b"], source, target) == ["b -> _"]


@pytest.mark.parametrize(
    ("lines", "source", "target", "said"),
    [
        (["a -> b", "c -> _"], {"a": meta(2), "c": meta(2)}, None, "`c` is removed"),
        (['a -> b, dtype="bfloat16"'], {"a": meta(2)}, None, "the cast from float32 to bfloat16 loses bits"),
        (['a -> b, dtype="float16"'], {"a": meta(2, dtype="bfloat16")}, None, "loses bits"),
        (["a -> b, c, axis=0", "c -> _"], {"a": meta(2)}, None, "`c` is removed"),
        (["a -> b"], {"a": meta(2), "c": meta(2)}, {"b": meta(2)}, "the target has nothing of the source's `c`"),
    ],
)
def test_what_is_lost_cannot_be_made_again(lines, source, target, said):
    with pytest.raises(AoaError) as error:
        inverse(program(*lines), source, target)
    (finding,) = error.value.findings
    assert finding.code == "PP183"
    assert said in finding.message
    assert (finding.location is None) == ("nothing of" in said)
