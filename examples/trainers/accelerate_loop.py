"""A loop of Accelerate with pipeline stages: its data loaders, precision and logging, and a ``Pipeline``'s steps.

    torchrun --nproc-per-node 2 examples/trainers/accelerate_loop.py output

``accelerator.prepare`` would wrap the stages in DDP and give each rank other rows, and ranks of one pipeline need
neither. So the model is not prepared, and the data loader is prepared with the number of pipelines in place of the
number of ranks. The pipeline has ``backward`` in its ``step``, and its own ``clip_grad_norm_``.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from tiny_llama import SEQUENCE, Rows, tiny_llama
from torch import nn
from torch.utils.data import DataLoader

from pipeproof.torch import Pipeline, causal_lm_loss, save_dcp, stages_of_transformers

NUM_EPOCHS = 2


def main(folder: str) -> None:
    """Train on every rank, print the losses, and save weights and optimizer."""
    dist.init_process_group("gloo")
    accelerator = Accelerator(cpu=True)  # on GPUs: Accelerator(mixed_precision="bf16")
    with accelerator.autocast():
        pipe = Pipeline(
            stages_of_transformers(tiny_llama(), dist.get_world_size()), schedule="1f1b", num_micro_batches=8,
            loss_fn=causal_lm_loss, example=(torch.zeros(2, SEQUENCE, dtype=torch.long),), loss_on="all",
        )  # fmt: skip
    loader = prepare_data_loader(
        DataLoader(Rows(48), batch_size=16, drop_last=True), accelerator.device, num_processes=1, process_index=0,
        put_on_device=True,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(nn.ModuleList(pipe.stages.values()).parameters(), lr=1e-2, weight_decay=0.0)
    total = NUM_EPOCHS * len(loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
    losses = []
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            number = (batch["labels"][:, 1:] != -100).sum()  # of several pipelines: the sum over them
            with accelerator.autocast():
                loss = pipe.step(batch["input_ids"], target=batch["labels"], loss_kwargs={"num_items_in_batch": number})
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()  # not prepared: Accelerate would step it once for each rank
            optimizer.zero_grad()
            losses.append(float(loss))
    rows = next(iter(DataLoader(Rows(16), batch_size=16)))
    evaluated = pipe.eval_step(rows["input_ids"], target=rows["labels"])
    accelerator.print("losses", *losses, "evaluation", float(evaluated))
    save_dcp(f"{folder}/weights", pipe.stages, optimizer)  # save_state would save the stages of one rank
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
