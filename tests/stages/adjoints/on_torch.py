"""PyTorch, and the rows that it has alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from pipeproof.stages.common.work_items import join_mtp_streams
from pipeproof.stages.torch import experts, functional
from pipeproof.stages.torch.backend_ops import OPS
from pipeproof.stages.torch.stage import TorchVocabulary, summed_cross_entropies, token_losses
from pipeproof.stages.torch.weights import SplitWeights, Weight
from tests.stages.adjoints.rows import plain
from tests.stages.adjoints.table import shared_cases
from tests.stages.adjoints.weights import used
from tests.stages.adjoints.world import Backend, Case
from tests.stages.torch.staged_run import CPU


def _gradient(of: Any) -> np.ndarray:
    gradient = of.gradient if isinstance(of, Weight) else of.grad
    return np.zeros(of.shape) if gradient is None else gradient.numpy()


def _joined(tensors: list[Any]) -> Any:
    return join_mtp_streams(OPS, tensors, 1)


TORCH = Backend(
    torch, OPS, functional, torch.tensor, partial(torch.tensor, requires_grad=True),
    lambda values: Weight(torch.tensor(values)), _gradient, lambda tensor: tensor.detach().numpy(),
    partial(SplitWeights, CPU), functional.clip,
    partial(functional.rotary_tables, dtype=torch.float64, device=CPU), TorchVocabulary,
    lambda logits, labels, region: token_losses(_joined(logits), _joined(labels), region),
    lambda logits, labels, region: summed_cross_entropies(_joined(logits), labels, region, 1),
    experts, experts.TorchExperts, lambda plan, **options: experts.TorchBalance(plan, (), CPU, **options),
)  # fmt: skip


def all_cases() -> list[Case]:
    """Every row."""
    order = torch.tensor([2, 0, 3, 1])
    back = experts.inverse(order)
    groups = functional.Groups(torch.tensor([2, 0, 3]))  # no row is of the second
    return [
        *shared_cases(TORCH),
        plain("rows moved", "reorder", lambda x: experts.reorder(x, order, back).tanh(), (4, 3)),
        plain("rows visited", "visits", lambda x: experts.visits(x, order, back).tanh(), (2, 3)),
        used("norm", "SplitWeights.norm", lambda r, x, w: r.weights.norm(x, w), [(3, 2, 4)], [(4,)]),
        used("norm of heads", "SplitWeights.norm",
             lambda r, x, w: r.weights.norm(x[:, :, 1:], w), [(3, 2, 4, 4)], [(4,)]),
        used("LayerNorm", "SplitWeights.norm",
             lambda r, x, w, b: r.weights.norm(x, w, b), [(3, 2, 4)], [(4,), (4,)]),
        used("groups of rows", "SplitWeights.grouped",
             lambda r, x, w: r.weights.grouped(x, w, groups).tanh(), [(5, 4)], [(3, 4, 2)]),
    ]  # fmt: skip
