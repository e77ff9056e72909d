"""Step time and memory of ``pipeproof.torch.Pipeline``, compared with ``torch.distributed.pipelining``.

Both run the same modules (a Hugging Face Llama with random weights), the same schedule and the same micro-batches, in
the same processes and alternately: a few steps of one, a few of the other. It prints the medians of the rounds, and the
median of their ratios; below 1 pipeproof is faster. Peak memory is measured in a step while the other pipeline does not
exist: PyTorch's stages keep their receive buffers between steps.

    python benchmarks/train_step.py                       # 4 processes on the CPU, gloo
    python benchmarks/train_step.py --device cuda --ranks 2 --hidden 4096 --layers 8 --sequence 2048 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any

SCHEDULES = {
    "1f1b": ("Schedule1F1B", 1),
    "gpipe": ("ScheduleGPipe", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "zb_v": ("ScheduleZBVZeroBubble", 2),
}
"""The rival's class, and the stages of a rank."""


def main() -> int:
    """Start the ranks, or be one of them."""
    options = _options()
    if options.rank_of_job:
        _rank(options)
        return 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, __file__, *sys.argv[1:], "--rank-of-job"], env=environment, check=False).returncode


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--schedules", nargs="+", choices=[*SCHEDULES], default=["1f1b", "interleaved", "zb_v"])
    parser.add_argument("--split", choices=["whole", "linear", "graph"], default="linear",
                        help="for schedules with I and W; graph for all")  # fmt: skip
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5, help="steps of each in a round")
    parser.add_argument("--clock", choices=["wall", "processor"], default="wall",
                        help="processor: the processor time of all ranks, on a machine with other work")  # fmt: skip
    parser.add_argument("--rank-of-job", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    local = int(os.environ["LOCAL_RANK"])
    if options.device == "cuda":
        torch.cuda.set_device(local)
    device = torch.device(options.device, local) if options.device == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    for kind in options.schedules:
        _compare(kind, options, device)
    dist.destroy_process_group()


def _compare(kind: str, options: argparse.Namespace, device: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, schedules

    from pipeproof.torch import Pipeline, causal_lm_loss, stages_of_rank

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    class_name, chunks = SCHEDULES[kind]
    num_stages, num = num_ranks * chunks, options.micro_batches
    numbers = stages_of_rank(kind, num_ranks, num_stages, rank)
    with device:
        cut = _cut(options, num_stages)
    modules = {number: cut[number] for number in numbers}
    del cut
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, _VOCABULARY, (num, options.sequence), generator=generator).to(device)

    before = time.perf_counter()
    pipe: Any = Pipeline(
        modules, schedule=kind, num_micro_batches=num, loss_fn=causal_lm_loss, example=(tokens[:1],),
        split=options.split if kind == "zb_v" or options.split == "graph" else "whole",
    )  # fmt: skip
    constructed_s = time.perf_counter() - before
    weights = [weight for module in modules.values() for weight in module.parameters()]

    def ours() -> Any:
        return pipe.step(tokens, target=tokens)

    own_peak = _peak_bytes(ours, weights, device)
    stages = [PipelineStage(modules[number], number, num_stages, device) for number in numbers]
    rival = getattr(schedules, class_name)(stages if chunks > 1 else stages[0], num, loss_fn=causal_lm_loss)

    def theirs() -> Any:
        losses: list[torch.Tensor] = []
        rival.step(*([tokens] if 0 in numbers else []), target=tokens if num_stages - 1 in numbers else None,
                   losses=losses)  # fmt: skip
        return torch.stack(losses).mean() if losses else None

    def timed(step: Any, steps: int) -> float:
        for weight in weights:
            weight.grad = None
        if device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        clock = time.perf_counter if options.clock == "wall" else time.process_time
        start = clock()
        for _ in range(steps):
            step()
            for weight in weights:
                weight.grad = None
        if device.type == "cuda":
            torch.cuda.synchronize()
        if options.clock == "processor":
            taken = torch.tensor((clock() - start) / steps, dtype=torch.float64)
            dist.all_reduce(taken)
            return float(taken)
        dist.barrier()
        return (clock() - start) / steps

    both = ours(), theirs()
    if both[0] is not None:
        torch.testing.assert_close(both[0].float(), both[1].float(), rtol=1e-2, atol=1e-3)
    rounds = []
    for step in (ours, theirs):  # warm
        timed(step, 1)
    for index in range(options.rounds):
        order = (ours, theirs) if index % 2 == 0 else (theirs, ours)
        measured = {step: timed(step, options.steps) for step in order}
        rounds.append((measured[ours], measured[theirs]))
    pipe.close()
    pipe = None
    del step, order, measured, both
    their_peak = _peak_bytes(theirs, weights, device)
    our_s, their_s = (median(entry[side] for entry in rounds) for side in (0, 1))
    ratios = [mine / other for mine, other in rounds]
    peaks: list[Any] = [None] * num_ranks
    dist.all_gather_object(peaks, [own_peak, their_peak])
    if rank == 0:
        line: dict[str, Any] = {
            "schedule": kind, "torch": torch.__version__, "device": _device_name(device), "ranks": num_ranks,
            "hidden": options.hidden, "layers": options.layers, "sequence": options.sequence, "micro_batches": num,
            "dtype": options.dtype, "pipeproof_ms": round(our_s * 1e3, 2), "pipelining_ms": round(their_s * 1e3, 2),
            "ratio": round(median(ratios), 3), "ratios": [round(ratio, 3) for ratio in ratios],
            "construction_s": round(constructed_s, 2),
        }  # fmt: skip
        if device.type == "cuda":
            line["peak_GiB"] = [[round(value / 2**30, 3) for value in peak] for peak in peaks]
        print(json.dumps(line), flush=True)


def _peak_bytes(step: Any, weights: list[Any], device: Any) -> int:
    """Peak memory of a rank in its second step, without gradients at its start; 0 on a CPU."""
    import torch

    if device.type == "cpu":
        return 0
    gc.collect()
    for _ in range(2):
        for weight in weights:
            weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
    torch.cuda.synchronize()
    for weight in weights:
        weight.grad = None
    return int(torch.cuda.max_memory_allocated())


_VOCABULARY = 1024


def _cut(options: argparse.Namespace, num_stages: int) -> Any:
    """The stages of a Llama with random weights, equal on all ranks."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from pipeproof.torch import stages_of_transformers

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=options.layers, num_attention_heads=max(1, options.hidden // 64), vocab_size=_VOCABULARY,
        max_position_embeddings=options.sequence,
    )  # fmt: skip
    torch.set_default_dtype(getattr(torch, options.dtype))
    model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return stages_of_transformers(model, num_stages, blocks_per_stage="even")


def _device_name(device: Any) -> str:
    import torch

    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    sys.exit(main())
