"""Options of `run` that a framework does not support are refused with a suggested fix."""

import pytest

from pipeproof.specs.plan import PlanSpec
from tests.plans import plan_dict, plan_spec, refusal

SIXTEEN = {"backend": "torch", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    "run",
    [
        {"backend": "torch"},
        {"backend": "torch", "device": "gpu"},
        {"backend": "torch", "device": "gpu", "deterministic": False},
        SIXTEEN,
        {**SIXTEEN, "main_grad_dtype": "float32", "clip_norm": 1.0},
        {"backend": "torch", "dtype": "float16", "optimizer": "sgd"},
        {"backend": "torch", "dtype": "float16", "main_grad_dtype": "float32"},
    ],
)
def test_runs_of_pytorch(run):
    assert plan_spec(run=run).run.backend == "torch"


@pytest.mark.parametrize(
    ("run", "fact"),
    [
        ({"dtype": "bfloat16"}, "run.dtype bfloat16 is for `run.backend: torch`, and the backend is paddle"),
        ({"device": "gpu", "replay": True}, "run.replay captures a CUDA graph with PyTorch, and run.backend is paddle"),
        ({"backend": "torch", "dtype": "float16"}, "AdamW's epsilon, 1e-8, is zero in float16"),
        ({**SIXTEEN, "clip_norm": 1.0}, "which bfloat16 cannot add up"),
        ({"backend": "torch", "deterministic": False}, "torch on cpu has one order of sums"),
        ({"device": "gpu", "deterministic": False}, "paddle on gpu has one order of sums"),
    ],
)
def test_unsupported_options_are_refused_at_their_key(run, fact):
    with pytest.raises(ValueError, match="(?s)" + fact.replace("(", r"\(")):
        PlanSpec.model_validate(plan_dict(run=run))
    finding = refusal(plan_dict(run=run))
    assert finding.code == "PP106"


def test_paddle_computes_on_gpus_too():
    assert plan_spec(run={"backend": "paddle", "device": "gpu"}).run.device == "gpu"


REPLAYED = {"backend": "torch", "device": "gpu", "replay": True}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_size": 8}


@pytest.mark.parametrize(
    "sections", [{"run": REPLAYED}, {"run": {**REPLAYED, "dtype": "bfloat16"}, "model": {"moe": EXPERTS}}]
)
def test_a_step_of_fixed_shapes_is_replayed(sections):
    assert plan_spec(**sections).run.replay
