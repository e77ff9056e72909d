"""The plan that a person writes: every key with its type, bounds, default and meaning.

Values are strict: a quoted number is not a number and ``true`` is not 1. A
spec is frozen and holds together: sizes that must divide each other do, and
lists have the length that the topology asks for. Use
``pipeproof.specs.load`` to read one from a file or a dict with findings in
place of pydantic's errors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from pipeproof.specs.boundary_checks import check_boundaries
from pipeproof.specs.checks import check_analytic, check_lengths, check_splits, check_suppression
from pipeproof.specs.cost import CostSpec
from pipeproof.specs.cut import StageCut, check_cut
from pipeproof.specs.main_grad import check_main_grad
from pipeproof.specs.memory import MemorySpec
from pipeproof.specs.model import ModelSpec
from pipeproof.specs.model_checks import check_expert_parallel, check_tensor_parallel
from pipeproof.specs.mtp import check_mtp
from pipeproof.specs.network import check_network
from pipeproof.specs.own_checks import check_own_layers
from pipeproof.specs.own_layers import LayersSpec
from pipeproof.specs.run_checks import check_run
from pipeproof.specs.schedule import ScheduleSpec
from pipeproof.specs.schedule_checks import check_placed_ranks
from pipeproof.specs.section import FROM_LIST, Section, int_only, refuse
from pipeproof.specs.topology import TopologySpec
from pipeproof.specs.transport import BoundarySpec, BuffersSpec, TransportSpec


class LossSpec(Section):
    """What the reported loss and its gradient mean."""

    normalization: Literal["global_tokens", "mean_of_micro_batches"] = Field(
        default="global_tokens",
        description="Divide summed token losses by all counted tokens of the step, "
        "or take the mean of the micro-batches' means.",
    )


class RunSpec(Section):
    """How the plan is executed."""

    backend: Literal["paddle", "torch"] = Field(
        default="paddle", description="The framework that computes and communicates."
    )
    device: Literal["cpu", "gpu"] = Field(
        default="cpu", description="Where it computes; on `gpu` each rank on a GPU of its own."
    )
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = Field(
        default="float32", description="Type of weights and activations; 16 bits are for torch."
    )
    main_grad_dtype: Literal["float32", "float64"] | None = Field(
        default=None,
        description="Type in which gradients of weights add up and are reduced, and of the weights that the optimizer "
        "updates, from which those of the dtype are rounded; not narrower. Without it, the dtype.",
    )
    steps: int = Field(default=2, ge=1, le=10**9, description="Number of optimizer steps.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of weights and tokens.")
    optimizer: Literal["sgd", "adamw"] = Field(default="adamw", description="The optimizer.")
    learning_rate: float = Field(default=0.01, gt=0, le=1e6, description="The constant learning rate.")
    clip_norm: float | None = Field(
        default=None,
        gt=0,
        le=1e12,
        description="Largest norm of all gradients together; above it they are scaled down to it before the optimizer. "
        "Without it, they are not.",
    )
    replay: bool = Field(
        default=False,
        description="On GPUs, whether steps from the second on replay one CUDA graph of the whole step, communication "
        "included, which leaves the host no work in them.",
    )

    @property
    def weight_dtype(self) -> str:
        """Type of the weights that the optimizer updates, and of their gradients, in a run."""
        return self.main_grad_dtype or self.dtype


class SuppressSpec(Section):
    """A warning or note that ``check`` brings about this plan and that is known to be right.

    Errors cannot be suppressed.
    """

    code: str = Field(description="The whole code of the finding.", json_schema_extra={"pattern": "^PP[1-9][0-9]{2}$"})
    reason: str = Field(
        description="Why the finding does no harm here; readers of reports see it.",
        json_schema_extra={"pattern": "\\S"},
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        refuse(check_suppression(self))
        return self


def _family(value: object) -> str:
    """Which kind of model a mapping is meant to be; whatever is wrong with it is said of a GPT."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return "layers" if kind == "layers" else "gpt"


AnyModel: TypeAlias = Annotated[
    Annotated[ModelSpec, Tag("gpt")] | Annotated[LayersSpec, Tag("layers")], Discriminator(_family)
]
"""The section ``model``: errors of its keys have the tag in their path, behind ``model``."""


class PlanSpec(Section):
    """A whole plan."""

    pipeproof: Annotated[Literal[1], BeforeValidator(int_only)] = Field(description="Version of the plan format.")
    if TYPE_CHECKING:
        model: ModelSpec
        """The GPT; code that own layers may reach as well asks for ``own_layers`` first."""
    else:
        model: AnyModel = Field(description="The network.")
    topology: TopologySpec = Field(description="The device mesh.")
    schedule: ScheduleSpec = Field(description="The pipeline schedule.")
    stages: StageCut | None = Field(
        default=None,
        description="Names of the layers of each global stage, or Fleet's way to cut: `uniform`, or `layer:` and a "
        "pattern of class names. Without it, an even cut.",
    )
    loss: LossSpec = Field(default_factory=LossSpec, description="The loss.")
    transport: TransportSpec = Field(default_factory=TransportSpec, description="Stage-to-stage communication.")
    boundaries: Annotated[tuple[BoundarySpec, ...], FROM_LIST] = Field(
        default=(), description="Tensors that cross stage boundaries, where others than the model's activation do."
    )
    buffers: BuffersSpec = Field(default_factory=BuffersSpec, description="Memory of messages.")
    cost: CostSpec = Field(default_factory=CostSpec, description="Times for the simulator.")
    memory: MemorySpec = Field(default_factory=MemorySpec, description="What is held, and how much room there is.")
    run: RunSpec = Field(default_factory=RunSpec, description="Execution.")
    suppress: Annotated[tuple[SuppressSpec, ...], FROM_LIST] = Field(
        default=(), description="Warnings and notes of `check` that are known and wanted."
    )

    @property
    def own_layers(self) -> LayersSpec | None:
        """The model, where it is a sequence of own layers; None for a GPT."""
        model: ModelSpec | LayersSpec = self.model
        return model if isinstance(model, LayersSpec) else None

    @property
    def gradient_dtype(self) -> str:
        """Type in which gradients of weights add up, for figures of memory and time."""
        return self.run.main_grad_dtype or self.memory.gradient_dtype or "float32"

    @property
    def num_stages(self) -> int:
        """Number of stages over all pipeline ranks."""
        placement = self.schedule.placement
        if isinstance(placement, tuple):
            return len({stage for stages in placement for stage in stages})
        return self.topology.pp * self.schedule.num_chunks

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if self.own_layers is not None:
            refuse(
                [
                    *check_own_layers(self, self.own_layers),
                    *check_placed_ranks(self),
                    *check_lengths(self),
                    *check_network(self),
                    *check_run(self),
                ]
            )
            return self
        refuse(
            [
                *check_tensor_parallel(self.model, self.topology),
                *check_expert_parallel(self),
                *check_mtp(self),
                *check_placed_ranks(self),
                *check_lengths(self),
                *check_cut(self),
                *check_splits(self),
                *check_analytic(self),
                *check_network(self),
                *check_boundaries(self),
                *check_main_grad(self),
                *check_run(self),
            ]
        )
        return self
