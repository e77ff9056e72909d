"""The place of the script's optimizer in the plan."""

# ruff: noqa: D102 - `Optimizer` documents the methods
from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ScriptsOptimizer:
    """An ``Optimizer`` that does nothing: the executor's step ends before the script's optimizer."""

    def zero_grad(self) -> None:
        """Do nothing: gradients are the script's to reset, so that it may accumulate over steps."""

    def step(self) -> None:
        """Do nothing: the script's optimizer steps after the pipeline."""

    def state(self) -> dict[tuple[str, str], Any]:
        return {}

    def restore_state(self, weights: Mapping[str, Any], slots: Mapping[tuple[str, str], Any]) -> None:
        """Do nothing: the script loads its optimizer."""
