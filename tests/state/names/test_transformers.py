"""Transformers' own classes load our export, compute the plan's logits, and give the state back bit for bit."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeproof.state.names.convention_maps import map_from_convention, map_from_own_names
from pipeproof.state.names.part_tables import config_of
from pipeproof.state.open_checkpoint import open_checkpoint
from tests.state.names.apply_map import apply_map
from tests.state.names.models import ERNIE, ONE_CLASS, PARTS, PARTS_AND_MORE, PHI3, plan_of
from tests.state.names.test_convention import own_model, random_weights

pytestmark = [pytest.mark.needs_torch, pytest.mark.needs("transformers")]

KINDS = [kind for kind, (_, conventions) in PARTS.items() if "huggingface" in conventions] + ["Qwen3 with experts"]
CASES = [(kind, "huggingface") for kind in KINDS] + [
    (kind, convention)
    for kind, (_, conventions) in ONE_CLASS.items()
    for convention in (PHI3, ERNIE)
    if convention in conventions
]
FLOAT32 = ("router.weight", "router.bias")
"""Tensors that a class of ERNIE keeps in float32."""


@pytest.mark.parametrize(("kind", "convention"), CASES)
def test_a_class_loads_the_export_and_gives_it_back(tmp_path, kind, convention):
    import torch
    from transformers import AutoModelForCausalLM

    plan = plan_of(**PARTS_AND_MORE[kind][0])
    ours, config = random_weights(plan.model), config_of(plan.model, "float64", convention)
    if convention == ERNIE:
        ours |= {name: ours[name].astype(np.float32).astype(float) for name in ours if name.endswith(FLOAT32)}
    named = apply_map(map_from_own_names(convention, plan.model, "float64"), ours)
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {name: np.ascontiguousarray(array) for name, array in named.items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    network, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert type(network).__name__ == config["architectures"][0]
    assert not any(loading[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))

    tokens = np.random.default_rng(1).integers(0, plan.model.vocab_size, (2, plan.model.seq_length))
    with torch.no_grad():
        logits = network.eval()(torch.from_numpy(tokens), use_cache=False).logits.numpy()
    (expected,) = own_model(ours, plan.model).logits([tokens])
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)  # its rotary angles are float32

    network.save_pretrained(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.safetensors")
    returned = apply_map(map_from_convention(convention, open_checkpoint(file), plan), load_file(file))
    assert returned.keys() == ours.keys()
    assert all((returned[name] == ours[name]).all() for name in ours)
