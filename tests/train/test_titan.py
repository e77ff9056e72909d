"""torchtitan's own trainer with our schedule: its losses and gradients are those with PyTorch's schedule."""

import json
import os
import subprocess
import sys

import pytest

from tests.exec.processes import REPOSITORY

pytestmark = [pytest.mark.needs_torch, pytest.mark.needs("torchtitan"), pytest.mark.slow]


def trained(folder, name, *, num_processes=2, schedule="1F1B", steps=10, parallelism=(), **request):
    """Lines that torchtitan's trainer wrote, by rank."""
    path = folder / f"{name}.json"
    sizes = {
        "model": "llama3",
        "training": {"local_batch_size": 8, "seq_len": 32, "steps": steps},
        "parallelism": {
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_microbatch_size": 2,
            "pipeline_parallel_schedule": schedule,
            **dict(parallelism),
        },
    }
    path.write_text(json.dumps({**sizes, **request}))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes),
         "-m", "tests.train.titan_trainer", str(path)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    files = [path.with_suffix(f".rank{rank}") for rank in range(num_processes)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def steps_of(ranks, key):
    """The values of the rank that has the last stage; the others write -1 as a loss."""
    return next([line[key] for line in lines if key in line] for lines in ranks if lines[0]["loss"] != -1)


def test_ten_steps_have_the_bits_of_pytorchs_schedule(tmp_path):
    ours = trained(tmp_path, "ours", schedule="1F1B", validate=True, pipeproof={})
    theirs = trained(tmp_path, "theirs", schedule="1F1B", validate=True)
    assert ours == theirs
    losses = steps_of(ours, "loss")
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    assert len(steps_of(ours, "validation")) == 3


def test_zbv_has_the_bits_of_pytorchs_schedule_where_that_trains_all_weights(tmp_path):
    # PyTorch's ZBV fails with selective checkpointing, and with the chunked loss gives norm.weight no gradient.
    both = {"schedule": "ZBVZeroBubble", "activation_checkpoint": None, "loss": "whole"}
    assert trained(tmp_path, "ours", pipeproof={}, **both) == trained(tmp_path, "theirs", **both)


def test_zbv_trains_with_activation_checkpointing(tmp_path):
    both = {"schedule": "ZBVZeroBubble", "pipeproof": {}}
    checkpointed = trained(tmp_path, "checkpointed", **both)
    assert checkpointed == trained(tmp_path, "kept", activation_checkpoint=None, **both)


def test_sharded_stages_have_the_bits_of_pytorchs_schedule(tmp_path):
    # The other backend of torchtitan 0.3.0, spmd_types, refuses plain parameters of this model on a CPU.
    both = {"num_processes": 4, "parallelism": {"data_parallel_shard_degree": 2, "spmd_backend": "partial_dtensor"}}
    assert trained(tmp_path, "ours", pipeproof={}, **both) == trained(tmp_path, "theirs", **both)


def test_a_mixture_of_experts_differs_from_pytorchs_schedule_by_the_experts_counts_alone(tmp_path):
    # PyTorch runs each stage once to find its shapes, which its experts' token counts, and so their biases, include.
    ours = trained(tmp_path, "ours", model="deepseek_v3", pipeproof={})
    theirs = trained(tmp_path, "theirs", model="deepseek_v3")
    for key in ("loss", "grad_norm"):
        assert steps_of(ours, key)[0] == steps_of(theirs, key)[0]
    assert steps_of(ours, "loss") == pytest.approx(steps_of(theirs, "loss"), rel=1e-4)
