"""The plans of published trainings: their sizes add up to the published ones, and they are checked and simulated."""

from fractions import Fraction
from math import prod
from pathlib import Path

import pytest

from pipeproof.cost.analytic_times import AnalyticCosts
from pipeproof.diagnostics.finding import Severity
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import load_plan
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.op_work import ComputeUnit, Phase, layer_work
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.subject import make_subject

PLANS = Path(__file__).parents[2] / "examples" / "published"


@pytest.fixture(scope="module", params=sorted(PLANS.glob("*.yaml")), ids=lambda path: path.stem)
def loaded(request):
    return load_plan(request.param)


def llama():
    return load_plan(PLANS / "llama3_405b.yaml").spec


def deepseek():
    return load_plan(PLANS / "deepseek_v3.yaml").spec


def without_module(spec):
    """The main model alone."""
    return spec.model_copy(update={"model": spec.model.model_copy(update={"mtp": None})})


def num_weights(spec):
    return sum(prod(p.shape) for layer in describe_gpt(spec) for p in layer.parameters)


def active_weights(spec):
    """Number of weights, with only the experts that a token visits."""
    model = spec.model
    share = Fraction(model.moe.top_k, model.moe.num_experts)
    return sum(
        prod(p.shape) * (share if ".experts." in p.name else 1)
        for layer in describe_gpt(spec)
        for p in layer.parameters
    )


def flops_of_a_token(spec):
    """Forward products and attention over all ranks, for a token, with an even cut of everything over the ranks."""
    size = AnalyticCosts(spec, spec.cost.analytic).size
    works = [w for layer in describe_gpt(spec) for w in layer_work(spec, layer.name, size, 2)]
    own = sum(w.flops for w in works if w.phase is Phase.FORWARD and w.unit is not ComputeUnit.VECTOR)
    return own * spec.topology.tp / size.num_tokens


def test_weights_are_as_many_as_published():
    """405B, and 671B without the module for multi-token prediction: a token multiplies with 37B of these.

    The plan does not include the routers' biases: 256 in each of 58 blocks. The module has a block with experts, two
    norms and the projection that joins them; published weights have 14B for it, embedding and head once more among
    them.
    """
    assert num_weights(llama()) == 405_853_388_800
    main = without_module(deepseek())
    assert num_weights(main) + 58 * 256 == 671_026_419_200
    ends = 129280 * 7168  # of the embedding, one row for a token
    assert round((active_weights(main) - ends) / 10**9) == 37
    block = sum(prod(p.shape) for layer in describe_gpt(main) if layer.name == "layer.60" for p in layer.parameters)
    module = block + 2 * 7168 + 2 * 7168 * 7168
    assert num_weights(deepseek()) - num_weights(main) == module == 11_610_060_800
    assert 13 < (module + 2 * ends) / 10**9 < 14


def test_forward_flops_of_a_token_by_hand():
    tokens = 8192
    attention = 4 * 128 * 128 * Fraction(tokens + 1, 2)  # two products over the keys that a token looks at
    weights = (
        num_weights(llama()) - 128256 * 16384 - (2 * 126 + 1) * 16384
    )  # without an embedding and norms: no products
    assert flops_of_a_token(llama()) == 2 * weights + 126 * attention
    assert 2 * weights < flops_of_a_token(llama()) < Fraction(108, 100) * 2 * weights

    tokens = 4096
    attention = 2 * 128 * (128 + 64 + 128) * Fraction(tokens + 1, 2)
    norms = 61 * (2 * 7168 + 1536 + 512) + 7168
    main = without_module(deepseek())
    weights = active_weights(main) - 129280 * 7168 - norms
    assert flops_of_a_token(main) == 2 * weights + 61 * attention
    module = active_weights(deepseek()) - active_weights(main) - (4 * 7168 + 1536 + 512)  # and the head once more
    assert flops_of_a_token(deepseek()) - flops_of_a_token(main) == 2 * (module + 129280 * 7168) + attention


@pytest.mark.slow(but=["deepseek_v3"])
def test_they_check_clean_and_simulate(loaded):
    subject = make_subject(loaded)
    found = check_subject(subject).findings
    assert [f.code for f in found if f.severity is Severity.ERROR] == []
    simulation = simulate(subject.plan)
    work = max(figures.busy_us for figures in simulation.figures)
    assert work < simulation.makespan < 2 * work


def test_a_step_has_the_tokens_that_were_published():
    for spec, tokens in ((llama(), 16 * 2**20), (deepseek(), 15360 * 4096)):
        topology, schedule = spec.topology, spec.schedule
        sequences = topology.dp * topology.ep * schedule.num_micro_batches * schedule.micro_batch_size
        assert sequences * spec.model.seq_length == tokens
    assert (llama().topology.num_ranks, deepseek().topology.num_ranks) == (8192, 2048)


@pytest.mark.parametrize(("nodes_per_token", "bound"), [(4, "backward"), (None, "exchanges")])
def test_what_bounds_two_side_by_side(nodes_per_token, bound):
    """A pair takes as long as its backward alone, and as all its exchanges if each visit crosses by itself."""
    spec = deepseek()
    moe = spec.model.moe.model_copy(update={"nodes_per_token": nodes_per_token})
    spec = spec.model_copy(update={"model": spec.model.model_copy(update={"moe": moe})})
    costs = AnalyticCosts(spec, spec.cost.analytic)
    for stage in range(3, 13):
        forward, backward = costs.stages[stage], costs.stages[15 - stage]
        both = (forward[Phase.FORWARD], backward[Phase.INPUT], backward[Phase.WEIGHT])
        links = sum(phase.links_us for phase in both)
        taken = {
            "exchanges": links,
            "computation": sum(phase.us for phase in both) - links,
            "backward": both[1].us + both[2].us,
        }
        assert costs.overlapped[stage] == taken[bound] == max(taken.values())


def test_flops_of_a_step_are_as_published():
    """arXiv:2505.09343, table 4: 19.926 s on 2,048 GPUs are 385 TFLOP/s of each with causal attention, 432 without.

    That is the main model's work: with the module's it would be 402.
    """
    spec, tokens = without_module(deepseek()), 4096
    token = flops_of_a_token(spec)
    other_half = 61 * 2 * 128 * (128 + 64 + 128) * Fraction(tokens - 1, 2)
    for of_a_token, published in ((token, 385), (token + other_half, 432)):
        reached = 3 * of_a_token * 15360 * tokens / (2048 * Fraction("19.926")) / 10**12
        assert reached == pytest.approx(published, rel=0.005)


def test_deepseek_v4_flash_has_its_published_number_of_weights():
    """284 billion; most are experts."""
    spec = without_module(load_plan(PLANS / "deepseek_v4_flash.yaml").spec)
    experts = sum(prod(p.shape) for layer in describe_gpt(spec) for p in layer.parameters if ".experts." in p.name)
    assert round(num_weights(spec) / 1e9) == 284
    assert experts == 43 * 256 * 3 * 4096 * 2048
