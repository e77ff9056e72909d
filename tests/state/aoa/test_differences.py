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


def a_pattern_that_fits_nothing():
    lines = ["layer.$LAYER_ID.w -> blocks.$LAYER_ID.w"]
    assert set(theirs(lines, LAYERS)) == set(LAYERS)  # dropped without a word
    assert "matches no tensor of the source" in refused("PP181", lines, LAYERS)


def a_star_next_to_an_id():
    lines = ["layers.$LAYER_ID.experts.*.w -> layers.$LAYER_ID.fused, axis=0"]
    assert set(theirs(lines, EXPERTS)) == set(EXPERTS)
    made = ours(lines, EXPERTS)["layers.0.fused"]
    assert (made == np.arange(1, 97).reshape(24, 4)).all()  # by number: 10 comes after 9


def an_array_next_to_an_id():
    source = {"layers.0.v_0": meta(4), "layers.0.v_1": meta(4)}
    lines = ["layers.$LAYER_ID.v[0:2] -> layers.$LAYER_ID.v, axis=0"]
    assert set(theirs(lines, source)) == set(source)
    assert ours(lines, source)["layers.0.v"].shape == (8,)


def an_id_of_a_temporary_name():
    lines = ["layers.$LAYER_ID.w -> t.$LAYER_ID.w", "t.$LAYER_ID.w^T -> blocks.$LAYER_ID.w"]
    assert set(theirs(lines, LAYERS)) == {"t.0.w", "t.1.w"}
    assert set(ours(lines, LAYERS)) == {"blocks.0.w", "blocks.1.w"}


def a_transposed_name_with_an_offset():
    source = {"layers.1.w": meta(4, 2)}
    lines = ["layers.$LAYER_ID_OFFSET.w^T -> blocks.$LAYER_ID_OFFSET.w"]
    assert set(theirs(lines, source)) == {"layers.1.w"}
    assert ours(lines, source)["blocks.0.w"].shape == (2, 4)


def ids_that_are_not_there_together():
    source = {"layers.0.experts.0.w": meta(4), "layers.1.experts.1.w": meta(4)}
    lines = ["layers.$LAYER_ID.experts.$EXPERT_ID.w -> blocks.$LAYER_ID.$EXPERT_ID.w"]
    with pytest.raises(ValueError, match=r"layers\.1\.experts\.0\.w should be assigned before"):
        theirs(lines, source)
    assert set(ours(lines, source)) == {"blocks.0.0.w", "blocks.1.1.w"}


def an_id_that_only_the_right_side_has():
    lines = ["layers.$LAYER_ID.w -> blocks.$LAYER_ID.$EXPERT_ID.w"]
    assert "blocks.0.$EXPERT_ID.w" in theirs(lines, LAYERS)
    assert "has no `$EXPERT_ID`" in refused_text(lines)


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


def a_gap_between_experts():
    source = {name: one for name, one in EXPERTS.items() if ".7." not in name}
    lines = ["layers.0.experts.*.w -> fused, axis=0"]
    assert theirs(lines, source)["fused"].shape == (22, 4)  # expert 8 stands where 7 should
    assert "and 7 is missing" in refused("PP181", lines, source)


def numbers_with_zeros_before_them():
    source = {"layers.01.w": meta(4)}
    lines = ["layers.$LAYER_ID.w -> blocks.$LAYER_ID.w"]
    with pytest.raises(ValueError, match=r"layers\.1\.w should be assigned before"):
        theirs(lines, source)
    refused("PP181", lines, source)


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


def a_fused_form_with_a_name_too_many():
    source = {"ffn": meta(6)}
    lines = ["ffn -> gate, up, more, fused_ffn, axis=0"]
    assert "more" not in theirs(lines, source)
    assert "fused_ffn with 1 names to the left and 3 to the right" in refused_text(lines)


def a_fused_form_with_a_name_too_few():
    source = {"qkv": meta(6)}
    lines = ["qkv -> q, fused_qkv, num_heads=2, num_key_value_groups=2, axis=0"]
    assert set(theirs(lines, source)) == {"q", "fused_qkv", "num_heads"}  # attributes have become tensors
    assert "fused_qkv with 1 names" in refused_text(lines)


