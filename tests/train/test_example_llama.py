"""The example ``train_llama`` under torchrun against the same model in one process: losses, gradients and weights."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from pipeproof.cli.main import main
from pipeproof.specs.load_plan import load_plan
from pipeproof.verify.check_plan import check
from tests.train.launch import PROGRAMS, ROOT, run

pytestmark = [pytest.mark.needs_torch, pytest.mark.needs("transformers"), pytest.mark.slow]

FOLDER = ROOT / "examples" / "train_llama"
NUM_STEPS, MOE_STEPS = 20, 4
EIGHT_STAGES = "--blocks 1 1 1 1 0 0 0 0"
CASES = {
    "1f1b": ("llama", "--layers 4 --schedule 1f1b"),
    "interleaved": ("llama", f"--layers 4 {EIGHT_STAGES} --schedule interleaved"),
    "zb_v": ("llama", f"--layers 4 {EIGHT_STAGES} --schedule zb_v --split linear"),
    "by hand": ("llama", f"--layers 4 --schedule {FOLDER}/schedule.txt --split linear --plan OUT/plan.yaml"),
    "experts": ("qwen3_moe", f"--layers 4 --schedule 1f1b --steps {MOE_STEPS}"),
    "experts, zb_v": ("qwen3_moe", f"--layers 4 {EIGHT_STAGES} --schedule zb_v --split linear --steps {MOE_STEPS}"),
}
"""Model and options on four processes. The model has four layers; four of eight stages have none."""


@functools.cache
def program():
    """``programs/llama_example.py`` as a module."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PROGRAMS))
        import llama_example

    return llama_example


@functools.cache
def reference(model_name):
    """One process, plain PyTorch: losses and gradients of all steps, and the last weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on the ranks: the order of sums within a product depends on it
    try:
        return _train_whole_model(model_name)
    finally:
        torch.set_num_threads(threads)


def _train_whole_model(model_name):
    train = program().example()
    model = train.make_model(4) if model_name == "llama" else program().qwen3_moe(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, train.learning_rate_factor)
    losses, gradients = [], []
    for step in range(NUM_STEPS if model_name == "llama" else MOE_STEPS):
        of_micro_batches = []
        for tokens in train.batch(step).split(2):
            loss = model(tokens, labels=tokens, use_cache=False).loss
            (loss / 8).backward()
            of_micro_batches.append(loss.detach())
        losses.append(torch.stack(of_micro_batches).mean().item().hex())
        gradients.append(program().gradients_of([model]))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses, gradients, program().weights_of([model])


def merged(folder, case):
    """Losses, gradients by step and last weights of a case, of all ranks together."""
    ranks = [json.loads(path.read_text())[case] for path in sorted(folder.glob("rank*.json"))]
    by_rank = [rank["losses"] for rank in ranks if rank["losses"][0] is not None]
    assert len(by_rank) == 1, "the loss is on the rank of the last stage"
    gradients = [{} for _ in by_rank[0]]
    weights = {}
    for rank in ranks:
        weights |= rank["weights"]
        for step, of_rank in enumerate(rank["gradients"]):
            gradients[step] |= of_rank
    return by_rank[0], gradients, weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The digests of all cases, trained in one launch of four processes."""
    out = tmp_path_factory.mktemp("llama")
    cases = {name: (model, options.replace("OUT", str(out))) for name, (model, options) in CASES.items()}
    run("llama_example.py", 4, out, json.dumps(cases), timeout=500)
    return out


@pytest.mark.parametrize("case", CASES)
def test_every_step_has_the_bits_of_one_process(trained, case):
    losses, gradients, weights = merged(trained, case)
    expected_losses, expected_gradients, expected_weights = reference(CASES[case][0])
    assert losses == expected_losses
    assert gradients == expected_gradients
    assert weights == expected_weights
    assert len(losses) == (NUM_STEPS if CASES[case][0] == "llama" else MOE_STEPS)
    assert len(weights) > 30
    assert float.fromhex(losses[-1]) < float.fromhex(losses[0]) - (1 if len(losses) == NUM_STEPS else 0)


def test_the_saved_plan_of_the_schedule_by_hand_is_proved(trained):
    report = check(load_plan(trained / "plan.yaml"))
    assert not report.errors
    assert {finding.code for finding in report.findings} <= {"PP411"}
    done = CliRunner().invoke(main, ["simulate", str(trained / "plan.yaml"), "--format", "json"])
    assert done.exit_code == 0, done.output


def test_a_killed_run_resumes_on_another_topology_with_the_same_bits(tmp_path):
    """A rank is killed in step 7 or later; two processes with other stages continue from the last checkpoint."""
    checkpoint = tmp_path / "checkpoint"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
        str(FOLDER / "train.py"), "--layers", "4", "--steps", "1000", "--save", str(checkpoint),
    ]  # fmt: skip
    killed = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    try:
        for line in killed.stdout:
            if line.startswith("step 7:"):
                ranks = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
                os.kill(int(ranks[1]), signal.SIGKILL)
                break
        killed.communicate(timeout=200)
    finally:
        killed.terminate()
    assert killed.returncode != 0

    resumed = f"--layers 4 --blocks 3 1 --resume {checkpoint}"
    done = run("llama_example.py", 2, tmp_path, json.dumps({"resumed": ("llama", resumed)}))
    first = int(re.search(r"^step (\d+):", done.stdout, re.MULTILINE)[1])
    assert first % 5 == 0
    assert 5 <= first < NUM_STEPS
    losses, gradients, weights = merged(tmp_path, "resumed")
    expected_losses, expected_gradients, expected_weights = reference("llama")
    assert losses == expected_losses[first:]
    assert gradients == expected_gradients[first:]
    assert weights == expected_weights
