"""Every weight has one name, one place and a way back; parts that other tools do not have are refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.state.names.convention_maps import (
    map_from_own_names,
    map_to_convention,
)
from pipeproof.state.names.convention_tables import CONVENTIONS, convention_of
from pipeproof.state.names.convention_tensors import convention_tensors, weights_of
from pipeproof.state.regions import tiling_fault
from pipeproof.state.state_codes import NoNamesError
from pipeproof.state.tensor_map import compose, identity_map, invert, map_differences
from tests.plans import plan_dict
from tests.state.names.apply_map import apply_map
from tests.state.names.models import (
    DEEPSEEK_V4,
    ERNIE,
    GPT2,
    MLA,
    MOE,
    NAMED,
    PARTS_AND_MORE,
    PHI3,
    SIGMOID,
    plan_of,
)
from tests.state.names.open_models import OwnModel, open_model
from tests.state.names.test_forward import random_weights

DEEPSEEK_V4S = [("DeepSeek-V4", DEEPSEEK_V4, convention) for convention in ("pipeproof", "huggingface")]
SIZES = {"num_layers": 2, "hidden_size": 8, "num_heads": 4, "ffn_size": 6, "vocab_size": 9}


def numbered(model):
    """Pipeproof's tensors with a number of its own in each element."""
    found, at = {}, 1
    for name, entry in weights_of(model, "float32").items():
        size = int(np.prod(entry.shape))
        found[name] = np.arange(at, at + size, dtype=np.float64).reshape(entry.shape)
        at += size
    return found


@pytest.mark.parametrize(("kind", "model", "convention"), [*NAMED, *DEEPSEEK_V4S])
def test_the_map_back_after_the_map_is_the_identity(kind, model, convention):
    model = plan_of(**model).model
    ours = weights_of(model, "float32")
    there = map_from_own_names(convention, model, "float32")
    for tensor in there.tensors.values():
        assert tiling_fault(tensor.shape, [copy.region for copy in tensor.copies]) is None
    back = compose(there, invert(there, ours))
    assert not list(map_differences(back, identity_map(ours)))
    assert back.tensors.keys() == ours.keys()
    arrays = numbered(model)
    returned = apply_map(invert(there, ours), apply_map(there, arrays))
    assert all((returned[name] == arrays[name]).all() for name in arrays)


@settings(max_examples=40, deadline=None)
@given(
    st.fixed_dictionaries(
        {"num_kv_heads": st.sampled_from([1, 2, 4]), "head_size": st.sampled_from([2, 4, 6])},
        optional={
            "tied_embedding": st.booleans(),
            "unpadded_vocab_size": st.integers(2, 9),
            "mtp": st.fixed_dictionaries({"num_modules": st.integers(1, 3)}),
            "mla": st.sampled_from([MLA, MLA | {"q_rank": 3}]),
            "moe": st.sampled_from([MOE, MOE | SIGMOID, MOE | {"dense_layers": 1, "num_shared_experts": 3}]),
        },
    ),
    st.sampled_from(CONVENTIONS),
)
def test_of_any_model_the_way_there_and_back_keeps_all_but_the_padding(model, convention):
    if convention in (PHI3, ERNIE):
        model = {key: value for key, value in model.items() if key not in ("mtp", "mla", "moe")}
    if "mla" in model:
        model = {key: value for key, value in model.items() if key not in ("num_kv_heads", "head_size")}
    model = plan_of(**SIZES | model).model
    arrays, ours = numbered(model), weights_of(model, "float32")
    there = map_from_own_names(convention, model, "float32")
    returned = apply_map(invert(there, ours), apply_map(there, arrays))
    ids = model.vocab_size if convention in ("megatron", "pipeproof") else model.num_token_ids
    if "head.weight" in arrays:
        arrays["head.weight"][:, ids:] = 0
    arrays["embed.weight"][ids:] = 0
    assert all((returned[name] == arrays[name]).all() for name in arrays)


def test_experts_are_named_by_number_and_not_in_the_order_of_strings():
    model = plan_of(moe=MOE).model
    made = apply_map(map_from_own_names("huggingface", model, "float32"), numbered(model))
    gate = numbered(model)["layer.1.mlp.experts.gate.weight"]
    for expert in (2, 10, 11):
        name = f"model.layers.1.block_sparse_moe.experts.{expert}.w1.weight"
        assert (made[name] == gate[expert].T).all()


def test_gate_and_up_of_each_of_several_ranks_follow_one_another_where_paddle_fused_them_so():
    model = plan_of().model
    arrays = numbered(model)
    name = "model.layers.1.mlp.up_gate_proj.weight"
    made = apply_map(map_from_own_names("paddleformers", model, "float32", {name: 2}), arrays)
    gates, ups = (np.split(arrays[f"layer.1.mlp.{part}.weight"], 2, axis=1) for part in ("gate", "up"))
    assert (made[name] == np.concatenate([gates[0], ups[0], gates[1], ups[1]], axis=1)).all()
    other = "model.layers.0.mlp.up_gate_proj.weight"
    whole = [arrays[f"layer.0.mlp.{part}.weight"] for part in ("gate", "up")]
    assert (made[other] == np.concatenate(whole, axis=1)).all()