def a_fused_form_without_a_target():
    source = {"ffn": meta(6)}
    lines = ["ffn -> gate, up, fused_ffn, axis=0"]
    assert set(theirs(lines, source)) == {"fused_ffn_tmp.GATE_0", "fused_ffn_tmp.UP_0"}
    assert set(ours(lines, source)) == {"gate", "up"}


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


def attributes_in_another_order():
    source = {"qkv": meta(8)}
    lines = ["qkv -> out, num_heads=2, num_key_value_groups=1, fused_qkv_old, axis=0"]
    with pytest.raises(SyntaxError):
        theirs(lines, source)
    assert ours(lines, source)["out"].shape == (8,)


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


def an_axis_that_is_not_there():
    source = {"a": meta(4, 2)}
    with pytest.raises(IndexError, match="tuple index out of range"):
        theirs(["a -> b, c, axis=2"], source)
    assert "axis 2 of the tensor" in refused("PP182", ["a -> b, c, axis=2"], source)


def a_cast_to_the_type_that_is_there():
    source = {"a": meta(4)}
    assert set(theirs(['a -> b, dtype="float32"'], source)) == {"b"}
    refused("PP184", ['a -> b, dtype="float32"'], source)


def a_cast_from_a_type_that_is_not_there():
    source, lines = {"a": meta(4)}, ['a -> b, src_dtype="float16", dst_dtype="bfloat16"']
    assert set(theirs(lines, source)) == {"b"}
    assert "`src_dtype` is float16, and the tensor has float32" in refused("PP182", lines, source)


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


def a_shape_that_is_not_the_targets():
    source, target = {"a": meta(4)}, {"b": meta(8)}
    assert theirs(["a -> b"], source, target)["b"].shape == (4,)
    assert "becomes [4], and the target has [8]" in refused("PP182", ["a -> b"], source, target)


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


def a_result_that_nobody_reads():
    source = {"a": meta(1), "b": meta(1)}
    assert set(theirs(["a -> typo"], source, {"a": meta(1), "b": meta(1)})) == {"a", "b"}
    refused("PP184", ["a -> typo"], source, {"a": meta(1), "b": meta(1)})


def a_tensor_that_is_read_and_left_out():
    source, target, lines = {"a": meta(2)}, {"b": meta(2)}, ["a -> b", "a -> _"]
    assert engine(lines, source, target).find_shard_sources(_desc("b", target["b"])) == []  # b is never written
    refused("PP184", lines, source, target)


def nothing_that_is_left_out():
    assert set(theirs(["typo -> _"], {"a": meta(2)})) == {"a"}
    assert "there is no `typo`" in refused("PP181", ["typo -> _"], {"a": meta(2)})


def an_added_tensor_that_the_target_has_not():
    assert set(theirs(["_ -> typo"], {"a": meta(2)}, {"a": meta(2)})) == {"a"}
    assert "the target has no `typo`" in refused("PP181", ["_ -> typo"], {"a": meta(2)}, {"a": meta(2)})


def a_rename_with_an_axis():
    source = {"a": meta(2)}
    assert set(theirs(["a -> b, axis=0"], source)) == {"a"}  # without a target, the rename is lost
    assert "`axis` belongs to a merge" in refused_text(["a -> b, axis=0"])


def an_attribute_that_a_form_does_not_have():
    source = {"ffn": meta(4, 4)}
    assert "out" in theirs(["ffn -> out, fused_ffn, sparse=3"], source)
    assert "unknown attribute `sparse`" in refused_text(["ffn -> out, fused_ffn, sparse=3"])


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
    name: test
    for name, test in list(globals().items())
    if callable(test) and re.match(r"(an?_|ids_|names_|numbers_with|heads_|attributes_|nothing_)", name)
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_paddles_engine_ignores(name):
    DIFFERENCES[name]()


def test_the_page_has_a_row_for_each_difference():
    section = PAGE.read_text().partition("## Differences from Paddle's engine")[2]
    rows = re.findall(r"^\| ([a-z][^|]+?) \| [^|]+ \| [^|]+ \|$", section, re.MULTILINE)
    assert sorted(rows[1:]) == sorted(name.replace("_", " ") for name in DIFFERENCES)
