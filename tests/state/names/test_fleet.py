"""PaddleFormers' own statements to PaddleFleet's names make the tensors that ``paddlefleet`` names, element by element.

The files in ``fleet`` come from its classes, for the sizes of these models. A class has tensors besides that a plan's
model has not, and they are made, too.
"""

from pathlib import Path

import numpy as np
import pytest

from pipeproof.state.aoa.aoa_engine import program_map
from pipeproof.state.aoa.read_statements import read_statements
from pipeproof.state.aoa.tensor_families import TensorMeta
from pipeproof.state.names.convention_maps import map_from_own_names, tied_copies
from pipeproof.state.names.convention_tensors import weights_of
from pipeproof.state.tensor_map import compose, invert
from tests.state.aoa.arrays import apply_map, apply_map_with_paddle, engine, numbers, same
from tests.state.names.apply_map import apply_map as moved
from tests.state.names.models import MODELS, MOE, plan_of

FILES = Path(__file__).parent / "fleet"
ARCHITECTURES = {
    "qwen2": MODELS["dense with grouped queries"] | {"biases": "qkv"},
    "qwen3": MODELS["tied"] | {"qk_norm": True},
    "qwen2_moe": {"num_kv_heads": 2, "moe": MOE | {"num_shared_experts": 1}},
    "qwen3_moe": {"num_kv_heads": 3, "qk_norm": True, "moe": MOE | {"normalize": False}},
    "glm4_moe": MODELS["experts with biases"],
    "glm_moe_dsa": MODELS["latent with modules"],
    "kimi_k2": {part: sizes for part, sizes in MODELS["latent with modules"].items() if part != "mtp"},
}
BESIDES = {"qwen2_moe": {"self_attn.qkv_proj.bias", "mlp.shared_experts.gate_weight"}}


def statements(architecture):
    return (FILES / f"{architecture}.aoa").read_text().splitlines()[1:]


def source_of(architecture, model):
    """A file of the architecture: shapes of its tensors, in bfloat16, and their elements."""
    copies = tied_copies("huggingface", model)
    named = map_from_own_names("huggingface", model, "bfloat16").tensors
    # Embedding and head of a module are in the file, too, but no statement speaks of them.
    shapes = {name: one.shape for name, one in named.items() if name not in copies or name.endswith("norm.weight")}
    size = model.size_of_head
    for number in range(model.num_layers):
        attention = f"model.layers.{number}.self_attn"
        if architecture == "qwen2_moe":
            for part, heads in zip("qkv", (model.num_heads, model.kv_heads, model.kv_heads), strict=True):
                shapes[f"{attention}.{part}_proj.bias"] = (heads * size,)
            shapes[f"model.layers.{number}.mlp.shared_expert_gate.weight"] = (1, model.hidden_size)
    if architecture == "qwen2_moe":
        shapes = {name.replace("shared_experts", "shared_expert"): shape for name, shape in shapes.items()}
    metas = {name: TensorMeta("bfloat16", shape) for name, shape in shapes.items()}
    arrays = numbers(metas)
    return metas, arrays | {name: arrays[of] for name, of in copies.items() if name in arrays}


def named_by_us(model, arrays):
    """The tensors of ``paddlefleet``, made of Hugging Face's by way of pipeproof's own."""
    arrays = {name.replace("shared_expert.", "shared_experts."): array for name, array in arrays.items()}
    arrays |= {name: arrays[of] for name, of in tied_copies("huggingface", model).items() if name not in arrays}
    ours = invert(map_from_own_names("huggingface", model, "bfloat16"), weights_of(model, "bfloat16"))
    return apply_map(compose(ours, map_from_own_names("paddlefleet", model, "bfloat16")), arrays)[0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_they_make_the_tensors_of_the_convention_and_what_a_class_has_besides(architecture):
    model = plan_of(**ARCHITECTURES[architecture]).model
    metas, arrays = source_of(architecture, model)
    program = read_statements("\n".join(statements(architecture)), architecture)
    made, _ = apply_map(program_map(program, metas, None), arrays)
    expected = named_by_us(model, arrays)
    besides = {f"model.layers.{number}.{name}" for number in (0, 1) for name in BESIDES.get(architecture, ())}
    assert made.keys() - expected.keys() == besides
    assert same({name: array for name, array in made.items() if name not in besides}, expected)


@pytest.mark.needs_paddle
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_paddles_engine_makes_the_same_of_all_of_them(architecture):
    model = plan_of(**ARCHITECTURES[architecture]).model
    metas, arrays = source_of(architecture, model)
    made, _ = apply_map_with_paddle(engine(statements(architecture), metas, None), arrays)
    expected = named_by_us(model, arrays)
    assert same({name: made[name] for name in expected}, expected)


def test_ranks_fuse_their_own_gate_and_up_of_a_block_but_not_of_experts():
    model = plan_of(**MODELS["experts, some shared"]).model
    draw = np.random.default_rng(2)
    arrays = {name: draw.normal(size=entry.shape) for name, entry in weights_of(model, "float32").items()}
    dense, shared, expert = (
        f"model.layers.{place}.up_gate_proj.weight" for place in ("0.mlp", "1.mlp.shared_experts", "1.mlp.experts.11")
    )
    there = map_from_own_names("paddlefleet", model, "float32", {dense: 2, shared: 2, expert: 2})
    made = moved(there, arrays)
    for name, ours in ((dense, "layer.0.mlp"), (shared, "layer.1.mlp.shared")):
        gates, ups = (np.split(arrays[f"{ours}.{part}.weight"], 2, axis=1) for part in ("gate", "up"))
        assert (made[name] == np.concatenate([gates[0], ups[0], gates[1], ups[1]], axis=1)).all()
    whole = [arrays[f"layer.1.mlp.experts.{part}.weight"][11] for part in ("gate", "up")]
    assert (made[expert] == np.concatenate(whole, axis=1)).all()
