"""Formats of files of values: those with a table, and those that are known and not read, for refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipeproof.interop.importers.tools.trainers import BRIDGE
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
_BLOCK: Final = (
    "it is not read; what can be read is the block of arguments that its training prints, or its arguments in its "
    "process, by `pipeproof.interop.from_arguments`"
)
_PLAN: Final = "it is not read; its schedule is described by a plan"
OTHER_TRAINERS: Final = (
    "policy.megatron_cfg", "modules.pre_trainer", "actor_train.strategy_args", "experiment.task", "system.precision",
    "train.system", "cutoff_len",
)  # fmt: skip
"""Paths in files of NeMo-RL, Primus, ROLL, FlagScale and LLaMA-Factory; each file has at least one of them."""


_FORMATS: Final = (
    Format("a plan", ("pipeproof",), "`pipeproof check FILE` checks it", "plan"),
    Format("a file of a trainer that starts Megatron-Core", OTHER_TRAINERS, _BLOCK, "other"),
    Format("a recipe of Automodel", ("distributed.pp_size", "distributed.strategy"), _PLAN, "other"),
    Format("a configuration of gpt-neox or DeepSpeed",
           ("pipe_parallel_size", "pipe-parallel-size", "model_parallel_size", "train_micro_batch_size_per_gpu",
            "zero_optimization"), _PLAN, "other"),
    Format("a configuration of nanotron", ("parallelism.pp", "parallelism.pp_engine"),
           "it is not read; its schedules are one forward and one backward, which a plan describes"),
    Format("the configuration of a training of Megatron-Bridge", BRIDGE.marks, "`--from megatron-bridge` reads it",
           BRIDGE.kind),
    Format("overrides of a recipe of Megatron-Bridge", ("model.pipeline_model_parallel_size", "dist", "ddp", "logger"),
           f"they are not read without the recipe, which has the other settings; {_PROCESS}"),
    Format("a configuration of NeMo", ("trainer.num_nodes", "trainer.strategy"), _BLOCK),
    Format("a configuration of torchtitan", ("parallelism.pipeline_parallel_degree",), "`--from torchtitan` reads it",
           "torchtitan"),
    Format("training arguments of PaddleFormers", ("pipeline_parallel_degree", "tensor_parallel_degree"),
           "`--from paddleformers` reads them"),
)  # fmt: skip


def format_of(tree: Tree) -> Format | None:
    """Return the format that a file has; None for one that is not known."""
    return next((file_format for file_format in _FORMATS if any(map(tree.has, file_format.marks))), None)


def looks_like(file_format: Format) -> str:
    """Return the sentence of a refusal."""
    return f"this looks like {file_format.noun}: {file_format.instead}"