@pytest.mark.parametrize(
    ("model", "convention", "reason"),
    [
        ({"hyper_connections": {"streams": 4}}, "huggingface", "hyper_connections"),
        ({"hyper_connections": {"streams": 4}}, "megatron", "hyper_connections"),
        ({"swiglu_limit": 7.0}, "huggingface", "swiglu_limit"),
        ({"swiglu_limit": 7.0}, "paddleformers", "swiglu_limit"),
        ({"moe": MOE | {"expert_bias_rate": 0.1}}, "megatron", "score: sigmoid"),
        ({"moe": MOE}, PHI3, "no class of transformers with these names has `moe`"),
        ({"moe": MOE}, ERNIE, "`moe`; its experts have `score: softmax`, `normalize: true` and `expert_bias_rate`"),
        ({"moe": MOE | SIGMOID}, ERNIE, "`score: softmax`"),
        ({"moe": MOE | {"expert_bias_rate": 0.1, "normalize": False}}, ERNIE, "`normalize: true`"),
        ({"mtp": {"num_modules": 1}, "num_kv_heads": 2}, ERNIE, "these names has `mtp`"),
        ({"biases": "all"}, ERNIE, "`biases: all`"),
        ({"qk_norm": True}, PHI3, "`qk_norm: true`"),
        ({}, "hugginface", "huggingface"),
        ({"qk_norm": True, "biases": "qkv"}, "huggingface", "`qk_norm: true` and `biases: qkv`"),
        ({"norm": "layer"}, "paddleformers", "no model of PaddleFormers has `norm: layer`"),
        (GPT2 | {"num_kv_heads": 2}, "huggingface", "`biases: all` and `num_kv_heads`"),
        (GPT2, "paddlefleet", "`positions: learned`"),
        (DEEPSEEK_V4, "megatron", "hyper_connections"),
        (DEEPSEEK_V4 | {"hyper_connections": None}, "paddlefleet", "compressed_attention"),
        (DEEPSEEK_V4 | {"hyper_connections": None}, "huggingface", "`contraction: learned`"),
        (
            DEEPSEEK_V4 | {"hyper_connections": DEEPSEEK_V4["hyper_connections"] | {"transposed": False}},
            "huggingface",
            "`transposed: true`",
        ),
        (DEEPSEEK_V4 | {"swiglu_formula": "gpt_oss"}, "huggingface", "`swiglu_formula: silu`"),
        (DEEPSEEK_V4 | {"moe": DEEPSEEK_V4["moe"] | {"num_shared_experts": 2}}, "huggingface", "num_shared_experts"),
        (DEEPSEEK_V4 | {"moe": DEEPSEEK_V4["moe"] | {"normalize": False}}, "huggingface", "`normalize: true`"),
        (
            DEEPSEEK_V4 | {"moe": DEEPSEEK_V4["moe"] | {"dense_layers": 1}},
            "huggingface",
            "without `dense_layers`",
        ),
        (DEEPSEEK_V4 | {"moe": DEEPSEEK_V4["moe"] | {"expert_bias_rate": None}}, "huggingface", "expert_bias_rate"),
        (DEEPSEEK_V4 | {"mtp": {"num_modules": 1, "magic_send": True}}, "huggingface", "all residual streams"),
    ],
)
def test_what_a_convention_has_no_names_for_is_refused_with_the_reason(model, convention, reason):
    with pytest.raises(NoNamesError) as error:
        map_from_own_names(convention, plan_of(**model).model, "float32")
    (finding,) = error.value.findings
    assert finding.code == "PP928"
    assert reason in finding.message + (finding.help or "")


PART_VALUES = {
    "norm": ("rms", "layer"),
    "qk_norm": (False, True),
    "positions": ("rotary", "learned"),
    "mlp": ("swiglu", "gelu", "gelu_tanh"),
    "biases": ("none", "qkv", "all"),
}
LLAMA = [values[0] for values in PART_VALUES.values()]


def map_or_reason(convention, model):
    """The map to a convention, or None and why there is none."""
    try:
        return map_from_own_names(convention, model, "float32"), ""
    except NoNamesError as error:
        return None, str(error.findings[0])


