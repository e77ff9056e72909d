"""Every command that simulates, on a plan with each feature: it ends well, its figures show the effect of the
feature."""

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeproof.analysis.sweep import run_sweep as sweep_run
from pipeproof.analysis.tune import frameworks
from tests.cli.commands import EXAMPLES, invoke
from tests.features import FEATURES, TOPOLOGIES, merged, mixed
from tests.plans import FLAT

ANALYTIC = {"cost": {"analytic": {"device": "h200", **FLAT}}}
WIDE = {"model": {"hidden_size": 512, "ffn_size": 2048, "vocab_size": 2048}}
"""So wide that a feature adds many nanoseconds, the unit of computed times."""

MORE_WORK = {
    "experts", "experts by token id", "experts by all-gather", "losses of routers", "biases of experts",
    "router in float64",
    "hyper-connections", "hyper-connections of DeepSeek-V4", "MTP", "MTP, magic send", "MTP, own embeddings",
    "MTP after the norm", "dropout", "selective recomputation", "full recomputation", "receives early",
    "norms of heads", "recomputed MLPs", "recomputed experts", "biases", "biases of queries, keys and values",
    "main gradients",
}  # fmt: skip
"""Features that lengthen computations; a receive that waits on the device slows the computations next to it, and wider
gradients of weights are more bytes to add to."""
LESS_WORK = {
    "grouped queries", "head size", "latent attention", "compressed attention", "packed documents", "learned positions",
    "GELU", "GELU with tanh",
}  # fmt: skip
"""Smaller projections with these sizes, no rotation, or no gate. A LayerNorm moves as many bytes as an RMSNorm."""
MORE_MEMORY = {
    "experts", "experts by token id", "experts by all-gather", "losses of routers", "biases of experts",
    "router in float64",
    "hyper-connections", "hyper-connections of DeepSeek-V4", "MTP", "MTP, magic send", "MTP, own embeddings",
    "MTP after the norm", "dropout", "main gradients", "empty layers", "norm before the tail", "words that cross",
    "words in one message", "receives early", "slots",
    "norms of heads", "LayerNorm", "learned positions", "biases", "biases of queries, keys and values",
    "recomputed experts",
}  # fmt: skip
LESS_MEMORY = {
    "grouped queries", "head size", "latent attention", "SGD", "selective recomputation", "full recomputation",
    "recomputed MLPs", "lengths", "GELU", "GELU with tanh", "compressed attention", "packed documents",
}  # fmt: skip


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Sweeps in threads, which start at once, and `tune` with a few kinds of schedules."""
    monkeypatch.setattr(sweep_run, "own_processes", ThreadPoolExecutor)
    tried = ("1f1b", "zb_v", "dualpipe")
    monkeypatch.setattr(frameworks, "SCHEDULE_KINDS", {kind: frameworks.SCHEDULE_KINDS[kind] for kind in tried})


def figures(file):
    """Figures of a plan: microseconds that all ranks compute, and bytes of the fullest rank."""
    done = invoke("simulate", "--format", "json", file)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert all(math.isfinite(rank["span"]) and 0 < rank["busy"] <= rank["span"] for rank in result["ranks"])
    assert result["makespan"] >= max(rank["span"] for rank in result["ranks"])
    busy = sum(rank["busy"] for rank in result["ranks"])
    return busy, max(rank["memory"]["peak_bytes"] for rank in result["ranks"] if rank["memory"])


@pytest.fixture
def write(tmp_path):
    def write_plan(plan):
        file = tmp_path / "plan.json"
        file.write_text(json.dumps(plan))
        return file

    return write_plan


def sign(figure, plain):
    """True if a figure is larger or smaller, up to nanoseconds, to which sums of other stages are rounded."""
    return 0 if math.isclose(figure, plain, rel_tol=1e-7, abs_tol=0.1) else 1 if figure > plain else -1


@pytest.mark.parametrize("name", FEATURES)
def test_figures_say_what_a_feature_does(name, write):
    plain = figures(write(mixed([], **ANALYTIC, **WIDE)))
    plan = mixed([name], **ANALYTIC, **WIDE)
    if "moe" in plan["model"]:
        plan["model"]["moe"]["ffn_size"] = WIDE["model"]["ffn_size"]
    busy, held = figures(write(plan))
    assert sign(busy, plain[0]) == (name in MORE_WORK) - (name in LESS_WORK)
    assert sign(held, plain[1]) == (name in MORE_MEMORY) - (name in LESS_MEMORY)


@pytest.mark.slow(
    but=["experts", "MTP", "tied embedding", "dropout", "sharded optimizer", "full recomputation", "partial", "lengths"]
)
@pytest.mark.parametrize("name", FEATURES)
def test_every_command_takes_every_feature(name, write):
    topology = "tp 2" if name in {"words that cross", "words in one message", "partial"} else "tp 2, SP"
    file = write(mixed([name], topology, **ANALYTIC))
    ends_well(file)
    done = invoke("sweep", file, "--set", "schedule.kind=[1f1b, zb_h1]", "--format", "json")
    assert done.exit_code == 0, done.output
    points = json.loads(done.stdout)["points"]
    assert [point["status"] for point in points] == ["ok", "ok"]
    assert all(point["makespan"] > 0 for point in points)


@pytest.mark.parametrize("kind", ["dualpipe_v", "1f1b"])
@pytest.mark.parametrize("name", ["experts", "experts by all-gather"])
def test_every_command_takes_pairs_that_alternate(kind, name, write):
    plan = mixed([name], "ep 2", kind, **ANALYTIC, **WIDE)
    alone, together = (
        figures(write(merged(plan, {"schedule": {"overlap": overlap}}))) for overlap in ("none", "pairs")
    )
    assert together[0] < (2 if kind == "1f1b" else 1.5) * alone[0]
    ends_well(write(merged(plan, {"schedule": {"overlap": "pairs"}, "cost": {"collective_slowdown": 0.1}})))


def test_every_command_takes_declared_layers():
    file = EXAMPLES / "declared_layers.yaml"
    ends_well(file, costs=False)
    refused = invoke("show", "--costs", file)
    assert refused.exit_code == 2
    assert "`Pipeline.profile` of their script measures them" in refused.stderr


def ends_well(file, *, costs=True):
    """Nothing is refused, and no figure is none."""
    commands = [
        ("check",),
        ("simulate",),
        ("show",),
        ("show", "--memory"),
        ("tune", "--top", "2", "--framework", "any"),
    ]
    commands += [("show", "--costs")] if costs else []
    for command in commands:
        done = invoke(*command, file)
        assert done.exit_code == 0, (command, done.output)
        assert done.stdout
        assert not re.search(r"\b(nan|inf)\b", done.stdout)


def test_features_are_of_every_key_of_a_model():
    """A key of ``model`` that no feature here has would be in none of these tests."""
    from pipeproof.specs.model import ModelSpec

    seen = {key for sections in FEATURES.values() for key in sections.get("model", {})}
    sizes = {"kind", "num_layers", "hidden_size", "num_heads", "ffn_size", "vocab_size", "seq_length"}
    assert seen | sizes == ModelSpec.model_fields.keys()
    assert len(TOPOLOGIES) == 6
