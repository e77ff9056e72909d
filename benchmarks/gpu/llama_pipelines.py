"""Steps of a model's modules by ``pipeproof.torch`` next to PyTorch's own pipelines, with one or two ranks in a stage.

    torchrun --nproc-per-node 4 benchmarks/gpu/llama_pipelines.py RESULTS.jsonl 540 4096,4096,4,8 pp
    torchrun --nproc-per-node 4 benchmarks/gpu/llama_pipelines.py RESULTS.jsonl 540 4096,4096,4,8 fsdp
    torchrun --nproc-per-node 4 benchmarks/gpu/llama_pipelines.py RESULTS.jsonl 300 256,16,2,8 tp --schedules 1f1b
    torchrun --nproc-per-node 2 benchmarks/gpu/llama_pipelines.py RESULTS.jsonl 540 2048,4096,3,8 pp --model qwen3_moe \
        --vocabulary 151936 --schedules 1f1b,zb_v --blocks 3,3

Without a GPU they run over gloo: choose small sizes. A stage is on one rank (``pp``), or on two by FSDP2 (``fsdp``) or
DTensor (``tp``). Forward and backward of all micro-batches, each of one row of tokens, in bfloat16.

Each row is one way to run a schedule: milliseconds, the ratio to the best compiled row of the rival so far (it cannot
split the backward of compiled blocks), GiB, the losses of the first ``NUM_STEPS`` steps of SGD, and ``as_first``: the
gradients of all these steps have the bits of the first row whose blocks run the same way: eager, compiled, or as graphs
of equally cut stages. All schedules run one way before the next way begins: a run that is cut short then has all
schedules.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from llama_stages import Layout, joined, llama, local, qwen3_moe, weights_of
from measure import Measured, Times, forget, leave, timed
from our_step import start
from rival import CLASSES
from rows import Rows, bits_of
from sizes import Size
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from pipeproof.torch import Pipeline, causal_lm_loss

NUM_STEPS = 4
"""First steps whose bits are compared: a replayed step begins with the third."""
SPLIT = ("interleaved_zb", "zb_v", "dualpipe_v")
"""Schedules with I and W."""


@dataclass(frozen=True)
class Way:
    """One way to run a schedule; ``split`` is empty for the rival."""

    split: str = ""
    is_compiled: bool = False
    replay: bool = False

    def blocks(self, num_stages: int) -> str:
        """Execution of blocks: ways that agree in it may have equal bits. A graph fuses across all of its stage."""
        if self.split == "graph":
            return f"graphs of {num_stages} stages"
        return "compiled" if self.is_compiled else "eager"

    def __str__(self) -> str:
        blocks = "compiled" if self.is_compiled else "eager" if not self.split else ""
        words = filter(None, ("ours" if self.split else "rival", self.split, blocks, "replayed" * self.replay))
        return ", ".join(words)


COMPILED_RIVAL = Way(is_compiled=True)
MODELS = {"llama": llama, "qwen3_moe": qwen3_moe}


def ways(inside: str, *, on_gpu: bool) -> Iterator[Way]:
    """Those that a layout allows, the most telling ones first."""
    yield COMPILED_RIVAL
    if inside == "pp":
        if on_gpu:
            yield Way("graph", replay=True)
        yield Way("graph")
    yield Way("whole", is_compiled=True)
    yield Way()
    yield Way("whole")
    if inside != "fsdp":
        yield Way("linear")


def runs(kind: str, way: Way) -> bool:
    """Return False for an unsupported schedule: the rival cannot split the backward of compiled blocks."""
    return not (way == COMPILED_RIVAL and kind in SPLIT) and not (way.split == "linear" and kind not in SPLIT)


class Job:
    """The model of all ways, and how each of them runs; ``blocks`` is the cut for schedules with so many stages."""

    def __init__(
        self, size: Size, layout: Layout, device: torch.device, model: str, blocks: Sequence[int] | None
    ) -> None:
        self.size, self.layout, self.device = size, layout, device
        self._model, self._blocks = MODELS[model], blocks
        generator = torch.Generator().manual_seed(layout.replica)
        shape = size.num_micro_batches, size.seq_length
        self.tokens = torch.randint(0, size.vocab_size, shape, generator=generator).to(device)

    def stages(self, kind: str, way: Way) -> tuple[int, dict[int, nn.Module]]:
        """The number of stages, and this rank's."""
        num_stages = self.layout.num_pp * self.size.chunks(kind)
        blocks = self._blocks if self._blocks and len(self._blocks) == num_stages else None
        stages = self.layout.stages(self._model(self.size, self.device), kind, num_stages, blocks)
        if way.is_compiled:
            for block in (block for stage in stages.values() for block in stage.blocks.values()):
                block.compile()
        return num_stages, stages

    def ours(self, kind: str, stages: Mapping[int, nn.Module], way: Way) -> tuple[Pipeline, Callable[[], Any]]:
        """A ``Pipeline``, and its step."""
        pipe = Pipeline(
            stages, schedule=kind, num_micro_batches=self.size.num_micro_batches, loss_fn=causal_lm_loss,
            example=(self.tokens[:1],), split=way.split, replay=way.replay, group=self.layout.mesh["pp"], timeout_s=120,
        )  # fmt: skip
        return pipe, lambda: pipe.step(self.tokens, target=self.tokens)

    def theirs(self, kind: str, num_stages: int, stages: Mapping[int, nn.Module]) -> Callable[[], Any]:
        """A step of PyTorch's pipeline."""
        group = self.layout.mesh["pp"].get_group()
        made = [PipelineStage(stage, number, num_stages, self.device, group=group) for number, stage in stages.items()]
        schedule = getattr(schedules, CLASSES[kind])(
            made if len(made) > 1 else made[0], self.size.num_micro_batches, loss_fn=causal_lm_loss
        )
        inputs = (self.tokens,) if 0 in stages else ()

        def step() -> torch.Tensor | None:
            losses: list[torch.Tensor] = []
            last = {"target": self.tokens, "losses": losses} if num_stages - 1 in stages else {}
            schedule.step(*inputs, **last)
            return torch.stack(losses).detach().mean() if losses else None

        return step

    def first_steps(self, step: Callable[[], Any], stages: Mapping[int, nn.Module]) -> tuple[list[Any], list[float]]:
        """The bits of the gradients of the first steps on all ranks, and the losses."""
        weights = weights_of(stages)
        optimizer = torch.optim.SGD(weights.values(), lr=0.1, foreach=False)
        bits, losses = list[Any](), list[float]()
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            loss = step()
            losses += [] if loss is None else [float(loss)]
            gradients = {name: local(weight.grad) for name, weight in weights.items() if weight.grad is not None}
            bits.append(joined((f"{name} {self.layout.shard}", own) for name, own in bits_of(gradients).items()))
            optimizer.step()
        return bits, joined([("losses", losses)] if losses else [])["losses"]


