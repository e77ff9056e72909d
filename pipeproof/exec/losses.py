"""The losses of a step: the main one, and those of modules that predict tokens further ahead.

Where a model has modules, stages and references show one vector of all of
them, each scaled as the main loss is and without its weight; else a scalar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeproof.exec.jobs import Loss
from pipeproof.stages.describe.module_facts import module_loss


def main_loss(shown: Loss) -> np.floating[Any]:
    """The main loss of a step, in the run's dtype."""
    first: np.floating[Any] = np.asarray(shown).reshape(-1)[0]
    return first


def module_losses(shown: Loss) -> dict[str, np.floating[Any]]:
    """Those of modules by name: ``mtp.0`` and so on."""
    return {module_loss(number): loss for number, loss in enumerate(np.asarray(shown).reshape(-1)[1:])}


def module_losses_to_json(ours: Loss, reference: Loss, uncut: Loss) -> dict[str, Any]:
    """As the run report shows them beside the main loss; nothing where there are none."""
    sides = {"loss": ours, "reference_loss": reference, "uncut_loss": uncut}
    by_side: Mapping[str, Mapping[str, np.floating[Any]]] = {key: module_losses(side) for key, side in sides.items()}
    names = by_side["loss"]
    found = {name: {key: _number(by_side[key][name]) for key in by_side} for name in names}
    return {"mtp": found} if found else {}


def _number(loss: np.floating[Any]) -> float | None:
    """JSON has neither infinity nor NaN."""
    return float(loss) if np.isfinite(loss) else None
