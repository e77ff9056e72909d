"""Mistakes that Paddle's engine ignores or gets wrong: its result, and the finding here (docs/aoa.md)."""

import re
from pathlib import Path

import numpy as np
import pytest

from pipeproof.state.aoa.aoa_engine import program_map
from pipeproof.state.aoa.inverse import inverse
from pipeproof.state.state_codes import AoaError
from tests.state.aoa.arrays import apply_map, apply_map_with_paddle, engine, meta, numbers, program

pytestmark = pytest.mark.needs_paddle
PAGE = Path(__file__).parents[3] / "validation" / "results" / "aoa-differences.md"

LAYERS = {"layers.0.w": meta(4, 4), "layers.1.w": meta(4, 4)}
EXPERTS = {f"layers.0.experts.{number}.w": meta(2, 4) for number in range(12)}


def theirs(lines, source, target=None, **config):
    return apply_map_with_paddle(engine(lines, source, target, **config), numbers(source))[0]


def ours(lines, source, target=None):
    return apply_map(program_map(program(*lines), source, target), numbers(source))[0]


def refused(code, lines, source, target=None):
    with pytest.raises(AoaError) as error:
        program_map(program(*lines), source, target)
    assert {finding.code for finding in error.value.findings} == {code}
    return error.value.findings[0].message


ONE, TWO = {"a": meta(4)}, {"a": meta(1), "b": meta(1)}
QKV, FFN = {"qkv": meta(8)}, {"ffn": meta(6)}
WITH_ZEROS = {"layers.01.w": meta(4)}
WITHOUT_7 = {name: one for name, one in EXPERTS.items() if ".7." not in name}
OF_TWO_LAYERS = {"layers.0.experts.0.w": meta(4), "layers.1.experts.1.w": meta(4)}
ROWS = {
    "a pattern that fits nothing": (
        ["layer.$LAYER_ID.w -> blocks.$LAYER_ID.w"], LAYERS, None,
        set(LAYERS), ("PP181", "matches no tensor of the source"),  # dropped without a word
    ),
    "an array next to an id": (
        ["layers.$LAYER_ID.v[0:2] -> layers.$LAYER_ID.v, axis=0"],
        {"layers.0.v_0": meta(4), "layers.0.v_1": meta(4)}, None,
        {"layers.0.v_0", "layers.0.v_1"}, {"layers.0.v": (8,)},
    ),
    "an id of a temporary name": (
        ["layers.$LAYER_ID.w -> t.$LAYER_ID.w", "t.$LAYER_ID.w^T -> blocks.$LAYER_ID.w"], LAYERS, None,
        {"t.0.w", "t.1.w"}, {"blocks.0.w", "blocks.1.w"},
    ),
    "a transposed name with an offset": (
        ["layers.$LAYER_ID_OFFSET.w^T -> blocks.$LAYER_ID_OFFSET.w"], {"layers.1.w": meta(4, 2)}, None,
        {"layers.1.w"}, {"blocks.0.w": (2, 4)},
    ),
    "ids that are not there together": (
        ["layers.$LAYER_ID.experts.$EXPERT_ID.w -> blocks.$LAYER_ID.$EXPERT_ID.w"], OF_TWO_LAYERS, None,
        (ValueError, r"layers\.1\.experts\.0\.w should be assigned before"), {"blocks.0.0.w", "blocks.1.1.w"},
    ),
    "an id that only the right side has": (
        ["layers.$LAYER_ID.w -> blocks.$LAYER_ID.$EXPERT_ID.w"], LAYERS, None,
        {"blocks.0.$EXPERT_ID.w", "blocks.1.$EXPERT_ID.w"}, "has no `$EXPERT_ID`",
    ),
    "a gap between experts": (
        ["layers.0.experts.*.w -> fused, axis=0"], WITHOUT_7, None,
        {"fused": (22, 4)}, ("PP181", "and 7 is missing"),  # expert 8 stands where 7 should
    ),
    "numbers with zeros before them": (
        ["layers.$LAYER_ID.w -> blocks.$LAYER_ID.w"], WITH_ZEROS, None,
        (ValueError, r"layers\.1\.w should be assigned before"), ("PP181", ""),
    ),
    "a fused form with a name too many": (
        ["ffn -> gate, up, more, fused_ffn, axis=0"], FFN, None,
        {"fused_ffn_tmp.GATE_0", "fused_ffn_tmp.UP_0"}, "fused_ffn with 1 names to the left and 3 to the right",
    ),
    "a fused form with a name too few": (
        ["qkv -> q, fused_qkv, num_heads=2, num_key_value_groups=2, axis=0"], {"qkv": meta(6)}, None,
        {"q", "fused_qkv", "num_heads"}, "fused_qkv with 1 names",  # attributes have become tensors
    ),
    "a fused form without a target": (
        ["ffn -> gate, up, fused_ffn, axis=0"], FFN, None,
        {"fused_ffn_tmp.GATE_0", "fused_ffn_tmp.UP_0"}, {"gate", "up"},
    ),
    "attributes in another order": (
        ["qkv -> out, num_heads=2, num_key_value_groups=1, fused_qkv_old, axis=0"], QKV, None,
        (SyntaxError, None), {"out": (8,)},
    ),
    "an axis that is not there": (
        ["a -> b, c, axis=2"], {"a": meta(4, 2)}, None,
        (IndexError, "tuple index out of range"), ("PP182", "axis 2 of the tensor"),
    ),
    "a cast to the type that is there": (['a -> b, dtype="float32"'], ONE, None, {"b"}, ("PP184", "")),
    "a cast from a type that is not there": (
        ['a -> b, src_dtype="float16", dst_dtype="bfloat16"'], ONE, None,
        {"b"}, ("PP182", "`src_dtype` is float16, and the tensor has float32"),
    ),
    "a shape that is not the targets": (
        ["a -> b"], ONE, {"b": meta(8)}, {"b": (4,)}, ("PP182", "becomes [4], and the target has [8]"),
    ),
    "a result that nobody reads": (["a -> typo"], TWO, TWO, {"a", "b"}, ("PP184", "")),
    "nothing that is left out": (["typo -> _"], ONE, None, {"a"}, ("PP181", "there is no `typo`")),
    "an added tensor that the target has not": (
        ["_ -> typo"], ONE, ONE, {"a"}, ("PP181", "the target has no `typo`"),
    ),
    "a rename with an axis": (
        ["a -> b, axis=0"], ONE, None, {"a"}, "`axis` belongs to a merge",  # without a target, the rename is lost
    ),
    "an attribute that a form does not have": (
        ["ffn -> out, fused_ffn, sparse=3"], {"ffn": meta(4, 4)}, None, {"out"}, "unknown attribute `sparse`",
    ),
}  # fmt: skip
"""Statements, source, target; what Paddle's engine makes, or its error; what is made here, or code and words of the
finding, or words about the statement itself. What is made is names, or shapes by name."""


