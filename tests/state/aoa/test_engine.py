"""Region copies: sizes, types and shards that fit or do not, and the messages."""

import pytest

from pipeproof.state.aoa.aoa_engine import program_map
from pipeproof.state.regions import Region, tiling_fault
from pipeproof.state.state_codes import AoaError
from pipeproof.state.tensor_map import RegionCopy
from tests.state.aoa.arrays import apply_map, meta, numbers, program


def refusal(lines, source, target=None):
    with pytest.raises(AoaError) as error:
        program_map(program(*lines), source, target)
    return [
        (finding.code, finding.message, finding.location and finding.location.line) for finding in error.value.findings
    ]


def test_a_fused_qkv_has_its_heads_by_group():
    source = {"qkv": meta(2, 8)}
    state_map = program_map(program("qkv -> q, k, v, fused_qkv, num_heads=4, num_key_value_groups=2"), source, None)
    made, _ = apply_map(state_map, numbers(source))
    assert made["q"][0].tolist() == [1, 2, 5, 6]
    assert (made["k"][0].tolist(), made["v"][0].tolist()) == ([3, 7], [4, 8])
    assert [len(tensor.copies) for tensor in state_map.tensors.values()] == [
        2,
        2,
        2,
    ]  # k, q, v: heads of a group are one


def test_what_goes_back_to_its_place_is_one_region_copy_again():
    state_map = program_map(program("a -> b[0:16], axis=0", "b[0:16] -> c, axis=0"), {"a": meta(32, 3)}, None)
    whole = Region((0, 0), (32, 3))
    assert state_map.tensors["c"].copies == (RegionCopy(whole, "a", whole),)


def test_the_shards_of_a_tensor_go_through_names_between():
    source, target = {"ffn": meta(1, 8, shards=2)}, {"out": meta(8, 1, shards=4)}
    lines = ["ffn -> a", "a -> b, fused_ffn", "b -> c", "c^T -> out"]
    made, _ = apply_map(program_map(program(*lines), source, target), numbers(source))
    assert made["out"].ravel().tolist() == [1, 3, 2, 4, 5, 7, 6, 8]  # g0 u0 g1 u1 ..: 1 2 and 5 6 are of the gate
    ((_, message, _),) = refusal(["ffn, x -> b, axis=1", "b -> c, fused_ffn"], source | {"x": meta(1, 8)})
    assert "`b` comes from several tensors" in message
    source = {"ffn": meta(4, 2), "x": meta(4, 2)}
    ((_, message, _),) = refusal(
        ["ffn -> b, fused_ffn", "b, x -> out, axis=0", "out -> c, d, axis=0"],
        source,
        {"c": meta(4, 2), "d": meta(4, 2)},
    )
    assert "`b` becomes no single tensor of the target" in message


@pytest.mark.parametrize(
    ("lines", "source", "said"),
    [
        (["a -> b, c, axis=1"], {"a": meta(4, 3)}, "`a` is 3 along axis 1, which does not divide by 2"),
        (["a -> b, c, fused_ffn"], {"a": meta(4)}, "axis 1 of the tensor has 1 ([4])"),
        (["a, b -> c, axis=0"], {"a": meta(4), "b": meta(4, dtype="bfloat16")}, "`a` is float32, and `b` bfloat16"),
        (["a, b -> c, axis=0"], {"a": meta(4), "b": meta(4, 1)}, "they differ outside axis 0"),
        (
            ["a, b, c -> d, fused_qkv, num_heads=4, num_key_value_groups=2, axis=0"],
            {"a": meta(8), "b": meta(6), "c": meta(4)},
            "shards differ in size along axis 0: `a` 2, `b` 3, `c` 2",
        ),
        (['a -> b, permute="[0, 2, 1]"'], {"a": meta(4, 3)}, "a permutation of 3 dims, and the tensor has 2"),
        (['a -> b, src_dtype="bfloat16", dst_dtype="float16"'], {"a": meta(4)}, "and the tensor has float32"),
    ],
)
def test_what_does_not_fit_is_reported_with_its_numbers(lines, source, said):
    ((code, message, line),) = refusal(lines, source)
    assert (code, line) == ("PP182", 1)
    assert said in message


def test_what_comes_out_is_compared_with_the_target():
    found = refusal(
        ["a -> b", "c -> d"], {"a": meta(4), "c": meta(4)}, {"b": meta(2, 2), "d": meta(4, dtype="float16")}
    )
    assert [code for code, *_ in found] == ["PP182"] * 2
    assert [line for *_, line in found] == [1, 2]
    ((_, message, line),) = refusal([], {"a": meta(4)}, {"a": meta(5)})
    assert (message, line) == ("`a` becomes [4], and the target has [5]", None)


def test_one_mistake_does_not_bring_others():
    found = refusal(["a -> b, c, axis=5", "b -> d", "c -> d2, d3, axis=9"], {"a": meta(4)})
    assert [(code, line) for code, _, line in found] == [("PP182", 1)]


def test_added_tensors_are_zeros_and_removed_shards_are_named():
    source, target = {"a": meta(4)}, {"b": meta(2), "z": meta(3)}
    state_map = program_map(program("a -> b, c, axis=0", "c -> _", "_ -> z"), source, target)
    assert state_map.tensors["z"].copies == (RegionCopy(Region((0,), (3,)), None, Region((0,), (3,))),)
    assert state_map.dropped == {"a": (Region((2,), (2,)),)}
    assert state_map.removed == frozenset()


def test_what_goes_to_two_places_is_named_as_copied():
    state_map = program_map(program("a -> b", "a -> c"), {"a": meta(4), "d": meta(1)}, None)
    assert state_map.duplicated == {"a"}
    assert all(
        tiling_fault(one.shape, [copy.region for copy in one.copies]) is None for one in state_map.tensors.values()
    )
