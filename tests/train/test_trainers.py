"""The examples of trainers: two processes have the losses of a plain loop over micro-batches on one."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.train.launch import ROOT

pytestmark = [pytest.mark.needs_torch, pytest.mark.needs("transformers", "accelerate", "lightning")]
FOLDER = ROOT / "examples" / "trainers"
BATCH, MICRO_BATCH, NUM_ROWS, NUM_EPOCHS = 16, 2, 48, 2


def example_losses(name, folder):
    """The losses of the steps and of the evaluation, which an example prints on two ranks."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(FOLDER / name), str(folder)]
    done = subprocess.run(
        [sys.executable, *launch], capture_output=True, text=True, timeout=400, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    losses, evaluated = re.search("^losses (.*) evaluation (.*)$", done.stdout, re.MULTILINE).groups()
    return [*map(float, losses.split())], float(evaluated)


def labelled(batch):
    return (batch["labels"][:, 1:] != -100).sum()


def plain_losses(orders, *, by_sum, fused):
    """The losses of a loop on one process; with ``by_sum`` gradients of sums are divided by the number of labels."""
    spec = importlib.util.spec_from_file_location("tiny_llama", FOLDER / "tiny_llama.py")
    tiny = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tiny)
    rows, model, num_steps = tiny.Rows(NUM_ROWS), tiny.tiny_llama(), NUM_EPOCHS * NUM_ROWS // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)
    losses = []
    for order in orders:
        batches = torch.utils.data.DataLoader(torch.utils.data.Subset(rows, order), batch_size=BATCH)
        for batch in batches:
            num, total = labelled(batch), torch.zeros(())
            for ids, labels in zip(*(batch[n].split(MICRO_BATCH) for n in ("input_ids", "labels")), strict=True):
                logits = model(ids, use_cache=False).logits
                divisor = torch.ones_like(num) if by_sum else num
                loss = model.loss_function(logits, labels, tiny.VOCABULARY, num_items_in_batch=divisor)
                loss.backward()
                total += loss.detach()
            if by_sum:
                for weight in model.parameters():
                    weight.grad.div_(num)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(total / num if by_sum else total))
    return losses, model, rows


def evaluated_loss(model, rows, num, *, of_means):
    """The mean over all labels of some rows, or over their micro-batches."""
    parts = [[rows[n] for n in range(first, first + MICRO_BATCH)] for first in range(0, num, MICRO_BATCH)]
    batches = [{name: torch.stack([row[name] for row in part]) for name in part[0]} for part in parts]
    with torch.no_grad():
        means = torch.stack([model(**batch, use_cache=False).loss for batch in batches])
    weights = torch.stack([torch.tensor(1) if of_means else labelled(batch) for batch in batches])
    return float((means * weights).sum() / weights.sum())


IN_ORDER = [range(NUM_ROWS)] * NUM_EPOCHS
SHUFFLED = [torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(n)).tolist() for n in range(NUM_EPOCHS)]
"""As ``DistributedSampler``, which Lightning uses."""


@pytest.mark.parametrize(
    ("example", "orders", "by_sum", "fused", "num_evaluated"),
    [
        ("transformers_trainer.py", IN_ORDER, False, True, 8),
        ("accelerate_loop.py", IN_ORDER, False, False, 16),
        ("lightning_strategy.py", SHUFFLED, True, False, 16),
    ],
    ids=["transformers", "accelerate", "lightning"],
)
def test_a_trainer_has_the_losses_of_a_plain_loop(example, orders, by_sum, fused, num_evaluated, tmp_path):
    losses, evaluated = example_losses(example, tmp_path)
    expected, model, rows = plain_losses(orders, by_sum=by_sum, fused=fused)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert evaluated == pytest.approx(evaluated_loss(model, rows, num_evaluated, of_means=not by_sum), rel=1e-6)
    assert (tmp_path / "weights").is_dir()


def test_each_recipe_has_less_than_100_lines():
    assert all(len(file.read_text().splitlines()) < 100 for file in FOLDER.glob("*.py"))