def shapes_like(made, expected):
    return {name: one.shape for name, one in made.items()} if isinstance(expected, dict) else set(made)


@pytest.mark.parametrize("name", ROWS)
def test_what_paddles_engine_does_otherwise(name):
    lines, source, target, expected, right = ROWS[name]
    if isinstance(expected, tuple):
        with pytest.raises(expected[0], match=expected[1]):
            theirs(lines, source, target)
    else:
        assert shapes_like(theirs(lines, source, target), expected) == expected
    if isinstance(right, str):
        assert right in refused_text(lines)
    elif isinstance(right, tuple):
        code, words = right
        assert words in refused(code, lines, source, target)
    else:
        assert shapes_like(ours(lines, source, target), right) == right


def a_star_next_to_an_id():
    lines = ["layers.$LAYER_ID.experts.*.w -> layers.$LAYER_ID.fused, axis=0"]
    assert set(theirs(lines, EXPERTS)) == set(EXPERTS)
    made = ours(lines, EXPERTS)["layers.0.fused"]
    assert (made == np.arange(1, 97).reshape(24, 4)).all()  # by number: 10 comes after 9


def refused_text(lines):
    with pytest.raises(AoaError) as error:
        program(*lines)
    return error.value.findings[0].message


def an_id_with_nothing():
    lines = ["layers.$LAYER_ID.w -> _"]
    with pytest.raises(AssertionError, match="must contain all of the following keys"):
        theirs(lines, LAYERS)
    state_map = program_map(program(*lines), {**LAYERS, "head": meta(2)}, None)
    assert (set(state_map.tensors), state_map.removed) == ({"head"}, set(LAYERS))