def main() -> None:
    """Measure the sizes on the command line."""
    parser = argparse.ArgumentParser(description="Steps of a model's modules, ours and PyTorch's.")
    parser.add_argument("results", type=Path, help="file of the rows, written anew")
    parser.add_argument("seconds", type=float, help="after which no further row begins")
    parser.add_argument("size", help="hidden, sequence, blocks for each rank of the world, micro-batches")
    parser.add_argument("inside", choices=["pp", "fsdp", "tp"], help="ranks of a stage")
    parser.add_argument("--schedules", default=",".join(CLASSES), help="with ',' between")
    parser.add_argument("--ways", default="", help="beginnings of names of ways, with ';' between")
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--blocks", help="blocks of each stage, for schedules with so many stages, with ',' between")
    parser.add_argument("--deterministic", action="store_true", help="PyTorch's deterministic algorithms")
    parser.add_argument("--resharded", action="store_true", help="fsdp with reshard_after_forward=True")
    options = parser.parse_args()
    size = replace(Size.read(options.size), vocab_size=options.vocabulary)
    end, inside = time.monotonic() + options.seconds, options.inside
    torch.use_deterministic_algorithms(options.deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False
    framework, _ = start()
    device = framework.device
    layout = Layout.of(inside, 1 if inside == "pp" else 2, device, reshards=options.resharded or None)
    blocks = [int(text) for text in options.blocks.split(",")] if options.blocks else None
    job = Job(size, layout, device, options.model, blocks)
    rows = Rows(options.results, end, device)
    chosen = [way for way in ways(inside, on_gpu=device.type == "cuda")
              if str(way).startswith(tuple(options.ways.split(";")))]  # fmt: skip
    first = dict[str, list[Any]]()
    best: Measured | None = None
    for way in chosen:
        for kind in (kind for kind in options.schedules.split(",") if runs(kind, way)):
            if not rows.has_time():
                break
            row = {"model": options.model, "layout": inside, "size": options.size, "schedule": kind, "way": str(way),
                   "deterministic": options.deterministic, "resharded": options.resharded}  # fmt: skip
            pipe, without = None, dict[int, str]()
            num_stages, stages = job.stages(kind, way)
            if way.split:
                pipe, step = job.ours(kind, stages, way)
            else:
                step = job.theirs(kind, num_stages, stages)
            bits, losses = job.first_steps(step, stages)
            if pipe is not None:
                without = {number: split for number, split in pipe.splits.items() if split != way.split}
            expected = first.setdefault(way.blocks(num_stages), bits)
            took = timed(step, device, Times(warm_up=1, steps=3, series=2))
            if way == COMPILED_RIVAL and (best is None or took.ms < best.ms):
                best = took
            ratio = None if best is None else round(took.ms / best.ms, 3)
            rows.put(
                {**row, "ms": round(took.ms, 2), "ratio": ratio, "gib": round(took.gib, 2), "losses": losses},
                {"as_first": bits == expected, "without": without},
            )
            if pipe is not None:
                pipe.close()
            pipe = step = stages = None
            forget(device)
    leave()


if __name__ == "__main__":
    main()
