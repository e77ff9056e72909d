"""Norms, biases, positions and activations: names and layouts of each convention, by forward passes in numpy."""

import numpy as np
import pytest

from pipeproof.state.names.convention_maps import map_from_own_names
from tests.state.names.apply_map import apply_map
from tests.state.names.models import PARTS_AND_MORE, plan_of
from tests.state.names.open_models import OwnModel, open_model
from tests.state.names.test_forward import random_weights

CASES = [
    (kind, convention)
    for kind, (model, conventions) in PARTS_AND_MORE.items()
    for convention in conventions
    if "mla" not in model
]


def own_model(ours, model):
    """The forward pass with our names; with experts that of Hugging Face, with the names that its class loads."""
    if model.moe is None:
        return OwnModel(ours, model.model_dump())
    named = apply_map(map_from_own_names("huggingface", model, "float64"), ours)
    return open_model("huggingface", model.model_dump())(named, model.model_dump())


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
