"""The layout that ``pipeproof.torch.tune`` chooses, next to PyTorch's pipelines and FSDP2 without a pipeline.

    torchrun --nproc-per-node 2 benchmarks/gpu/tune.py RESULTS.jsonl llama3b --by-hand 16,12
    torchrun --nproc-per-node 2 benchmarks/gpu/tune.py RESULTS.jsonl qwen3moe --by-hand 5,1
    torchrun --nproc-per-node 2 benchmarks/gpu/tune.py RESULTS.jsonl qwen1b --memory-gib 14

Forward and backward of all micro-batches of one row in bfloat16. All sides have the same random tokens and run in
turns; the best of their rounds counts. PyTorch's pipelines have compiled blocks, as many in each stage
(``default``) or as by hand; FSDP2 has compiled blocks and the micro-batches of one and of two rows. Without a GPU,
small sizes over gloo.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import Times, forget, leave, timed
from our_step import start
from rival import CLASSES
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from pipeproof.specs.profile_file import read_profile
from pipeproof.torch import Layout, Pipeline, Search, causal_lm_loss, stages_of_rank, stages_of_transformers, tune

ROUNDS = 3
_TIMES = ("forward_us", "backward_us", "backward_input_us", "backward_weight_us")


@dataclass(frozen=True)
class Shape:
    """A model, the length of a sequence, and the micro-batches of a step."""

    model: type[Any]
    config: Callable[[], Any]
    seq_length: int
    num_micro_batches: int
    vocab_size: int


def _llama(hidden: int, ffn: int, blocks: int, heads: int, kv_heads: int, vocabulary: int) -> Any:
    return LlamaConfig(
        hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=blocks, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=hidden // heads, vocab_size=vocabulary, max_position_embeddings=8192,
        rope_theta=500000.0, tie_word_embeddings=False,
    )  # fmt: skip


def _qwen3moe() -> Any:
    return Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, intermediate_size=6144, num_experts=128, num_experts_per_tok=8,
        num_hidden_layers=6, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=151936,
        max_position_embeddings=8192, tie_word_embeddings=False, router_aux_loss_coef=0.0,
    )  # fmt: skip


SHAPES = {
    "llama3b": Shape(LlamaForCausalLM, lambda: _llama(3072, 8192, 28, 24, 8, 128256), 4096, 8, 128256),
    "qwen3moe": Shape(Qwen3MoeForCausalLM, _qwen3moe, 4096, 8, 151936),
    "qwen1b": Shape(LlamaForCausalLM, lambda: _llama(1536, 8960, 28, 12, 2, 151936), 4096, 12, 151936),
    "hosts": Shape(LlamaForCausalLM, lambda: _llama(2048, 8192, 16, 32, 8, 32000), 1024, 16, 32000),
    "small": Shape(LlamaForCausalLM, lambda: _llama(64, 128, 6, 4, 2, 512), 32, 4, 512),
}


class Job:
    """One shape on the ranks of this job."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(0)
        size = shape.num_micro_batches, shape.seq_length
        self.tokens = torch.randint(0, min(30000, shape.vocab_size), size, generator=generator).to(device)

    def model(self) -> nn.Module:
        """The model with random weights, equal on all ranks."""
        torch.manual_seed(0)
        torch.set_default_dtype(self.dtype)
        with self.device:
            model = self.shape.model(self.shape.config())
        torch.set_default_dtype(torch.float32)
        return model

    def layout(self, memory_gib: float | None, num_trials: int) -> Layout:
        """The layout that ``tune`` chooses."""
        return tune(
            self.model(), loss_fn=causal_lm_loss, example=(self.tokens[:1],), target=self.tokens[:1],
            num_micro_batches=self.shape.num_micro_batches, memory_gib=memory_gib, search=Search(num_trials=num_trials),
        )  # fmt: skip

    def ours(self, layout: Layout) -> Callable[[], object]:
        """The step of a layout."""
        pipe = Pipeline(
            layout.stages, plan=layout.plan, loss_fn=causal_lm_loss, example=(self.tokens[:1],), split=layout.split,
            replay=layout.replay,
        )  # fmt: skip
        weights = [weight for stage in pipe.stages.values() for weight in stage.parameters()]

        def step() -> None:
            pipe.step(self.tokens, target=self.tokens)
            _reset(weights)

        return step

    def stage_times(self, layout: Layout, file: Path) -> list[dict[str, Any]]:
        """Microseconds of F, I and W of each stage: the sums of its layers in the plan, and in the steps of a run."""
        pipe = Pipeline(
            layout.stages, plan=layout.plan, loss_fn=causal_lm_loss, example=(self.tokens[:1],), split=layout.split
        )
        pipe.profile(file, self.tokens, target=self.tokens, num_steps=2)
        dist.barrier()  # the first rank writes the file
        layers = {layer["name"]: layer for layer in layout.plan["model"]["layers"]}
        rows = []
        for measured in read_profile(file).stages:
            own = [layers[name] for name in layout.plan["stages"][measured.stage]]
            sums = {key: round(sum(layer.get(key, 0) for layer in own)) for key in _TIMES}
            rows.append(
                {"stage": measured.stage, "plan": sums, "run": {op.kind: op.own.median_us for op in measured.ops}}
            )
        return rows

    def theirs(self, kind: str, blocks: Sequence[int] | None, *, is_compiled: bool) -> Callable[[], object]:
        """The step of PyTorch's pipeline with two stages or more; ``blocks`` of each stage, None for an even cut."""
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        num_stages = num_ranks * (1 if kind == "1f1b" else 2)
        cut = stages_of_transformers(self.model(), num_stages, blocks_per_stage=blocks or self._even(num_stages))
        own = {number: cut[number] for number in stages_of_rank(kind, num_ranks, num_stages, rank)}
        for stage in own.values():
            for block in stage.blocks.values():
                if is_compiled:
                    block.compile()
        made = [PipelineStage(stage, number, num_stages, self.device) for number, stage in own.items()]
        schedule = getattr(schedules, CLASSES[kind])(
            made if len(made) > 1 else made[0], self.shape.num_micro_batches, loss_fn=causal_lm_loss
        )
        inputs = (self.tokens,) if 0 in own else ()
        weights = [weight for stage in own.values() for weight in stage.parameters()]

        def step() -> None:
            last = {"target": self.tokens, "losses": []} if num_stages - 1 in own else {}
            schedule.step(*inputs, **last)
            _reset(weights)

        return step

    def _even(self, num_stages: int) -> list[int]:
        blocks = self.shape.config().num_hidden_layers
        return [blocks // num_stages + (number < blocks % num_stages) for number in range(num_stages)]

    def fsdp(self, rows: int) -> Callable[[], object]:
        """FSDP2 without a pipeline: each rank has its part of the rows, in micro-batches of ``rows``."""
        model = self.model()
        for block in model.model.layers:
            block.compile()
            fully_shard(block, reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=False)
        own = self.tokens.chunk(dist.get_world_size())[dist.get_rank()].split(rows)

        def step() -> None:
            for index, tokens in enumerate(own):
                model.set_requires_gradient_sync(index == len(own) - 1)
                logits = model(input_ids=tokens, use_cache=False).logits
                (causal_lm_loss(logits, tokens) / len(own)).backward()
            _reset(model.parameters())

        return step


def _reset(weights: Any) -> None:
    for weight in weights:
        weight.grad = None


def main() -> None:
    """Tune a model and compare."""
    parser = argparse.ArgumentParser(description="The layout that tune chooses, next to its rivals.")
    parser.add_argument("results", type=Path, help="file to which rows are appended")
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("--by-hand", help="blocks of each stage of the rival's 1f1b, with ',' between")
    parser.add_argument("--memory-gib", type=float)
    parser.add_argument("--profile", type=Path, help="profile the chosen layout, step not replayed, into this file")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=500, help="after which no further side is made")
    parser.add_argument("--sides", default="default,hand,interleaved,fsdp1,fsdp2", help="rivals, with ',' between")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    framework, _ = start()
    device = framework.device
    job = Job(SHAPES[options.model], device)
    torch._dynamo.config.cache_size_limit = 64

    def put(row: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            with options.results.open("a") as file:
                file.write(json.dumps({"model": options.model, "memory_gib": options.memory_gib, **row}) + "\n")

    started = time.monotonic()
    layout = job.layout(options.memory_gib, options.trials)
    if dist.get_rank() == 0:
        print(layout, flush=True)
    put({
        "tune_s": round(time.monotonic() - started, 1), "phases": dict(layout.seconds), "notes": layout.notes,
        "rows": [asdict(row) for row in layout.rows],
    })  # fmt: skip
    if options.profile:
        put({"stages": job.stage_times(layout, options.profile)})
    sides: dict[str, Callable[[], object]] = {"tune": job.ours(layout)}
    hand = [int(text) for text in options.by_hand.split(",")] if options.by_hand else None
    makers: dict[str, Callable[[], Callable[[], object]]] = {
        "default": lambda: job.theirs("1f1b", None, is_compiled=True),
        "interleaved": lambda: job.theirs("interleaved", None, is_compiled=True),
        "eager": lambda: job.theirs("1f1b", None, is_compiled=False),
        "fsdp1": lambda: job.fsdp(1),
        "fsdp2": lambda: job.fsdp(2),
    }
    if hand:
        makers["hand"] = lambda: job.theirs("1f1b", hand, is_compiled=True)
    put({"ms": {"tune": timed(sides["tune"], device, Times(warm_up=4, steps=3, series=2)).ms}})
    for name in options.sides.split(","):
        if name in makers and _all_have_time(end, device):
            sides[name] = makers[name]()
            put({"ms": {name: timed(sides[name], device, Times(warm_up=2, steps=3, series=1)).ms}})
            forget(device)
    best = dict.fromkeys(sides, float("inf"))
    gib: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, step in sides.items():
            took = timed(step, device, Times(warm_up=1, steps=3, series=1))
            best[name], gib[name] = min(best[name], took.ms), took.gib
    put({"ms": {name: round(ms, 1) for name, ms in best.items()},
         "ratio": {name: round(best["tune"] / ms, 3) for name, ms in best.items()}})  # fmt: skip
    leave()


def _all_have_time(end: float, device: torch.device) -> bool:
    has = torch.tensor([float(time.monotonic() < end)], device=device)
    dist.all_reduce(has, op=dist.ReduceOp.MIN)
    return bool(has.item())


if __name__ == "__main__":
    main()
