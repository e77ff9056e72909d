"""Losses and gradients that are no numbers: where they came up first, and whether the reference has them, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from pipeproof.exec.codes import NOT_FINITE
from pipeproof.exec.failures import received_before
from pipeproof.exec.jobs import Loss
from pipeproof.schedule.optable import OpGraph
from pipeproof.specs.finding import Finding, OpsWitness, PipeproofError, Severity, WitnessOp

_SHOWN = 3


class NotFiniteError(PipeproofError):
    """A step came to a loss or a gradient that is no number; everything was stopped."""


def is_finite(array: np.ndarray | Loss) -> bool:
    """Whether there is neither NaN nor infinity in it."""
    return bool(np.isfinite(array).all())


def require_finite(
    graph: OpGraph,
    step: int,
    ranks: Sequence[tuple[Loss | None, Mapping[str, np.ndarray]]],
    first_ops: Sequence[str],
    reference: tuple[Loss, Mapping[str, np.ndarray]],
) -> None:
    """Refuse to train on with what is no number.

    ``first_ops`` has for each rank the operation whose loss was the first that is no number, or nothing.

    Raises:
        NotFiniteError: a loss or a gradient of a rank is NaN or infinite.
    """
    losses = [(rank, op) for rank, op in enumerate(first_ops) if op]
    weights = [(rank, name) for rank, (_, own) in enumerate(ranks) for name in own if not is_finite(own[name])]
    if not losses and not weights:
        return
    parts, witness = [], None
    if losses:
        rank, text = losses[0]
        op_id = next(i for i in graph.rank_ops(rank) if str(graph.ops[i]) == text)
        witness = OpsWitness((WitnessOp(rank, text, op_id),))
        loss = ranks[rank][0]
        shown = "not a number" if loss is None or np.isnan(loss).any() else "infinite"
        parts.append(f"the loss is {shown}, on rank {rank} first at {text}; {received_before(graph, op_id)}")
    else:
        parts.append("every loss is finite")
    names = list(dict.fromkeys(name for _, name in weights))
    if names:
        total = len({name for _, own in ranks for name in own})
        on_ranks = ", ".join(map(str, sorted({rank for rank, _ in weights})))
        parts.append(f"gradients that are not finite: {len(names)} of {total}, on ranks {on_ranks}, {_listed(names)}")
    theirs = is_finite(reference[0]) and all(map(is_finite, reference[1].values()))
    if theirs:
        parts.append("the reference's loss and gradients are all finite")
        mend = "the plan's run alone has it: look at the operation, and at what it received (`--record-layers`)"
    else:
        parts.append("the reference has such ones, too")
        mend = "the model diverges, however it is cut: a smaller run.learning_rate, run.clip_norm or a wider run.dtype"
    raise NotFiniteError(
        Finding(NOT_FINITE.code, Severity.ERROR, f"step {step}: {'; '.join(parts)}", help=mend, witness=witness)
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", .." if len(names) > _SHOWN else "")
