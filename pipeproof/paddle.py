"""Train a Fleet `PipelineLayer`, or your own Paddle layers, by a checked pipeline plan; `docs/train.md` shows how."""

from __future__ import annotations

from pipeproof.exec.train.module_plan import stages_of_rank
from pipeproof.exec.train.paddle.pipeline import Pipeline
from pipeproof.exec.train.train_errors import PipelineError, PlanRefused

__all__ = ["Pipeline", "PipelineError", "PlanRefused", "stages_of_rank"]
