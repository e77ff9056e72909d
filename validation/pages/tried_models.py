"""Common part of the scripts that load pipeproof's files with other tools: small models, a run, the loss.

A model is trained for two steps on a CPU. The state after the first step gets
the names of a convention. From it the other tool computes the loss of the
second step, which is compared with the run's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeproof.specs.load_plan import load_plan
from pipeproof.specs.model import ModelSpec
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.mtp_streams import shifted_batch
from pipeproof.stages.describe.synthetic import IGNORED, loss_scale, micro_batch

FARTHEST = 1e-5
"""Largest relative difference of losses; weights are float32."""
_SIZES = {
    "kind": "gpt",
    "num_layers": 3,
    "hidden_size": 48,
    "num_heads": 6,
    "ffn_size": 40,
    "vocab_size": 61,
    "seq_length": 12,
}
MOE = {"num_experts": 12, "top_k": 3, "ffn_size": 28}
SIGMOID = {"score": "sigmoid", "expert_bias_rate": 0.01}
MLA = {"kv_rank": 10, "nope_head_size": 6, "rope_head_size": 4, "value_head_size": 5}

Array = np.ndarray[Any, Any]
Losses = Callable[[Array, Array], Array]
"""Maps tokens and labels [B, S] to the loss of each token [B, S]."""


@dataclass(frozen=True, slots=True)
class Line:
    """A model, the class that loaded it, and both losses."""

    model: str
    loaded: str
    ours: float
    theirs: float


@dataclass(frozen=True, slots=True)
class Trained:
    """A model after one step: its plan, the state, and the run's losses of the next step (main model, MTP modules)."""

    plan: PlanSpec
    state: Path
    loss: float
    module_losses: tuple[float, ...]

    @property
    def model(self) -> ModelSpec:
        """The plan's model."""
        return self.plan.model

    def named(self, convention: str, *, directory: bool = False) -> Path:
        """Write the weights with a convention's names: one file, or a directory in Hugging Face's format."""
        made = self.state.parent / (convention if directory else f"{convention}.safetensors")
        _pipeproof("state", "reshard", self.state, "-o", made, "--names", convention)
        return made

    def loss_by(self, losses: Losses, distance: int = 0) -> float:
        """Return the loss of the next step from another tool's token losses, summed in float64.

        ``distance`` is 0 for the main model, 1 for its first module: labels are this many tokens further ahead.
        """
        total = 0.0
        for index in range(self.plan.schedule.num_micro_batches):
            batch = micro_batch(self.plan, 1, index)
            labels = shifted_batch(batch, distance).labels
            found = losses(batch.tokens, labels).astype(np.float64)
            total += float(found[labels != IGNORED].sum()) * loss_scale(self.plan, 1, index)
        return total


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Return the loss of each token [B, S] from logits [B, S, V]; ignored labels have the loss of token 0."""
    logits = logits.astype(np.float64)
    logits = logits - logits.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(logits, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return np.log(np.exp(logits).sum(axis=-1)) - chosen


def train(model: Mapping[str, Any], backend: str, folder: Path) -> Trained:
    """Train for two steps and save the state after the first one."""
    plan = {
        "pipeproof": 1,
        "model": {**_SIZES, **model},
        "topology": {"pp": 1},
        "schedule": {"kind": "1f1b", "num_micro_batches": 2, "micro_batch_size": 2},
        "run": {"backend": backend, "steps": 2, "seed": 5, "optimizer": "adamw", "learning_rate": 0.01},
    }
    file, report = folder / "plan.json", folder / "report.json"
    file.write_text(json.dumps(plan))
    _pipeproof("run", file, "--save", folder / "states", "--save-every", 1, "--report", report)
    step = json.loads(report.read_text())["steps"][1]
    modules = tuple(module["loss"] for module in step.get("mtp", {}).values())
    return Trained(load_plan(file).spec, folder / "states" / "step-00000001", step["loss"], modules)


def compare(tool: str, lines: Iterable[Line]) -> int:
    """Print a line for each model; return status 1 if the losses of one differ too much."""
    worst = 0.0
    for line in lines:
        apart = abs(line.ours - line.theirs) / abs(line.ours)
        worst = max(worst, apart)
        losses = f"ours {line.ours:.9f}  {tool} {line.theirs:.9f}"
        print(f"{line.model:32} {line.loaded:36} {losses}  apart {apart:.1e}", flush=True)
    return int(not worst <= FARTHEST)


def each(
    models: Mapping[str, Mapping[str, Any]], backend: str, tried: Callable[[str, Trained], Iterator[Line]]
) -> Iterator[Line]:
    """Train the models, one after the other, and compare each."""
    for name, model in models.items():
        with tempfile.TemporaryDirectory() as folder:
            yield from tried(name, train(model, backend, Path(folder)))


def _pipeproof(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "pipeproof", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)
