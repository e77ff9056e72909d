"""Formats of files of values: those with a table, and those that are known and not read, for refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipeproof.interop.importers.tools.tool import Tool
from pipeproof.interop.importers.tools.trainers import (
    BRIDGE,
    FLAGSCALE,
    LLAMA_FACTORY,
    MS_SWIFT,
    NEMO_RL,
    PRIMUS,
    ROLL,
    VERL,
)
from pipeproof.interop.importers.tree import Tree


@dataclass(frozen=True, slots=True)
class Format:
    """A format: its noun, paths of which a file of it has one, and what can be read instead."""

    noun: str
    marks: tuple[str, ...]
    instead: str
    kind: str = ""
    """Name for ``--from`` of a tool with a table, or ``plan``: only that tool reads the file."""


_PROCESS: Final = (
    "what can be read is the run_config.yaml of its checkpoints, or its configuration in its process, by "
    "`pipeproof.interop.from_arguments`"
)
_BLOCK: Final = "it is not read; what can be read is the block of arguments that its training prints"

TOOLS: Final[tuple[Tool, ...]] = (VERL, MS_SWIFT, NEMO_RL, LLAMA_FACTORY, ROLL, FLAGSCALE, PRIMUS)
"""Tools whose files have arguments of Megatron-Core under names of their own."""

_FORMATS: Final = (
    Format("a plan", ("pipeproof",), "`pipeproof check FILE` checks it", "plan"),
    *(
        Format(f"a file of {tool.name}", tool.marks, f"`--from {tool.kind}` reads it", tool.kind)
        for tool in (NEMO_RL, PRIMUS, ROLL, FLAGSCALE, LLAMA_FACTORY)
    ),
    Format("a recipe of Automodel", ("distributed.pp_size", "distributed.strategy"), "`--from automodel` reads it",
           "automodel"),
    Format("a configuration of gpt-neox", ("pipe_parallel_size", "pipe-parallel-size", "model_parallel_size"),
           "`--from gpt-neox` reads it", "gpt-neox"),
    Format("a configuration of nanotron", ("parallelism.pp", "parallelism.pp_engine"),
           "it is not read; its schedules are one forward and one backward, which a plan describes"),
    Format("the configuration of a training of Megatron-Bridge", BRIDGE.marks, "`--from megatron-bridge` reads it",
           BRIDGE.kind),
    Format("overrides of a recipe of Megatron-Bridge", ("model.pipeline_model_parallel_size", "dist", "ddp", "logger"),
           f"they are not read without the recipe, which has the other settings; {_PROCESS}"),
    Format("a configuration of NeMo", ("trainer.num_nodes", "trainer.strategy"), _BLOCK),
    Format("a configuration of DeepSpeed", ("train_micro_batch_size_per_gpu", "zero_optimization"),
           "`--from deepspeed` reads it", "deepspeed"),
    Format("a configuration of torchtitan", ("parallelism.pipeline_parallel_degree",), "`--from torchtitan` reads it",
           "torchtitan"),
    Format("training arguments of PaddleFormers", ("pipeline_parallel_degree", "tensor_parallel_degree"),
           "`--from paddleformers` reads them"),
    Format("a file of ms-swift", ("micro_batch_size", "tensor_model_parallel_size"), "`--from ms-swift` reads it",
           "ms-swift"),
)  # fmt: skip


def format_of(tree: Tree) -> Format | None:
    """Return the format that a file has; None for one that is not known."""
    return next((known for known in _FORMATS if any(map(tree.has, known.marks))), None)


def looks_like(known: Format) -> str:
    """Return the sentence of a refusal."""
    return f"this looks like {known.noun}: {known.instead}"
