"""Losses of a step: the main loss, the losses of multi-token prediction, and the check that all values are finite.

With modules of multi-token prediction, stages and references return one vector of all losses, each scaled like the main
loss and without its weight; otherwise a scalar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeproof.diagnostics.finding import OpsWitness, PipeproofError, WitnessOp
from pipeproof.exec.rank.failures import received_before
from pipeproof.exec.rank.job_files import Loss, StepOutcome
from pipeproof.exec.store.run_codes import NOT_FINITE
from pipeproof.schedule.op_table import OpGraph
from pipeproof.stages.describe.mtp_streams import mtp_loss_name


def main_loss(losses: Loss) -> np.floating[Any]:
    """Main loss of a step, in the run's dtype."""
    first: np.floating[Any] = np.asarray(losses).reshape(-1)[0]
    return first


def module_losses(losses: Loss) -> dict[str, np.floating[Any]]:
    """Losses of the modules of multi-token prediction by name: ``mtp.0`` and so on."""
    return {mtp_loss_name(number): loss for number, loss in enumerate(np.asarray(losses).reshape(-1)[1:])}


def module_losses_to_json(run: Loss, reference: Loss, unpartitioned: Loss) -> dict[str, Any]:
    """Return the losses of modules in the form of the run report, next to the main loss; empty without modules."""
    sides = {"loss": run, "reference_loss": reference, "uncut_loss": unpartitioned}
    by_side: Mapping[str, Mapping[str, np.floating[Any]]] = {key: module_losses(side) for key, side in sides.items()}
    modules = {name: {key: json_number(by_side[key][name]) for key in by_side} for name in by_side["loss"]}
    return {"mtp": modules} if modules else {}


def json_number(value: np.floating[Any] | np.ndarray | None) -> float | None:
    """Return a value as a number of JSON, which has neither infinity nor NaN."""
    return float(value) if value is not None and np.isfinite(value) else None


_SHOWN_NAMES = 3


class NotFiniteError(PipeproofError):
    """A loss or a gradient of a step is not finite; everything was stopped."""


def is_finite(array: np.ndarray | Loss) -> bool:
    """Return True if an array has neither NaN nor infinity."""
    return bool(np.isfinite(array).all())


def require_finite(graph: OpGraph, step: int, ranks: Sequence[StepOutcome], reference: StepOutcome) -> None:
    """Refuse to continue training with a loss or gradient of a rank that is not finite.

    ``reference`` is the step of the unpartitioned model.

    Raises:
        NotFiniteError: a loss or a gradient of a rank is NaN or infinite.
    """
    first_ops = {rank: own.not_finite for rank, own in enumerate(ranks) if own.not_finite}
    gradients = {
        rank: of_rank
        for rank, own in enumerate(ranks)
        if (of_rank := [name for name, array in own.gradients.items() if not is_finite(array)])
    }
    if not first_ops and not gradients:
        return
    clauses, witness = [], None
    if first_ops:
        rank = min(first_ops)
        op_id = next(i for i in graph.rank_ops(rank) if str(graph.ops[i]) == first_ops[rank])
        witness = OpsWitness((WitnessOp(rank, first_ops[rank], op_id),))
        loss = ranks[rank].loss
        value = "not a number" if loss is None or np.isnan(loss).any() else "infinite"
        clauses.append(
            f"the loss is {value}, on rank {rank} first at {first_ops[rank]}; {received_before(graph, op_id)}"
        )
    else:
        clauses.append("every loss is finite")
    if names := list(dict.fromkeys(name for of_rank in gradients.values() for name in of_rank)):
        num_gradients = len({name for own in ranks for name in own.gradients})
        on_ranks = ", ".join(map(str, gradients))
        clauses.append(
            f"gradients that are not finite: {len(names)} of {num_gradients}, on ranks {on_ranks}, {_listed(names)}"
        )
    assert reference.loss is not None
    if is_finite(reference.loss) and all(map(is_finite, reference.gradients.values())):
        clauses.append("the reference's loss and gradients are all finite")
        fix = "only the plan's run has this: look at the operation and its input (`--record-layers`)"
    else:
        clauses.append("the reference has values that are not finite too")
        fix = "the model diverges with any plan: try a smaller run.learning_rate, run.clip_norm or a wider run.dtype"
    raise NotFiniteError(NOT_FINITE.finding(f"step {step}: {'; '.join(clauses)}", help=fix, witness=witness))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN_NAMES]) + (", .." if len(names) > _SHOWN_NAMES else "")
