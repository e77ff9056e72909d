"""Loss curve of a Llama of a billion parameters: a pipeline over all GPUs of this machine, compared with one GPU.

    torchrun --nproc-per-node 2 benchmarks/gpu/train_curve.py --layers 24 --hidden 2048 --steps 50

The text is the source of Python's standard library, byte by byte. Weights, micro-batches and AdamW are the same; with
``--deterministic`` so are the bits of all losses. Rank 0 prints one line of JSON for each run.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from pipeproof.torch import Pipeline, causal_lm_loss, stages_of_transformers


def main() -> None:
    """Train on one GPU, then over all of them with each schedule."""
    options = _options()
    if options.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(mode=True)
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    text = _text(options.steps * options.micro_batches * options.sequence)
    batches = text.view(options.steps, options.micro_batches, options.sequence).to(device).long()

    alone: list[float] = []
    if dist.get_rank() == 0:
        alone = _one_device(options, batches, device)
    dist.barrier()
    for schedule in options.schedules:
        losses, seconds, peak = _pipeline(schedule, options, batches, device)
        answers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(answers, (losses, peak))
        if dist.get_rank() == 0:
            curve = next(curve for curve, _ in answers if curve)
            far = max(abs(a - b) for a, b in zip(alone, curve, strict=True))
            _print(schedule, curve, seconds, [peak for _, peak in answers], equal=alone == curve, farthest=far)
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb_v"])
    parser.add_argument("--deterministic", action="store_true", help="PyTorch's deterministic kernels")
    return parser.parse_args()


def _model(options: argparse.Namespace, device: torch.device) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64, vocab_size=256,
        max_position_embeddings=options.sequence,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model


def _one_device(options: argparse.Namespace, batches: torch.Tensor, device: torch.device) -> list[float]:
    model = _model(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses, start = [], time.perf_counter()
    for batch in batches:
        found = []
        for rows in batch.split(1):
            loss = causal_lm_loss(model(input_ids=rows, use_cache=False).logits, rows)
            (loss / options.micro_batches).backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(torch.stack(found).sum() / len(found)))
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    seconds = (time.perf_counter() - start) / len(losses)
    _print("one GPU", losses, seconds, [_peak(device)], millions=round(millions))
    del model, optimizer
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return losses


def _pipeline(
    schedule: str, options: argparse.Namespace, batches: torch.Tensor, device: torch.device
) -> tuple[list[float], float, int]:
    num_stages = dist.get_world_size() * (2 if schedule in ("zb_v", "interleaved") else 1)
    stages = stages_of_transformers(_model(options, device), num_stages, blocks_per_stage="even")
    pipe = Pipeline(
        stages, schedule=schedule, num_micro_batches=options.micro_batches, loss_fn=causal_lm_loss,
        example=(batches[0, :1],), split="linear" if schedule == "zb_v" else "whole",
    )  # fmt: skip
    del stages
    optimizer = torch.optim.AdamW([w for stage in pipe.stages.values() for w in stage.parameters()], lr=1e-4)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    losses, start = [], time.perf_counter()
    for batch in batches:
        loss = pipe.step(batch, target=batch)
        optimizer.step()
        optimizer.zero_grad()
        losses += [] if loss is None else [loss]
    curve = [float(loss) for loss in losses]
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - start) / len(batches)
    pipe.close()
    return curve, seconds, _peak(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _text(num_bytes: int) -> torch.Tensor:
    """The first bytes of the standard library's modules, in the order of their names."""
    found = bytearray()
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        found += file.read_bytes()
        if len(found) >= num_bytes:
            break
    return torch.frombuffer(found[:num_bytes], dtype=torch.uint8).clone()


def _print(name: str, losses: list[float], seconds: float, peaks: list[int], **more: Any) -> None:
    shown = [round(loss, 6) for loss in losses]
    peak = [round(value / 2**30, 2) for value in peaks]
    print(
        json.dumps({"run": name, "s_per_step": round(seconds, 4), "peak_GiB": peak, **more, "losses": shown}),
        flush=True,
    )


if __name__ == "__main__":
    main()