def a_merge_of_tensors_that_differ_in_another_dim():
    source = {"a": meta(4, 2), "b": meta(5, 2)}
    lines = ["a, b -> c, axis=1"]
    tensor = engine(lines, source, None).output_vars["c"]
    assert tuple(tensor.shape) == (4, 4)  # of 18 elements
    assert "they differ outside axis 1" in refused("PP182", lines, source)


def a_merge_of_types_that_a_cast_made_differ():
    source = {"a": meta(2), "b": meta(2)}
    lines = ['a -> t, dtype="bfloat16"', "t, b -> c, axis=0"]
    casts = apply_map_with_paddle(engine(lines, source, {"c": meta(4)}), numbers(source))[1]["c"]
    assert list(casts) == [("bfloat16",), ("bfloat16",), (), ()]  # half of a float32 tensor is rounded
    refused("PP182", lines, source, {"c": meta(4)})


def a_gate_and_an_up_projection_of_two_sizes():
    source = {"gate": meta(2), "up": meta(4)}
    lines = ["gate, up -> ffn, fused_ffn, axis=0"]
    assert theirs(lines, source)["ffn"].tolist() == [1, 2, 3, 4, 5, 6]  # the halves are 1, 2, 3 and 4, 5, 6
    assert "shards differ in size" in refused("PP182", lines, source)


def names_that_are_anothers_with_a_number():
    source = {"a": meta(4), "a1": meta(4), "b": meta(4)}
    lines = ["a, a1, b -> qkv, fused_qkv, num_heads=2, num_key_value_groups=2, axis=0"]
    made = engine(lines, source, {"qkv": meta(12)}).output_vars["qkv"]
    assert {key for key, *_ in made.slices} == {"a", "b"}  # a1, the keys, is covered by the second head of a
    assert ours(lines, source)["qkv"].tolist() == [1, 2, 5, 6, 9, 10, 3, 4, 7, 8, 11, 12]


def heads_that_do_not_divide_into_the_parts():
    source, target = {"qkv": meta(24, shards=4)}, {"out": meta(24, shards=4)}
    lines = ["qkv -> out, fused_qkv_old, num_heads=6, num_key_value_groups=2, axis=0"]
    with pytest.raises(SyntaxError):
        theirs(lines, source, target)
    lines = [line.replace("groups=2", "groups=6") for line in lines]
    assert "Q_2" not in str(engine(lines, source, target).statements)  # heads 2 and 5 are in no part
    assert "do not divide into its 4 shards" in refused("PP182", lines, source, target)


def a_permutation_of_too_few_dims():
    source = {"a": meta(4, 2, 3)}
    lines = ['a -> b, permute="[0, 1]"']
    assert len(engine(lines, source, None).output_vars["b"].shape) == 2  # a dim is gone
    assert "a permutation of 2 dims" in refused("PP182", lines, source)


def a_permutation_with_a_dim_twice():
    lines = ['a -> b, permute="[0, 0]"']
    assert tuple(engine(lines, {"a": meta(4, 2)}, None).output_vars["b"].shape) == (4, 4)
    assert "each dim once" in refused_text(lines)


def a_permutation_in_round_brackets():
    lines = ['a -> b, permute="(1, 0)"']
    (slices,) = engine(lines, {"a": meta(4, 2)}, None).output_vars["b"].slices
    assert slices[1] == (slice(0, 4), slice(0, 2))
    assert "each dim once" in refused_text(lines)


def a_cast_to_another_type_than_the_targets():
    source, target, lines = {"a": meta(4)}, {"b": meta(4)}, ['a -> b, dtype="bfloat16"']
    (entry,) = engine(lines, source, target).find_shard_sources(_desc("b", target["b"]))
    assert (entry.postprocess_list, entry.target_slice.dtype) == (["bfloat16"], "float32")
    refused("PP182", lines, source, target)


def a_cast_of_a_weight_and_its_moments():
    source = {"a": meta(4), "a.moment1_0": meta(4)}
    target = {"b": meta(4, dtype="bfloat16"), "b.moment1_0": meta(4)}
    lines = ['a -> b, dtype="bfloat16"']
    (entry,) = engine(lines, source, target).find_shard_sources(_desc("b.moment1_0", target["b.moment1_0"]))
    assert entry.postprocess_list == ["bfloat16"]  # the moment goes through 16 bits
    assert program_map(program(*lines), source, target).tensors["b.moment1_0"].copies[0].casts == ()


