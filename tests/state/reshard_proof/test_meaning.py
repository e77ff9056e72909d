"""Maps with a wrong meaning: experts in the order of strings or renumbered, a qkv split across groups."""

import dataclasses

import pytest

from pipeproof.state.region_text import region_meaning, tensor_range_text
from pipeproof.state.regions import NO_DIM, Region, whole_region
from pipeproof.state.reshard.meaning_proof import prove_meaning
from pipeproof.state.tensor_map import RegionCopy, StateMap, TensorMap, identity_map, invert
from tests.state.reshard_proof.plans import EXPERTS, layout, lowered

GROUPED = {"num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "hidden_size": 8}
QKV = "layer.0.attn.qkv.weight"
UP = "layer.0.mlp.experts.up.weight"


def model_of(model):
    return lowered({"pp": 1, "tp": 1}, model).spec.model


def experts_by_name(number_for):
    """Twelve experts of matrices [2, 3] in one tensor; its expert e is the tensor with the name ``number_for(e)``."""
    copies = tuple(
        RegionCopy(
            Region((e, 0, 0), (1, 3, 2)), f"m.layers.0.experts.{number_for(e)}.up", whole_region((2, 3)), (NO_DIM, 1, 0)
        )
        for e in range(12)
    )
    return StateMap({UP: TensorMap("float32", (12, 3, 2), copies)})


STRINGS = sorted(range(12), key=str)


@pytest.mark.parametrize("number_for", [STRINGS.__getitem__, STRINGS.index], ids=["read so", "written so"])
@pytest.mark.parametrize("outward", [False, True], ids=["in", "out"])
def test_experts_in_the_order_of_strings_are_reported(number_for, outward):
    claimed, right = experts_by_name(number_for), experts_by_name(lambda e: e)
    if outward:
        files = {copy.source: TensorMap("float32", (2, 3), ()) for copy in right.tensors[UP].copies}
        claimed, right = (invert(one, files) for one in (claimed, right))
    (found,) = prove_meaning(claimed, right, model_of(EXPERTS))
    assert found.code == "PP211"
    assert found.message.startswith("experts are in the order of strings: 0, 1, 10, 11, 2, 3, 4, 5, 6, 7, 8, 9: ")
    assert "expert 10 (of 12)" in found.message or "expert 2 (of 12)" in found.message


def test_experts_that_are_renumbered_on_each_rank_are_reported():
    (found,) = prove_meaning(experts_by_name(lambda e: e % 6), experts_by_name(lambda e: e), model_of(EXPERTS))
    assert found.message.startswith(
        "experts 6, 7, 8, 9, 10, 11 (of 12) are missing, and 0, 1, 2, 3, 4, 5 are repeated: "
    )


def test_one_expert_for_another_is_reported():
    swapped = {3: 4, 4: 3}
    (found,) = prove_meaning(
        experts_by_name(lambda e: swapped.get(e, e)), experts_by_name(lambda e: e), model_of(EXPERTS)
    )
    assert found.message.startswith("expert 4 stands for expert 3 (of 12): ")


def fused(in_groups):
    """The fused weight of q [8, 8], k and v [8, 4]: by groups of two queries, a key and a value; or q, k and v."""
    columns = [("q", 0, 4), ("k", 0, 2), ("v", 0, 2), ("q", 4, 4), ("k", 2, 2), ("v", 2, 2)]
    if not in_groups:
        columns = [("q", 0, 8), ("k", 0, 4), ("v", 0, 4)]
    copies, at = [], 0
    for name, start, width in columns:
        copies.append(RegionCopy(Region((0, at), (8, width)), name, Region((0, start), (8, width))))
        at += width
    return StateMap({QKV: TensorMap("float32", (8, 16), tuple(copies))})


def test_a_fused_qkv_that_is_not_in_groups_is_reported_with_head_and_rank():
    (found,) = prove_meaning(fused(False), fused(True), model_of(GROUPED), layout({"pp": 1, "tp": 2}, GROUPED))
    assert found.message == (
        "the fused qkv is not split by groups of heads: `layer.0.attn.qkv.weight columns 4..5` would be `q columns "
        "4..5 (query 2 of group 1)`, and is `k columns 0..1 (key of group 0)`, on rank 0"
    )


def test_gate_and_up_exchanged_is_reported():
    names = {"layer.0.mlp.gate.weight": "layer.0.mlp.up.weight", "layer.0.mlp.up.weight": "layer.0.mlp.gate.weight"}
    tensors = layout({"pp": 1, "tp": 1}, GROUPED).tensors
    right = identity_map({name: tensors[name] for name in names})
    claimed = StateMap({
        name: dataclasses.replace(tensor, copies=(dataclasses.replace(tensor.copies[0], source=names[name]),))
        for name, tensor in right.tensors.items()
    })  # fmt: skip
    (found,) = prove_meaning(claimed, right, model_of(GROUPED))
    assert found.message.startswith("gate and up are exchanged: ")
    assert found.message.endswith(" (and 1 more tensor)")


def test_zeros_in_place_of_elements_are_reported():
    right = fused(True)
    copies = (dataclasses.replace(right.tensors[QKV].copies[0], source=None), *right.tensors[QKV].copies[1:])
    claimed = StateMap({QKV: dataclasses.replace(right.tensors[QKV], copies=copies)})
    (found,) = prove_meaning(claimed, right, model_of(GROUPED))
    assert found.message == (
        "`layer.0.attn.qkv.weight columns 0..3` would be `zeros`, and is `q columns 0..3 (queries 0 to 1 of group 0)`"
    )


def test_the_right_map_passes():
    assert prove_meaning(fused(True), fused(True), model_of(GROUPED)) == ()
    assert prove_meaning(experts_by_name(lambda e: e), experts_by_name(lambda e: e), model_of(EXPERTS)) == ()


@pytest.mark.parametrize(
    ("name", "region", "words"),
    [
        (QKV, Region((0, 0), (8, 8)), "queries 0 to 1 of group 0, key of group 0, value of group 0"),
        (QKV, Region((0, 3), (8, 12)), "query 1 of group 0 to value of group 1"),
        (QKV, Region((0, 5), (8, 1)), "key of group 0"),
        (f"optimizer/moment1/{QKV}", Region((0, 14), (8, 2)), "value of group 1"),
        ("embed.weight", Region((16, 0), (8, 8)), "ids 16..18 and padding"),
        ("head.weight", Region((0, 19), (8, 5)), "padding"),
        ("layer.0.mlp.up.weight", Region((0, 0), (8, 5)), None),
        ("model.embed_tokens.weight", Region((0, 0), (8, 5)), None),
    ],
)
def test_regions_of_a_model_in_words(name, region, words):
    model = model_of({**GROUPED, "vocab_size": 24, "unpadded_vocab_size": 19})
    assert region_meaning(name, region, model) == words


def test_experts_in_words():
    model = model_of(EXPERTS)
    assert region_meaning(UP, Region((3, 0, 0), (1, 16, 8)), model) == "expert 3 (of 12)"
    assert region_meaning("layer.0.mlp.router.weight", Region((0, 6), (16, 6)), model) == "experts 6 to 11 (of 12)"
    assert (
        tensor_range_text(UP, Region((3, 0, 0), (1, 16, 8)), (12, 16, 8), "expert 3")
        == f"{UP} [3..3, 0..15, 0..7] (expert 3)"
    )
