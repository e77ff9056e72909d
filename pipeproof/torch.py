"""Train your own PyTorch modules by a checked pipeline plan, and watch any job.

`docs/train.md` and `docs/my-job-hangs.md` show how.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipeproof.exec.monitor.torch_watch import watch
from pipeproof.exec.train.module_plan import stages_of_rank
from pipeproof.exec.train.torch.check_backwards import check_backwards
from pipeproof.exec.train.torch.cut_sequential import stages_of_sequential
from pipeproof.exec.train.torch.cut_transformers import causal_lm_loss, stages_of_transformers
from pipeproof.exec.train.torch.model_stages import ModelStages
from pipeproof.exec.train.torch.pipeline import Pipeline
from pipeproof.exec.train.torch.seams import seam
from pipeproof.exec.train.torch.stage_values import MicroBatches
from pipeproof.exec.train.train_errors import PipelineError, PlanRefused

if TYPE_CHECKING:
    from pipeproof.exec.train.torch.dcp_state import load_dcp, save_dcp

__all__ = [
    "MicroBatches",
    "ModelStages",
    "Pipeline",
    "PipelineError",
    "PlanRefused",
    "causal_lm_loss",
    "check_backwards",
    "load_dcp",
    "save_dcp",
    "seam",
    "stages_of_rank",
    "stages_of_sequential",
    "stages_of_transformers",
    "watch",
]


def __getattr__(name: str) -> Any:
    """Import what needs ``torch.distributed.tensor`` at first use: that takes a second."""
    if name in ("load_dcp", "save_dcp"):
        return getattr(import_module("pipeproof.exec.train.torch.dcp_state"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
