"""Statements between two conventions equal the conventions' own maps."""

import pytest

from pipeproof.state.aoa.aoa_engine import program_map
from pipeproof.state.aoa.read_statements import read_statements
from pipeproof.state.aoa.tensor_families import TensorMeta
from pipeproof.state.names.convention_maps import map_from_own_names, statements_between, tied_copies
from pipeproof.state.names.convention_tensors import weights_of
from pipeproof.state.state_codes import NoNamesError
from pipeproof.state.tensor_map import compose, invert, map_differences
from tests.state.aoa.arrays import apply_map, apply_map_with_paddle, engine, numbers, same
from tests.state.names.models import ERNIE, MODELS, NAMED, PARTS_AND_MORE, PHI3, plan_of

FAR_APART = {frozenset({"paddlefleet", other}) for other in ("pipeproof", "paddleformers-unfused")}
"""Pairs that add nothing to the other pairs."""
PAIRS = [
    (kind, model, one, other)
    for kind, model, one in NAMED
    for of, _, other in NAMED
    if kind == of and one != other and frozenset({one, other}) not in FAR_APART
]


def metas(convention, model):
    named = map_from_own_names(convention, model, "bfloat16").tensors
    return {name: TensorMeta(tensor.dtype, tensor.shape) for name, tensor in named.items()}


def between(one, other, model):
    return compose(
        invert(map_from_own_names(one, model, "bfloat16"), weights_of(model, "bfloat16")),
        map_from_own_names(other, model, "bfloat16"),
    )


@pytest.mark.parametrize(("kind", "model", "one", "other"), PAIRS)
def test_they_make_every_tensor_of_the_same_elements_as_the_two_maps_composed(kind, model, one, other):
    model = plan_of(**model).model
    if "pipeproof" in (one, other) and (model.moe or model.mla):
        with pytest.raises(NoNamesError, match="takes"):
            statements_between(one, other, model)
        return
    if (one == ERNIE) != (other == ERNIE):
        with pytest.raises(NoNamesError, match="takes the pairs of rotary positions apart"):
            statements_between(one, other, model)
        return
    program = read_statements(statements_between(one, other, model), "statements.aoa")
    said = program_map(program, metas(one, model), metas(other, model))
    right = between(one, other, model)
    assert said.tensors.keys() == right.tensors.keys()
    assert {name: tensor.shape for name, tensor in said.tensors.items()} == {
        name: tensor.shape for name, tensor in right.tensors.items()
    }
    # A copy may be made of another copy: both are the same element of pipeproof's own tensor.
    ours = map_from_own_names(one, model, "bfloat16")
    assert not list(map_differences(compose(ours, said), compose(ours, right)))


def test_layers_that_are_alike_share_statements_and_experts_too():
    model = plan_of(num_kv_heads=3, moe=MODELS["experts as Mixtral"]["moe"]).model
    text = statements_between("huggingface", "paddleformers", model)
    layer, mlp = "model.layers.$LAYER_ID", "model.layers.$LAYER_ID.mlp"
    experts = f"{layer}.block_sparse_moe.experts.$EXPERT_ID"
    attention = ", ".join(f"{layer}.self_attn.{part}_proj.weight^T" for part in "qkv")
    assert text.splitlines() == [
        f"{attention} -> {layer}.self_attn.qkv_proj.weight, fused_qkv, num_heads=6, num_key_value_groups=3",
        f"{layer}.self_attn.o_proj.weight^T -> {layer}.self_attn.o_proj.weight",
        f"{layer}.block_sparse_moe.gate.weight^T -> {mlp}.gate.weight",
        f"{experts}.w1.weight^T, {experts}.w3.weight^T -> {mlp}.experts.$EXPERT_ID.up_gate_proj.weight, fused_ffn",
        f"{experts}.w2.weight^T -> {mlp}.experts.$EXPERT_ID.down_proj.weight",
    ]


def test_layers_of_two_kinds_are_reported_apart_where_one_name_is_for_both():
    model = plan_of(num_layers=3, moe=MODELS["experts, some shared"]["moe"]).model
    norms = [line for line in statements_between("huggingface", "megatron", model).splitlines() if "post_" in line]
    assert norms == [
        "model.layers.0.post_attention_layernorm.weight -> decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "model.layers.1.post_attention_layernorm.weight -> decoder.layers.1.pre_mlp_layernorm.weight",
        "model.layers.2.post_attention_layernorm.weight -> decoder.layers.2.pre_mlp_layernorm.weight",
    ]


def test_the_padding_of_a_vocabulary_is_beyond_statements():
    model = plan_of(unpadded_vocab_size=30).model
    assert statements_between("huggingface", "paddleformers", model)
    with pytest.raises(NoNamesError, match="padding"):
        statements_between("huggingface", "megatron", model)


KINDS = ("tied with modules", "experts as Mixtral", "experts with biases", "latent, experts")
ENGINE_KINDS = {kind: MODELS[kind] for kind in KINDS}
ENGINE_KINDS |= {kind: PARTS_AND_MORE[kind][0] for kind in ("Qwen2", "Qwen3", "GLM-4 with experts")}


@pytest.mark.needs_paddle
@pytest.mark.parametrize("other", ["paddleformers", "paddleformers-unfused"])
@pytest.mark.parametrize("kind", ENGINE_KINDS)
def test_paddles_own_engine_makes_the_same_of_them(kind, other):
    model = plan_of(**ENGINE_KINDS[kind]).model
    require_same_of_paddle("huggingface", other, model, statements_between("huggingface", other, model).splitlines())


def require_same_of_paddle(one, other, model, lines):
    source, target = metas(one, model), metas(other, model)
    arrays = numbers(source)
    arrays |= {copy: arrays[of] for copy, of in tied_copies(one, model).items() if copy in arrays}
    made, _ = apply_map_with_paddle(engine(lines, source, target), arrays, target)
    expected, _ = apply_map(between(one, other, model), arrays)
    assert same({name: made[name] for name in target}, expected)


@pytest.mark.needs_paddle
@pytest.mark.parametrize(("one", "other"), [(PHI3, "huggingface"), (PHI3, "paddleformers"), ("paddleformers", PHI3)])
def test_paddles_own_engine_splits_grouped_queries_keys_and_values_of_different_sizes(one, other):
    model = plan_of(num_kv_heads=2).model
    lines = statements_between(one, other, model).splitlines()
    numbered = [line.replace("$LAYER_ID", str(layer)) for layer in range(model.num_layers) for line in lines]
    require_same_of_paddle(one, other, model, numbered)  # its engine finds no pattern among intermediate names
