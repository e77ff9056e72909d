"""Train a small Llama of Hugging Face on the text of Python's language reference, cut into pipeline stages.

    torchrun --nproc-per-node 4 examples/train_llama/train.py --schedule zb_v --split linear

Every rank makes the same model and keeps the stages that the schedule places on it.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics  # part of Python

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from pipeproof.torch import Pipeline, causal_lm_loss, load_dcp, save_dcp, stages_of_transformers

TEXT = "\n".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
TOKENS = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)  # a token is the code of a character
VOCABULARY, SEQUENCE, MICRO_BATCH_SIZE, NUM_MICRO_BATCHES = 128, 64, 2, 8
SAVE_EVERY = 5
STAGES_PER_RANK = {"interleaved": 2, "zb_v": 2}


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b", help="a kind (pipeproof schedule list), or a file")
    parser.add_argument("--split", choices=["whole", "linear"], default="whole", help="how a backward is divided")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--blocks", type=int, nargs="+", help="layers of each stage; without it, equal stages")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--plan", help="write the checked plan to this file")
    parser.add_argument("--save", help=f"directory of the checkpoint, written every {SAVE_EVERY} steps")
    parser.add_argument("--resume", help="checkpoint to start from; ranks, stages and schedule may be others")
    return parser.parse_args()


def make_model(num_layers: int) -> LlamaForCausalLM:
    """Return the model with the same random weights on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            max_position_embeddings=SEQUENCE,
        )
    )


def batch(step: int) -> torch.Tensor:
    """Return the token ids of a step (rows, SEQUENCE). They depend on the step alone, so a resumed run continues."""
    generator = torch.Generator().manual_seed(step)
    rows = (NUM_MICRO_BATCHES * MICRO_BATCH_SIZE, 1)
    starts = torch.randint(len(TOKENS) - SEQUENCE, rows, generator=generator)
    return TOKENS[starts + torch.arange(SEQUENCE)].long()


def learning_rate_factor(step: int) -> float:
    """Return the warm-up over 10 steps, then the decay with the square root of the step."""
    return min((step + 1) / 10, (10 / (step + 1)) ** 0.5)


def train(options: argparse.Namespace) -> None:
    """Train one rank's stages."""
    num_stages = dist.get_world_size() * STAGES_PER_RANK.get(options.schedule, 1)
    stages = stages_of_transformers(
        make_model(options.layers), len(options.blocks or range(num_stages)), blocks_per_stage=options.blocks
    )
    pipe = Pipeline(
        stages,
        schedule=options.schedule,
        num_micro_batches=NUM_MICRO_BATCHES,
        loss_fn=causal_lm_loss,
        example=(batch(0)[:MICRO_BATCH_SIZE],),
        split=options.split,
    )
    del stages  # stages of other ranks
    if options.plan and dist.get_rank() == 0:
        pipe.plan.save(options.plan)

    # An optimizer, a learning-rate schedule and a checkpoint as in any script, of this rank's parameters.
    optimizer = torch.optim.AdamW(nn.ModuleList(pipe.stages.values()).parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
    first = 0
    if options.resume:
        extra = load_dcp(options.resume, pipe.stages, optimizer)
        scheduler.load_state_dict(extra["scheduler"])
        first = extra["step"]

    for step in range(first, options.steps):
        tokens = batch(step)
        loss = pipe.step(tokens, target=tokens)
        norm = pipe.clip_grad_norm_(1.0)  # over the stages of all ranks
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if loss is not None:  # on the rank of the last stage
            print(f"step {step}: loss {loss:.6f}, norm of the gradients {norm:.6f}", flush=True)
        if options.save and (step + 1) % SAVE_EVERY == 0:
            extra = {"step": step + 1, "scheduler": scheduler.state_dict()}
            save_dcp(options.save, pipe.stages, optimizer, extra=extra)
    pipe.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(parse_options())
    dist.destroy_process_group()
