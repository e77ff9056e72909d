"""Train your own PyTorch modules by a checked pipeline plan, and watch any job.

`docs/train.md` and `docs/my-job-hangs.md` show how.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeproof.diagnostics.install_command import missing_framework
from pipeproof.lazy_exports import lazy_exports

try:
    from pipeproof.exec.monitor.torch_watch import watch
except ModuleNotFoundError as error:
    raise missing_framework(error, "PyTorch", "torch") from None
from pipeproof.exec.store.train_errors import PipelineError, PlanRefused
from pipeproof.exec.train.module_plan import stages_of_rank
from pipeproof.exec.train.torch.cut_transformers import causal_lm_loss, causal_lm_sum, stages_of_transformers
from pipeproof.exec.train.torch.meta_buffers import note_empty_buffers
from pipeproof.exec.train.torch.model_stages import ModelStages, stages_of_sequential
from pipeproof.exec.train.torch.overlap_points import overlap_point
from pipeproof.exec.train.torch.packed_batches import packed
from pipeproof.exec.train.torch.pipeline import Pipeline
from pipeproof.exec.train.torch.record_layers import record_layers
from pipeproof.exec.train.torch.stage_values import MicroBatches

if TYPE_CHECKING:
    from pipeproof.exec.train.torch.dcp_state import load_dcp, save_dcp
    from pipeproof.exec.train.torch.pretrained_load import initialize_weights, load_pretrained
    from pipeproof.exec.train.torch.pretrained_save import save_pretrained
    from pipeproof.exec.train.torch.tune import tune
    from pipeproof.exec.train.tuned_layout import Layout
    from pipeproof.exec.train.tuning import Search

_LATE = {
    "load_dcp": "dcp_state", "save_dcp": "dcp_state", "initialize_weights": "pretrained_load",
    "load_pretrained": "pretrained_load", "save_pretrained": "pretrained_save", "tune": "tune",
    "Search": "tune", "Layout": "tune",
}  # fmt: skip

note_empty_buffers()

__all__ = [
    "Layout",
    "MicroBatches",
    "ModelStages",
    "Pipeline",
    "PipelineError",
    "PlanRefused",
    "Search",
    "causal_lm_loss",
    "causal_lm_sum",
    "initialize_weights",
    "load_dcp",
    "load_pretrained",
    "overlap_point",
    "packed",
    "record_layers",
    "save_dcp",
    "save_pretrained",
    "stages_of_rank",
    "stages_of_sequential",
    "stages_of_transformers",
    "tune",
    "watch",
]

__getattr__ = lazy_exports(__name__, _LATE, "pipeproof.exec.train.torch")
"""It imports at first use what takes a second: ``torch.distributed.tensor``, and the search of ``tune``."""
