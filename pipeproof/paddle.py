"""Train a Fleet `PipelineLayer` or your own Paddle layers by a checked pipeline plan, and watch any job.

`docs/train.md` and `docs/my-job-hangs.md` show how.
"""

from __future__ import annotations

from pipeproof.diagnostics.install_command import missing_framework

try:
    from pipeproof.exec.monitor.paddle_watch import watch
except ModuleNotFoundError as error:
    raise missing_framework(error, "PaddlePaddle", "cpu") from None
from pipeproof.exec.store.train_errors import PipelineError, PlanRefused
from pipeproof.exec.train.module_plan import stages_of_rank
from pipeproof.exec.train.paddle.pipeline import Pipeline
from pipeproof.exec.train.paddle.record_layers import record_layers
from pipeproof.exec.train.paddle.semi_auto import plan_of_schedule
from pipeproof.exec.train.paddle.tune import tune
from pipeproof.exec.train.tuned_layout import Layout
from pipeproof.exec.train.tuning import Search

__all__ = [
    "Layout",
    "Pipeline",
    "PipelineError",
    "PlanRefused",
    "Search",
    "plan_of_schedule",
    "record_layers",
    "stages_of_rank",
    "tune",
    "watch",
]
