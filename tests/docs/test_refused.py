"""Unsupported combinations: every row of the tables is refused kindly, and there are no other refused pairs."""

import itertools
import json

import pytest

from pipeproof.diagnostics.finding import PipeproofError, Severity
from pipeproof.specs.load_plan import load_plan, plan_from_dict
from pipeproof.verify.check_plan import check
from tests.features import FEATURES, TOPOLOGIES, mixed


@pytest.fixture
def plans(validation_script):
    return validation_script("refused_plans")


@pytest.fixture
def refusal(validation_script):
    return validation_script("make_refused").refusal


def located(plan, tmp_path):
    """The findings on a plan as it is in a file, of whichever command refuses it."""
    from pipeproof.exec.rank.executor_support import require_executable

    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan, indent=1))
    try:
        report = check(load_plan(file))
        if report.errors:
            return report.errors
        require_executable(report.subject)
    except PipeproofError as error:
        return error.findings
    return ()


def test_every_row_is_refused_with_place_and_remedy(plans, tmp_path):
    refused = [plans.gpt_plan(*parts) for parts in plans.REFUSED]
    refused += [plans.custom_plan(part) for part in plans.WITH_CUSTOM_LAYERS]
    for plan in refused:
        found = located(plan, tmp_path)
        assert found, plan
        for finding in found:
            assert finding.severity is Severity.ERROR
            assert finding.location is not None, finding
            assert finding.help


def test_without_one_of_its_parts_each_is_taken(plans, refusal):
    assert refusal(plans.gpt_plan()) is None
    assert refusal(plans.custom_plan())[0] == "run"  # which has no such layers; `check` takes them
    rests = {tuple(part.name for part in rest): rest for parts in plans.REFUSED
             for left_out in parts if (rest := tuple(part for part in parts if part is not left_out))}  # fmt: skip
    for name, rest in rests.items():
        assert refusal(plans.gpt_plan(*rest)) is None, name


MODULES = ("MTP", "MTP after the norm", "MTP, own embeddings", "MTP, magic send")
COMPRESSED = ("compressed attention", "packed documents")
PAIRS_REFUSED = {
    ("grouped queries", "latent attention"): "PP106",
    **{(attention, other): "PP106" for attention in COMPRESSED for other in ("dropout", "cp 2")},
    **{
        (other, attention): "PP106"
        for attention in COMPRESSED
        for other in (
            "norms of heads", "LayerNorm", "learned positions", "biases of queries, keys and values", "biases",
            "grouped queries", "latent attention",
        )
    },
    ("packed documents", "lengths"): "PP108",
    ("head size", "latent attention"): "PP106",
    **{
        (streams, modules): "PP106"
        for streams in ("hyper-connections", "hyper-connections of DeepSeek-V4")
        for modules in ("MTP", "MTP after the norm")
    },
    **{
        pair: code
        for words in ("words that cross", "words in one message")
        for pair, code in {
            **{(modules, words): "PP909" for modules in MODULES}, ("bsh", words): "PP909",
            (words, "tp 2, SP"): "PP209",
        }.items()
    },
    ("MTP, own embeddings", "MTP, magic send"): "PP106",
    ("experts by all-gather", "experts by token id"): "PP106",
    ("partial", "tp 2, SP"): "PP201",
    **{(modules, "full recomputation"): "PP106" for modules in ("recomputed MLPs", "recomputed experts")},
    **{
        (other, shards): "PP106"
        for shards in ("sharded gradients", "sharded weights")
        for other in (
            "router in float64", "biases of experts", "experts by token id", "MTP, magic send", "tied embedding",
        )
    },
    **{(shards, "sums when ready"): "PP106" for shards in ("sharded gradients", "sharded weights")},
    ("latent attention", "cp 2"): "PP909",
    ("losses of routers", "cp 2"): "PP909",
    ("words that cross", "slots"): "PP504",
    ("norms of heads", "latent attention"): "PP106",
    ("biases of queries, keys and values", "latent attention"): "PP106",
    **{("learned positions", other): "PP106" for other in ("latent attention", *MODULES)},
    **{
        (mlp, other): "PP106"
        for mlp in ("GELU", "GELU with tanh")
        for other in (
            "experts", "experts by all-gather", "losses of routers", "biases of experts", "clamped SwiGLU",
            "recomputed experts", "experts by token id", "router in float64",
        )
    },
    ("router in float64", "experts by all-gather"): "PP106",
    ("router in float64", "cp 2"): "PP909",
    **{
        ("biases", other): "PP106"
        for other in (
            "latent attention", "experts", "experts by all-gather", "losses of routers", "biases of experts",
            "recomputed experts", "experts by token id", "router in float64",
        )
    },
}  # fmt: skip
"""Pairs of what ``tests.features`` has that are in no plan that runs, each in a row of the tables, but for the last:
four slots are too few where four tensors cross an edge together."""


@pytest.mark.parametrize("pair", PAIRS_REFUSED, ids=" + ".join)
def test_a_pair_is_refused(refusal, pair):
    features, topologies = [one for one in pair if one in FEATURES], [one for one in pair if one in TOPOLOGIES]
    assert refusal(mixed(features, *topologies))[1].code == PAIRS_REFUSED[pair]


@pytest.mark.slow
def test_no_other_pair_is_refused(refusal):
    refused = {}
    for pair in itertools.combinations([*FEATURES, *TOPOLOGIES], 2):
        features, topologies = [one for one in pair if one in FEATURES], [one for one in pair if one in TOPOLOGIES]
        if len(topologies) < 2:
            found = refusal(mixed(features, *topologies))
            if found is not None:
                refused[pair] = found[1].code
    assert refused == PAIRS_REFUSED


def test_a_plan_that_runs_is_no_row(validation_script, plans):
    with pytest.raises(AssertionError, match="plans that are refused"):
        validation_script("make_refused")._refusal_cells(plans.gpt_plan())


def test_a_plan_of_own_layers_is_declared_whole(plans):
    assert plan_from_dict(plans.custom_plan()).spec.is_custom