def _desc(name, one):
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeightDesc

    return ShardedWeightDesc(name, one.shape, one.shape, (0,) * len(one.shape), one.dtype)


def an_exchange_in_two_statements():
    source = {"a": meta(1), "b": meta(1)}
    lines = ["a -> b", "b -> a"]
    assert {name: made.tolist() for name, made in theirs(lines, source, source).items()} == {"a": [1], "b": [1]}
    assert "nothing has read it" in refused("PP184", lines, source, source)


def a_name_of_the_source_that_is_covered_without_a_target():
    source = {"a": meta(1), "b": meta(1)}
    assert theirs(["a -> b"], source)["b"].tolist() == [2]  # still the source's own b
    refused("PP184", ["a -> b"], source)


def a_name_that_is_assigned_twice():
    source, lines = {"a": meta(1), "b": meta(1)}, ["a -> c", "b -> c"]
    assert theirs(lines, source, {"c": meta(1)})["c"].tolist() == [2]
    assert "`c` is assigned here, and was assigned before in line 1" in refused("PP184", lines, source, {"c": meta(1)})


def a_tensor_that_is_read_and_left_out():
    source, target, lines = {"a": meta(2)}, {"b": meta(2)}, ["a -> b", "a -> _"]
    assert engine(lines, source, target).find_shard_sources(_desc("b", target["b"])) == []  # b is never written
    refused("PP184", lines, source, target)


def a_reverse_with_a_star():
    source, target = {"e.0.w": meta(4, 4), "e.1.w": meta(4, 4)}, {"b": meta(8, 4)}
    lines = ["e.*.w -> b, axis=0"]
    with pytest.raises(SyntaxError):
        theirs(lines, target, source, aoa_config_reverse=True)
    assert set(ours(inverse_of(lines, source, target), target, source)) == set(source)


def a_reverse_with_an_offset():
    source, target = {"a.1.w": meta(4)}, {"b.0.w": meta(4)}
    lines = ["a.$LAYER_ID_OFFSET.w -> b.$LAYER_ID_OFFSET.w"]
    with pytest.raises(KeyError):
        theirs(lines, target, source, aoa_config_reverse=True)
    assert inverse_of(lines, source, target) == ["b.0.w -> a.1.w"]


def a_reverse_of_a_fused_form_that_splits():
    source, target = {"ffn": meta(4)}, {"gate": meta(2), "up": meta(2)}
    lines = ["ffn -> gate, up, fused_ffn, axis=0"]
    with pytest.raises(AttributeError):
        theirs(lines, target, source, aoa_config_reverse=True)
    assert inverse_of(lines, source, target) == ["gate, up -> ffn, fused_ffn, axis=0"]


def a_reverse_of_a_merge_of_two_sizes():
    source, target = {"a": meta(4), "b": meta(8)}, {"c": meta(12)}
    lines = ["a, b -> c, axis=0"]
    reverse = theirs(lines, target, source, aoa_config_reverse=True)
    assert [reverse[name].shape for name in "ab"] == [(6,), (6,)]  # which are 4 and 8
    made = ours(inverse_of(lines, source, target), target, source)
    assert [made[name].tolist() for name in "ab"] == [[*range(1, 5)], [*range(5, 13)]]


def inverse_of(lines, source, target):
    from pipeproof.state.aoa.statements import write_statements

    return write_statements(inverse(program(*lines), source, target)).splitlines()


DIFFERENCES = {
    name: test for name, test in list(globals().items()) if callable(test) and re.match(r"(an?_|names_|heads_)", name)
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_paddles_engine_ignores(name):
    DIFFERENCES[name]()


def test_the_page_has_a_row_for_each_difference():
    section = PAGE.read_text().partition("## Differences from Paddle's engine")[2]
    rows = re.findall(r"^\| ([a-z][^|]+?) \| [^|]+ \| [^|]+ \|$", section, re.MULTILINE)
    assert sorted(rows[1:]) == sorted([*ROWS, *(name.replace("_", " ") for name in DIFFERENCES)])
