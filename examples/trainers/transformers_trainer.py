"""A ``Trainer`` of transformers with pipeline stages: its loop, arguments and callbacks, and a ``Pipeline``'s steps.

torchrun --nproc-per-node 2 examples/trainers/transformers_trainer.py output
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from tiny_llama import SEQUENCE, Rows, tiny_llama
from torch import nn
from transformers import Trainer, TrainingArguments

from pipeproof.torch import Pipeline, causal_lm_loss, save_dcp, stages_of_transformers


class PipelineTrainer(Trainer):
    """A ``Trainer`` of this rank's stages; ``pipe`` has ``loss_on="all"`` and ``causal_lm_loss``.

    All ranks of a pipeline read the same rows. Of several pipelines, each reads its part: ``data_rank`` of
    ``num_data_ranks``.
    """

    def __init__(self, pipe: Pipeline, *, data_rank: int = 0, num_data_ranks: int = 1, **kwargs: Any) -> None:
        if kwargs["args"].save_strategy != "no":
            raise ValueError("set save_strategy='no', and call save_dcp: the Trainer saves the weights of one rank")
        self.pipe = pipe
        model = nn.ModuleDict({str(number): stage for number, stage in pipe.stages.items()})
        model.accepts_loss_kwargs = True  # have the Trainer count the labels of a step, ..
        model._tp_size = pipe.num_ranks  # noqa: SLF001 - the Trainer's name; .. ranks with the same rows once
        super().__init__(model=model, **kwargs)
        self._loss_shifts_labels = True  # the first token of a row is not a label
        accelerator, args = self.accelerator, self.args
        accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)  # without DDP
        self._shard = partial(
            prepare_data_loader, device=args.device, num_processes=num_data_ranks, process_index=data_rank,
            put_on_device=True, use_seedable_sampler=True, data_seed=args.seed,
        )  # fmt: skip
        accelerator.prepare_data_loader = lambda loader, **_: self._shard(loader)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run forward and backward of a batch in the micro-batches of the pipeline."""
        model.train()
        return self._run(self.pipe.step, inputs, {"num_items_in_batch": num_items_in_batch})

    def prediction_step(self, model: nn.Module, inputs: dict[str, Any], *_: Any, **__: Any) -> tuple[Any, None, None]:
        """Return the loss of a batch; the ranks of a pipeline do not exchange logits."""
        return self._run(self.pipe.eval_step, inputs, {}), None, None

    def _run(
        self, step: Callable[..., torch.Tensor], inputs: dict[str, Any], loss_kwargs: dict[str, Any]
    ) -> torch.Tensor:
        inputs = self._prepare_inputs(inputs)
        ids, labels = inputs.pop("input_ids"), inputs.pop("labels")
        with self.compute_loss_context_manager():  # autocast, with bf16=True
            return step(ids, target=labels, loss_kwargs=loss_kwargs, **inputs)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self.pipe.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return self.pipe.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm


def main(folder: str) -> None:
    """Train on every rank, print the losses, and save weights and optimizer."""
    dist.init_process_group("gloo")
    stages = stages_of_transformers(tiny_llama(), dist.get_world_size())
    example = torch.zeros(2, SEQUENCE, dtype=torch.long)
    pipe = Pipeline(
        stages, schedule="1f1b", num_micro_batches=4, loss_fn=causal_lm_loss, example=(example,), loss_on="all",
    )  # fmt: skip
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=8, per_device_eval_batch_size=8, gradient_accumulation_steps=2,
        num_train_epochs=2, learning_rate=1e-2, lr_scheduler_type="linear", max_grad_norm=1.0, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
        dataloader_drop_last=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = PipelineTrainer(pipe, args=arguments, train_dataset=Rows(48), eval_dataset=Rows(8))
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate()["eval_loss"]
    save_dcp(f"{folder}/weights", pipe.stages, trainer.optimizer.optimizer)
    if dist.get_rank() == 0:
        print("losses", *logged, "evaluation", evaluated)
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
