"""The executor's ``Framework`` for a script's own modules: the script has the optimizer, the plan the order."""

# ruff: noqa: D102 - `Framework`, `Stages` and `Optimizer` document the methods
from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.exec.rank.framework_protocol import Array, Arrays, RankStage, StageCollectives, Tensor, Weight
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.stage_boundaries import Boundaries, Form, LeafSpec, dtype_name
from pipeproof.specs.plan_sections import RunSpec

Stage = TypeVar("Stage", bound=RankStage)


class ScriptsOptimizer:
    """An ``Optimizer`` that does nothing: the executor's step ends before the script's optimizer."""

    def zero_grad(self) -> None:
        """Do nothing: the script resets gradients, and may accumulate over steps."""

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


@dataclass(frozen=True, slots=True)
class StageErrors:
    """Errors of one stage, with the framework's word for a ``part`` (module), its type and the parts' names.

    ``library`` is the framework's directory in names of files.
    """

    number: int
    part: str
    part_type: type
    named_parts: Callable[[], Iterable[tuple[str, Any]]]
    library: str

    def where(self, index: int) -> str:
        """The stage and the micro-batch."""
        return f"stage {self.number}, micro-batch {index}"

    def require_boundary(
        self, boundaries: Boundaries, form: Form, leaves: Sequence[Any], index: int, shape_fix: str
    ) -> None:
        """Refuse an output that does not fit the boundary after the stage: the next rank waits for one that fits.

        Raises:
            PipelineError: another form, shape or type; ``shape_fix`` is the next step for the last two.
        """
        expected = boundaries.outputs_of(index)
        if form != boundaries.output_form or len(leaves) != len(expected):
            raise PipelineError(
                f"{self.where(index)} returns a {form.kind} of {len(leaves)}, and the boundary after it is a "
                f"{boundaries.output_form.kind} of {len(expected)}"
            )
        for position, (leaf, spec) in enumerate(zip(leaves, expected, strict=True)):
            if tuple(leaf.shape) != spec.shape or dtype_name(leaf.dtype) != spec.dtype:
                actual = LeafSpec.of(leaf, has_gradient=spec.has_gradient)
                raise PipelineError(
                    f"{self.where(index)} returns {actual} as output {position}, and the boundary after it has "
                    f"{spec}: {shape_fix}"
                )

    def raised(self, error: Exception, index: int, action: str = "", fix: str = "") -> PipelineError:
        """The error: stage, micro-batch, the innermost module that raised (else the ``action``), and a fix."""
        path = self._path_of(error)
        what = f"{self.part} `{path}`" if path else action or f"the {self.part}"
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if self.library not in frame.filename]
        line = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        text = f"{self.where(index)}: {what} raised {type(error).__name__}: {str(error).strip()}{line}"
        return PipelineError(f"{text}: {fix}" if fix else text)

    def _path_of(self, error: BaseException) -> str:
        """Name of the innermost module whose method is in the traceback of an error."""
        names = {id(part): name for name, part in self.named_parts()}
        path, frame = "", error.__traceback__
        while frame is not None:
            owner = frame.tb_frame.f_locals.get("self")
            if isinstance(owner, self.part_type):
                path = names.get(id(owner), path)
            frame = frame.tb_next
        return path