SECTIONS = ({}, {"moe": MOE}, {"moe": MOE | SIGMOID}, {"mla": MLA}, {"mtp": {"num_modules": 1}}, {"num_kv_heads": 2})


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: "".join(section) or "plain")
def test_every_combination_of_parts_has_all_its_names_or_is_refused(section, convention):
    named = 0
    for values in itertools.product(*PART_VALUES.values()):
        keys = dict(zip(PART_VALUES, values, strict=True))
        try:
            model = plan_of(**section, **keys, num_layers=1).model
        except PlanFileError:
            continue  # PP106: no such model
        there, reason = map_or_reason(convention, model)
        if there is None:
            assert convention not in ("pipeproof", "megatron")
            assert all(f"`{key}" in reason for key in section if key != "num_kv_heads" or convention == "huggingface")
            assert all(f"`{key}: " in reason for key, value in keys.items() if value not in LLAMA)
            continue
        named += 1
        weights = weights_of(model, "float32")
        read = {copy.source for tensor in there.tensors.values() for copy in tensor.copies}
        assert read == weights.keys()
        assert invert(there, weights).tensors.keys() == weights.keys()
    assert named or (convention in (PHI3, ERNIE) and section.keys() & {"moe", "mla", "mtp"})


def test_biases_have_the_order_of_the_columns_of_their_weights():
    model = plan_of(**PARTS_AND_MORE["GPT-2"][0]).model
    arrays = numbered(model)
    bias = arrays["layer.1.attn.qkv.bias"].reshape(model.num_heads, 3, model.size_of_head)
    gpt2 = apply_map(map_from_own_names("huggingface", model, "float32"), arrays)
    assert (gpt2["transformer.h.1.attn.c_attn.bias"] == bias.transpose(1, 0, 2).reshape(-1)).all()
    megatron = apply_map(map_from_own_names("megatron", model, "float32"), arrays)
    assert (megatron["decoder.layers.1.self_attention.linear_qkv.bias"] == arrays["layer.1.attn.qkv.bias"]).all()
    assert (megatron["embedding.position_embeddings.weight"] == arrays["embed.positions.weight"]).all()


def test_what_the_optimizer_keeps_is_removed_on_purpose():
    model = plan_of().model
    tensors = weights_of(model, "float32")
    moment = tensors["norm.weight"].model_copy(update={"kind": "moment", "weight": "norm.weight"})
    named = map_to_convention("huggingface", tensors | {"optimizer/moment1/norm.weight": moment}, model, "float32")
    assert named.removed == {"optimizer/moment1/norm.weight"}
    assert named.tensors == map_from_own_names("huggingface", model, "float32").tensors


CASES = [
    (kind, convention)
    for kind, (model, conventions) in PARTS_AND_MORE.items()
    for convention in conventions
    if "mla" not in model
]


def own_model(ours, model):
    """The forward pass with our names; with experts, that with the names that Hugging Face's class loads."""
    if model.moe is None:
        return OwnModel(ours, model.model_dump())
    names = ERNIE if model.moe.score == "softmax" and model.moe.expert_bias_rate else "huggingface"
    named = apply_map(map_from_own_names(names, model, "float64"), ours)
    return open_model(names, model.model_dump())(named, model.model_dump())


@pytest.mark.parametrize(("kind", "convention"), CASES)
def test_another_tools_forward_pass_with_its_names_has_the_plans_logits(kind, convention):
    model = plan_of(**PARTS_AND_MORE[kind][0]).model
    ours, sizes = random_weights(model), model.model_dump()
    theirs = apply_map(map_from_own_names(convention, model, "float64"), ours)
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, (2, 2, model.seq_length))
    lanes = tokens if model.mtp else tokens[:1]
    own, other = own_model(ours, model), open_model(convention, sizes)(theirs, sizes)
    for found, expected in zip(other.logits(lanes), own.logits(lanes), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-11)
    assert own.read == own.weights.keys()
    assert other.read == theirs.keys()


@pytest.mark.parametrize(
    ("names", "mtp", "wanted"),
    [
        ("megatron", {"reads": "after_norm"}, {"mtp.layers.0.final_layernorm.weight": "mtp.0.norm.weight"}),
        ("paddleformers", {"reads": "after_norm"}, {"model.layers.4.norm.weight": "mtp.0.norm.weight"}),
        ("huggingface", {"embedding": "own"}, {"model.layers.4.embed_tokens.weight": "mtp.0.embed.weight"}),
        ("megatron", {"embedding": "own"}, None),
        ("huggingface", {"reads": "after_norm"}, None),
    ],
)
def test_norms_and_embeddings_of_modules(names, mtp, wanted):
    model = plan_from_dict(plan_dict(model={"mtp": {"num_modules": 1, **mtp}})).spec.gpt
    if wanted is None:
        with pytest.raises(NoNamesError):
            convention_of(names, model)
        return
    convention, shapes = convention_of(names, model), {n: t.shape for n, t in weights_of(model, "float32").items()}
    made = {
        convention.name_of(tensor.role, tensor.block, model.num_layers): [view.source for view in tensor.views]
        for tensor in convention_tensors(model, shapes, convention, {})
    }
    assert {name: made[name] for name in wanted} == {name: [source] for name, source in wanted.items()}
