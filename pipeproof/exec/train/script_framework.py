"""The executor's ``Framework`` for a script's own modules: the script has the optimizer, the plan the order."""

# ruff: noqa: D102 - `Framework`, `Stages` and `Optimizer` document the methods
from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.rank.framework_protocol import Array, Arrays, RankStage, StageCollectives, Tensor, Weight
from pipeproof.specs.plan_sections import RunSpec

Stage = TypeVar("Stage", bound=RankStage)


class ScriptsOptimizer:
    """An ``Optimizer`` that does nothing: the executor's step ends before the script's optimizer."""

    def zero_grad(self) -> None:
        """Do nothing: gradients are the script's to reset, so that it may accumulate over steps."""

    def step(self) -> None:
        """Do nothing: the script's optimizer steps after the pipeline."""

    def state(self) -> dict[tuple[str, str], Tensor]:
        return {}

    def restore_state(self, weights: Mapping[str, Tensor], slots: Mapping[tuple[str, str], Tensor]) -> None:
        """Do nothing: the script loads its optimizer."""


class ScriptFramework(Generic[Stage]):
    """The modules of one rank; with the framework's gradients a ``Framework`` and its ``Stages``."""

    def __init__(self, arrays: Arrays, stages: Mapping[int, Stage]) -> None:
        self.arrays, self._stages = arrays, stages

    def stages(
        self, plan: LoweredPlan, coords: Mapping[str, int], collectives: StageCollectives
    ) -> ScriptFramework[Stage]:
        return self

    def make(self, number: int, lent: Mapping[str, Weight]) -> Stage:
        return self._stages[number]

    def routers(self, stage: Stage) -> None:
        return None

    def load(self, step: int) -> None:
        """Do nothing: the script passes the data."""

    def optimizer(self, run: RunSpec, weights: Mapping[str, Weight]) -> ScriptsOptimizer:
        return ScriptsOptimizer()

    def value(self, weight: Weight) -> Array:
        return self.arrays.to_numpy(weight)
