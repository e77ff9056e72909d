"""Holds transformers' losses against pipeproof's, from weights that ``reshard --names huggingface`` wrote.

Needs PyTorch and transformers; a line for each model, status 1 if one is too far off. Each model is trained for one
step on a CPU; its state becomes a directory of Hugging Face's, from which transformers computes the loss of the next
step, which the run had, too.
"""  # noqa: INP001 - a directory of scripts, not a package

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from pipeproof.specs.load import load_plan
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.synthetic import IGNORED, loss_scale, micro_batch

FARTHEST = 1e-5
"""Most by which losses may differ, of themselves: weights are of float32."""
_SIZES = {
    "kind": "gpt",
    "num_layers": 3,
    "hidden_size": 48,
    "num_heads": 6,
    "ffn_size": 40,
    "vocab_size": 61,
    "seq_length": 12,
}
_MOE = {"num_experts": 12, "top_k": 3, "ffn_size": 28}
_SIGMOID = {"score": "sigmoid", "expert_bias_rate": 0.01}
_MLA = {"kv_rank": 10, "nope_head_size": 6, "rope_head_size": 4, "value_head_size": 5}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "dense with grouped queries": {"num_kv_heads": 3},
    "dense, a head of another size": {"head_size": 12, "num_kv_heads": 2},
    "tied": {"tied_embedding": True},
    "experts as Mixtral": {"num_kv_heads": 2, "moe": _MOE},
    "experts with biases, a module": {
        "num_kv_heads": 3, "moe": _MOE | _SIGMOID | {"dense_layers": 1, "num_shared_experts": 1},
        "mtp": {"num_modules": 1},
    },
    "latent, dense": {"mla": _MLA},
    "latent, experts": {"mla": _MLA, "moe": _MOE | {"num_shared_experts": 1, "normalize": False}},
    "latent, experts with biases": {
        "mla": _MLA | {"q_rank": 9}, "moe": _MOE | _SIGMOID | {"dense_layers": 1, "num_shared_experts": 1},
    },
}  # fmt: skip


def main() -> int:
    """Try all models."""
    print(f"PyTorch {torch.__version__}, transformers {transformers.__version__}")  # noqa: T201
    worst = 0.0
    for name, model in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            shown, ours, theirs = _tried(model, Path(folder))
        apart = abs(ours - theirs) / abs(ours)
        worst = max(worst, apart)
        print(f"{name:32} {shown:24} ours {ours:.9f}  transformers {theirs:.9f}  apart {apart:.1e}", flush=True)  # noqa: T201
    return int(not worst <= FARTHEST)


def _tried(model: Mapping[str, Any], folder: Path) -> tuple[str, float, float]:
    """The class in transformers, the run's loss of its second step, and transformers' from the weights before it."""
    plan = {
        "pipeproof": 1,
        "model": {**_SIZES, **model},
        "topology": {"pp": 1},
        "schedule": {"kind": "1f1b", "num_micro_batches": 2, "micro_batch_size": 2},
        "run": {"backend": "torch", "steps": 2, "seed": 5, "optimizer": "adamw", "learning_rate": 0.01},
    }
    file, report, made = folder / "plan.json", folder / "report.json", folder / "model"
    file.write_text(json.dumps(plan))
    _pipeproof("run", file, "--save", folder / "states", "--save-every", 1, "--report", report)
    _pipeproof("reshard", folder / "states" / "step-00000001", "-o", made, "--names", "huggingface")
    ours = json.loads(report.read_text())["steps"][1]["loss"]
    network = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32, attn_implementation="eager").eval()
    return type(network).__name__, ours, _loss(network, load_plan(file).spec)


def _loss(network: torch.nn.Module, plan: PlanSpec) -> float:
    """Of the second step's tokens."""
    total = 0.0
    for index in range(plan.schedule.num_micro_batches):
        batch = micro_batch(plan, 1, index)
        with torch.no_grad():
            logits = network(torch.from_numpy(batch.tokens), use_cache=False).logits
        labels = torch.from_numpy(batch.labels)
        each = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        total += float(each) * loss_scale(plan, 1, index)
    return total


def _pipeproof(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "pipeproof", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    sys.exit(main())
