"""A Lightning ``Trainer`` with pipeline stages: a strategy, and a module with the steps of a ``Pipeline``.

    torchrun --nproc-per-node 2 examples/trainers/lightning_strategy.py output

Lightning calls ``backward`` on the loss that ``training_step`` returns, and a pipeline runs backwards between its
forwards. So the module uses Lightning's manual optimization.
"""

# ruff: noqa: D102 - Lightning documents the methods
from __future__ import annotations

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, Strategy
from tiny_llama import SEQUENCE, Rows, tiny_llama
from torch import nn
from torch.utils.data import DataLoader

from pipeproof.torch import Pipeline, causal_lm_sum, save_dcp, stages_of_transformers


class PipelineStrategy(DDPStrategy):
    """Every rank holds its own stages and reads the same rows: no DDP, and nothing is copied from rank 0.

    Of several pipelines, each reads its part of the rows.
    """

    def __init__(self, *, data_rank: int = 0, num_data_ranks: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sampling = {"num_replicas": num_data_ranks, "rank": data_rank}

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return self._sampling

    def setup(self, trainer: pl.Trainer) -> None:
        Strategy.setup(self, trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model


class PipelineModule(pl.LightningModule):
    """The stages of this rank; the loss is the mean over all labels of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.pipe: Pipeline | None = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.pipe is None:
            self.pipe = Pipeline(
                stages_of_transformers(tiny_llama(), self.trainer.world_size), schedule="1f1b", num_micro_batches=8,
                loss_fn=causal_lm_sum, normalize="tokens", loss_on="all",
                example=(torch.zeros(2, SEQUENCE, dtype=torch.long),),
            )  # fmt: skip
            self.stages = nn.ModuleDict({str(number): stage for number, stage in self.pipe.stages.items()})

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        optimizer = self.optimizers()
        loss = self.pipe.step(batch["input_ids"], target=batch["labels"])
        self.pipe.clip_grad_norm_(1.0)
        optimizer.step()
        self.lr_schedulers().step()
        optimizer.zero_grad()
        self.losses.append(float(loss))
        self.log("loss", loss)

    def validation_step(self, batch: dict[str, torch.Tensor], _: int) -> None:
        self.log("evaluation", self.pipe.eval_step(batch["input_ids"], target=batch["labels"]))

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 6)]


def main(folder: str) -> None:
    """Train on every rank, print the losses, and save weights and optimizer."""
    module = PipelineModule()
    trainer = pl.Trainer(
        strategy=PipelineStrategy(process_group_backend="gloo"), accelerator="cpu", devices=2, max_epochs=2,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    training, validation = (DataLoader(Rows(num), batch_size=16, drop_last=True) for num in (48, 16))
    trainer.fit(module, training, validation)
    if trainer.is_global_zero:
        print("losses", *module.losses, "evaluation", float(trainer.callback_metrics["evaluation"]))
    save_dcp(f"{folder}/weights", module.pipe.stages, module.optimizers().optimizer)  # Lightning saves rank 0's stages
    module.pipe.close()


if __name__ == "__main__":
    main(sys.argv[1])
