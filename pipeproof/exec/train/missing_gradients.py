"""Outputs of stages that a micro-batch did not use: they get no gradient, as in the unpartitioned model.

A message has zeros in place of such a gradient, and zeros are not the same: a weight behind them would get a gradient,
which optimizers take as one, and 0 times infinity is NaN. So the stage that received the output reports it to the stage
that made it. On one rank this is a value in memory. Between ranks it goes through the store, in the first step for all
stages, and from then on for those that had such an output in the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeproof.exec.store.agreement import Agreement
from pipeproof.exec.store.train_errors import PipelineError


class MissingGradients:
    """The inputs of stages that got no gradient. ``owner`` has the rank of each stage and micro-batch of the step."""

    def __init__(self, agreement: Agreement, owner: Any) -> None:
        self._agreement, self.owner = agreement, owner
        self._own: dict[tuple[int, int], list[int]] = {}
        self._seen: set[int] = set()
        self._exchanged: frozenset[int] | None = None
        """Stages whose inputs may have none; None in the first step."""

    @property
    def is_first_step(self) -> bool:
        """True until ``end_first_step``."""
        return self._exchanged is None

    def put(self, stage: int, index: int, inputs: list[int]) -> None:
        """Note which inputs of a stage got no gradient in a micro-batch.

        Raises:
            PipelineError: one got none, and all did in the first step: the stage before does not ask.
        """
        if self._is_own(stage - 1, index):
            self._own[stage, index] = inputs
        elif self._is_exchanged(stage):
            self._agreement.publish(_key(stage, index), inputs)
        elif inputs:
            raise PipelineError(
                f"stage {stage}, micro-batch {index} does not use output {inputs[0]} of stage {stage - 1}, which all "
                "micro-batches of the first step used: let the stage use it in every step, such as by adding "
                "0 * x.sum() to what it returns"
            )
        if inputs:
            self._seen.add(stage)

    def take(self, stage: int, index: int) -> Sequence[int]:
        """The inputs of a stage, which are outputs of the stage before, that got no gradient in a micro-batch."""
        if self._is_own(stage, index):
            return self._own.pop((stage, index), ())
        if not self._is_exchanged(stage):
            return ()
        inputs: list[int] = self._agreement.take(_key(stage, index), f"stage {stage} has sent no gradient")
        return inputs

    def end_first_step(self, seen: Sequence[Sequence[int]]) -> None:
        """End the first step; ``seen`` are the ``unused`` of all ranks."""
        self._exchanged = frozenset(stage for own in seen for stage in own)

    @property
    def unused(self) -> list[int]:
        """Stages of this rank that did not use an input in some micro-batch."""
        return sorted(self._seen)

    def _is_own(self, stage: int, index: int) -> bool:
        return int(self.owner[stage, index]) == self._agreement.rank

    def _is_exchanged(self, stage: int) -> bool:
        return self._exchanged is None or stage in self._exchanged


def _key(stage: int, index: int) -> str:
    return f"unused/{stage}/{index}"
