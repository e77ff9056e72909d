"""FlagScale: YAML of an experiment, and of its task with nested arguments (commit da4935e: examples/*/conf)."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pipeproof.diagnostics.source import read_text
from pipeproof.interop.importers.tools.job import Job
from pipeproof.interop.importers.tools.tool import Tool

_PARTS: Final = ("system", "model", "data")
_ENTRY: Final = re.compile(r"^ +entrypoint: (\S+)", re.MULTILINE)
_OTHER_MODELS: Final = re.compile(r"train_(?!gpt\b|aquila\b)\w+")


def _programs(job: Job) -> Iterator[str]:
    """Yield the program of the experiment; of a task alone, those of the experiments in the directory above."""
    program = job.tree.get("experiment.task.entrypoint")
    if program is not None:
        yield str(program.value)
        return
    file = Path(job.tree.source.file).resolve()
    for experiment in sorted(file.parents[1].glob("*.yaml")) if len(file.parents) > 1 else ():
        match = _ENTRY.search(read_text(str(experiment)))
        if match is not None:
            yield match[1]


def _adapt(job: Job) -> None:
    match = _OTHER_MODELS.search(" ".join(_programs(job)))
    if match is not None:
        job.refuse(
            f"`{match[0]}.py` trains another model than GPT, which is not described",
            job.place("experiment.task.entrypoint"),
        )
    if any(job.tree.has(f"{section}.peft_type") for section in FLAGSCALE.sections):
        job.notes.append(("adapters are not described: all weights train here", job.top))
    if job.tree.has("experiment.auto_tuner"):
        job.notes.append(("the auto-tuner changes these settings", job.top))


FLAGSCALE: Final = Tool(
    name="FlagScale",
    kind="flagscale",
    names="flagscale",
    marks=("experiment.task", "system.precision", "system.checkpoint", "train.system"),
    sections=tuple(f"{top}{part}" for top in ("", "train.") for part in _PARTS),
    is_nested=True,
    ranks=(("experiment.runner.nnodes", None), ("experiment.runner.nproc_per_node", None)),
    decides=re.compile(r"use_dualpipev|moe_fb_overlap|(enable_)?hetero\w*|\w*_per_process_mesh|standalone_embedding_stage"
                       r"|extra_model_\w+|\w*vision\w*|freeze_vit|freeze_ViT"),
    without=re.compile(r"(?!use_dualpipev|moe_fb_overlap|\w*hetero|\w*mesh|extra_model|\w*vision|freeze_[vV]i[tT])\w+"),
    adapt=_adapt,
)  # fmt: skip
