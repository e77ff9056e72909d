"""Other tools, with the weights under their names, compute the same as the reference with pipeproof's names."""

import numpy as np
import pytest

from pipeproof.state.names.convention_maps import map_from_own_names
from pipeproof.state.names.convention_tensors import weights_of
from tests.state.names.apply_map import apply_map
from tests.state.names.models import NAMED, plan_of
from tests.state.names.open_models import open_model

pytestmark = pytest.mark.needs_paddle


def random_weights(model):
    """Large enough that every product matters, with different norms, and biases that change the choice of experts."""
    draw = np.random.default_rng(5)
    return {name: draw.normal(0.2, 0.4, entry.shape) for name, entry in weights_of(model, "float64").items()}


def reference_losses(plan, weights, batch):
    from pipeproof.stages.describe.gradient_facts import bias_key
    from tests.stages.slopes import whole_model

    biases = {name: array for name, array in weights.items() if name.endswith("router.bias")}
    named = {bias_key(name.removesuffix(".router.bias")): array for name, array in biases.items()}
    model = whole_model(plan, {name: array for name, array in weights.items() if name not in biases} | named)
    ((losses,),) = model.losses([batch])
    return losses.reshape([-1]).numpy().tolist()


def cross_entropy(logits, labels):
    counted = labels >= 0
    logits, labels = logits[counted], labels[counted]
    largest = logits.max(axis=-1)
    sums = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=-1))
    return float((sums - logits[np.arange(len(labels)), labels]).sum())


@pytest.mark.parametrize(("kind", "model", "convention"), [each for each in NAMED if each[2] != "pipeproof"])
def test_another_tools_forward_pass_with_its_names_has_the_references_losses(kind, model, convention):
    from pipeproof.stages.describe.mtp_streams import shifted_batch
    from pipeproof.stages.describe.synthetic import micro_batch

    plan = plan_of(**model)
    weights = random_weights(plan.model)
    theirs = apply_map(map_from_own_names(convention, plan.model, "float64"), weights)
    batch = micro_batch(plan, 0, 0)
    lanes = [
        shifted_batch(batch, distance) for distance in range(1 + (plan.model.mtp.num_modules if plan.model.mtp else 0))
    ]
    sizes = plan.model.model_dump()
    other = open_model(convention, sizes)(theirs, sizes)
    logits = other.logits([lane.tokens for lane in lanes])
    losses = [cross_entropy(found, lane.labels) for found, lane in zip(logits, lanes, strict=True)]
    assert losses == pytest.approx(reference_losses(plan, weights, batch), rel=1e-11)
    assert other.read == theirs.keys()
