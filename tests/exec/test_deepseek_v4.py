"""A small DeepSeek-V4 with all of its layers and an MTP module, on real processes of both frameworks.

Documents are packed, and positions are stretched by YaRN. Each run's log equals the graph. Where sums are in order its
steps have the bits of the reference, elsewhere they are within the bound of rounding.
"""

import hashlib

import numpy as np
import pytest

from pipeproof.stages.describe.synthetic import hash_tables
from tests.exec.processes import Run
from tests.features import FEATURES
from tests.plans import plan_dict, subject

MODEL = {
    **FEATURES["packed documents"]["model"], **FEATURES["hyper-connections of DeepSeek-V4"]["model"],
    "moe": {
        "num_experts": 4, "top_k": 2, "ffn_size": 8, "num_shared_experts": 1, "score": "sqrtsoftplus",
        "routed_scale": 1.5, "hash_layers": 2, "expert_bias_rate": 0.003,
    },
    "swiglu_limit": 0.05, "swiglu_formula": "silu", "num_layers": 4,
    "mtp": {"num_modules": 1, "reads": "after_norm", "embedding": "own"},
}  # fmt: skip
ZB_V = {"kind": "zb_v", "num_chunks": 2}
RUNS = {
    "pp 2, 1F1B": ({"pp": 2}, {}),
    "pp 2, ZB-V": ({"pp": 2}, ZB_V),
    "pp 2, ep 2, 1F1B": ({"pp": 2, "ep": 2}, {}),
    "pp 2, ep 2, ZB-V": ({"pp": 2, "ep": 2}, ZB_V),
    "pp 2, tp 2, sequence parallel": ({"pp": 2, "tp": 2, "sequence_parallel": True}, {}),
}
OVERLAPPED = {"pp": 2, "ep": 2}, {"kind": "dualpipe_v", "num_chunks": 2, "overlap": "pairs"}


PADDLE, TORCH = (pytest.param(name, marks=getattr(pytest.mark, f"needs_{name}")) for name in ("paddle", "torch"))


def require_same(tmp_path, topology, schedule, backend, **more):
    plan = plan_dict(model=MODEL, topology=topology, schedule=schedule, run={"backend": backend, "steps": 2})
    plan["model"] |= more
    ended = Run(tmp_path, plan).end()
    assert ended.status == 0, ended.output
    assert ended.report["log_matches_graph"]
    in_order = backend == "paddle" or topology == {"pp": 2}
    assert ended.report["judged_by"] == ("bits" if in_order else "bound")
    if in_order:
        assert all(step["bitwise"] for step in ended.report["steps"])
    assert all(one["uncut_max_rel_diff"] <= ended.report["parallel_bound"] for one in ended.report["gradients"])


@pytest.mark.slow(but=["pp 2, ep 2, 1F1B-paddle", "pp 2, ZB-V-torch"])
@pytest.mark.parametrize("backend", [PADDLE, TORCH])
@pytest.mark.parametrize("name", RUNS)
def test_runs_are_those_of_the_reference(tmp_path, name, backend):
    require_same(tmp_path, *RUNS[name], backend)


@pytest.mark.slow(but=["pp 2, 1F1B-torch", "pp 2, tp 2, sequence parallel-paddle"])
@pytest.mark.parametrize("backend", [PADDLE, TORCH])
@pytest.mark.parametrize("name", ["pp 2, 1F1B", "pp 2, ep 2, ZB-V", "pp 2, tp 2, sequence parallel"])
def test_a_module_that_reads_all_streams(tmp_path, name, backend):
    require_same(tmp_path, *RUNS[name], backend, mtp={**MODEL["mtp"], "reads": "streams"})


@pytest.mark.needs_torch
def test_exchanges_go_on_under_the_other_computation(tmp_path):
    require_same(tmp_path, *OVERLAPPED, "torch")  # collectives of Paddle block


@pytest.mark.needs_torch
def test_a_run_takes_the_tables_of_a_file_relative_to_its_plan(tmp_path):
    from safetensors.numpy import save_file

    plan = subject(model=MODEL).plan.spec
    tables = [np.roll(table, 1, axis=0) for table in hash_tables(plan).values()]
    stored = {"path": "t.safetensors", "sha256": hashlib.sha256(np.stack(tables).tobytes()).hexdigest()}
    losses = []
    for name, more in (("drawn", {}), ("stored", {"hash_tables": stored})):
        home = tmp_path / name
        home.mkdir()
        save_file({f"layers.{n}.ffn.gate.tid2eid": table for n, table in enumerate(tables)}, home / "t.safetensors")
        model = {**MODEL, "moe": {**MODEL["moe"], **more}}
        ended = Run(home, plan_dict(model=model, topology={"pp": 2}, run={"backend": "torch", "steps": 1})).end()
        assert ended.status == 0, ended.output
        assert all(step["bitwise"] for step in ended.report["steps"])
        losses.append(ended.report["steps"][0]["loss"])
    assert losses[0] != losses[1]


def farthest_streams(**run):
    """The largest difference of a gradient of streams from the unpartitioned model's, in units of the bound."""
    from pipeproof.stages.reference.bound import parallel_bound
    from tests.exec.in_memory import compared

    topology = {"pp": 2, "tp": 2, "sequence_parallel": True}
    plan = subject(model={**MODEL, "swiglu_limit": 0.005}, topology=topology, run={"steps": 1, **run}).plan
    (result,) = compared(plan)
    distances = [one.unpartitioned_max_rel_diff for one in result.gradients if "_streams." in one.name]
    return max(distances) / parallel_bound(plan.spec)


@pytest.mark.needs_paddle
@pytest.mark.usefixtures("paddle_started")
def test_gradients_of_streams_that_nearly_cancel_are_within_the_bound():
    """The experts' outputs are tiny, so the streams of a token are nearly equal."""
    assert farthest_streams(seed=1) < 0.5


@pytest.mark.needs_paddle
@pytest.mark.usefixtures("paddle_started")
def test_half_a_gradient_of_a_bias_of_streams_is_outside_the_bound(monkeypatch):
    from tests.exec import in_memory

    right = in_memory.compare_step

    def compare_halves(plan, step, ranks, *references):
        for name, gradient in ((name, one) for rank in ranks for name, one in rank.gradients.items()):
            if name.endswith("_streams.bias"):
                gradient *= 0.5
        return right(plan, step, ranks, *references)

    monkeypatch.setattr(in_memory, "compare_step", compare_halves)
    assert farthest_streams(seed=1) > 2.0
