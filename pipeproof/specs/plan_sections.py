"""All sections of a plan, without the checks across them; ``pipeproof.specs.checks`` reads this class."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import prod
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    Tag,
    WithJsonSchema,
)

from pipeproof.diagnostics.problems import KeyPath, Problem, describe_value, dotted, listed, problems_error
from pipeproof.foreign_text import MOST_RANKS
from pipeproof.specs.cost import CostSource, CostSpec, placeholder_note
from pipeproof.specs.custom_layers import CustomModelSpec, LayerEdgeSpec, ModuleSpec
from pipeproof.specs.memory import MemorySpec
from pipeproof.specs.model import ModelSpec
from pipeproof.specs.schedule import Half, ScheduleSpec
from pipeproof.specs.section import FROM_LIST, Section, int_only
from pipeproof.specs.transport import BoundarySpec, BuffersSpec, TransportSpec

UNIFORM = "uniform"
"""The method that gives each stage the same number of layers."""

BY_CLASS = "layer:"
"""The prefix of a pattern of class names; only matching layers are counted."""


def _validate_cut(value: object) -> tuple[tuple[str, ...], ...] | str:
    if isinstance(value, str):
        return _method(value)
    if not isinstance(value, list | tuple):
        raise problems_error([_not_a_cut("PP105", (), "a list of stages, `uniform` or `layer:REGEX`", value)])
    problems = []
    for stage, names in enumerate(value):
        if not isinstance(names, list | tuple):
            problems.append(_not_a_cut("PP105", (stage,), "a list of layers", names))
            continue
        for index, name in enumerate(names):
            if not isinstance(name, str):
                problems.append(_not_a_cut("PP105", (stage, index), "a string", name))
            elif not name:
                problems.append(_not_a_cut("PP106", (stage, index), "the name of a layer", name))
    if problems:
        raise problems_error(problems)
    return tuple(tuple(names) for names in value)


def _method(value: str) -> str:
    """Validate a method of partition: a string, as Fleet's ``seg_method``."""
    if value == UNIFORM:
        return value
    if not value.startswith(BY_CLASS):
        raise problems_error([_not_a_cut("PP106", (), "a list of stages, `uniform` or `layer:REGEX`", value)])
    pattern = value.removeprefix(BY_CLASS)
    fix = "write for example `layer:TransformerLayer|EmptyLayer`"
    if not pattern:
        message = "`stages: layer:` names no class of layers"
    elif ":" in pattern:
        message = f"the pattern of `stages` has a colon, and Fleet stops reading there: {describe_value(pattern)}"
        fix = "write a pattern without colons"
    else:
        try:
            re.compile(pattern)
        except re.error as error:
            message = f"the pattern of `stages` is not a regular expression: {error}"
        else:
            return value
    raise problems_error([Problem("PP106", (), message, help=fix)])


def _not_a_cut(code: str, path: KeyPath, expected: str, value: object) -> Problem:
    return Problem(code, path, f"`{dotted(('stages', *path))}` must be {expected}, found {describe_value(value)}")


def _to_json(value: tuple[tuple[str, ...], ...] | str) -> str | list[list[str]]:
    return value if isinstance(value, str) else [list(names) for names in value]


StageCut = Annotated[
    tuple[tuple[str, ...], ...] | str,
    PlainValidator(_validate_cut),
    PlainSerializer(_to_json, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "array", "items": {"type": "array", "items": {"type": "string", "minLength": 1}}},
                {"type": "string", "pattern": "^(uniform|layer:[^:]+)$"},
            ]
        }
    ),
]
"""The layers of each global stage by name, or Fleet's method: ``uniform``, or ``layer:`` and a pattern."""


AxisName = Literal["tp", "cp", "ep", "dp", "pp"]
"""An axis of the device mesh."""


class TopologySpec(Section):
    """The device mesh: the number of ranks along each axis, and the numbering of global ranks."""

    pp: int = Field(default=1, ge=1, le=2**16, description="Number of pipeline-parallel ranks.")
    tp: int = Field(default=1, ge=1, le=2**16, description="Number of tensor-parallel ranks.")
    dp: int = Field(default=1, ge=1, le=2**16, description="Number of data-parallel ranks.")
    cp: int = Field(
        default=1, ge=1, le=2**16, description="Number of context-parallel ranks, which share each sequence."
    )
    ep: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Number of expert-parallel ranks; each has its own micro-batches, as dp ranks have.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Whether activations between blocks are sharded along the sequence over the TP ranks "
        "(no effect with tp 1).",
    )
    experts_over_tp: bool = Field(
        default=False,
        description="Whether each TP rank has whole experts, a contiguous range, in place of a part of every expert "
        "(no effect with tp 1). Each TP rank has all tokens of the block, and no tokens are sent: it adds the results "
        "of its experts, and the sum over TP ranks that ends the block adds the ranks'.",
    )
    order: Annotated[tuple[AxisName, ...], FROM_LIST] = Field(
        default=("tp", "cp", "ep", "dp", "pp"),
        description="The five axes; the first changes fastest with the global rank.",
        json_schema_extra={"minItems": 5, "maxItems": 5, "uniqueItems": True},
    )

    def _problems(self) -> Iterable[Problem]:
        return [*_check_order(self)] or _check_num_ranks(self)

    @property
    def num_ranks(self) -> int:
        """Number of global ranks: the product of all axes."""
        return prod((self.pp, self.tp, self.dp, self.cp, self.ep))


def _check_order(topology: TopologySpec) -> Iterator[Problem]:
    """PP106: ``order`` names each of the five axes once."""
    axes = get_args(AxisName)
    if sorted(topology.order) == sorted(axes):
        return
    missing = [axis for axis in axes if axis not in topology.order]
    repeated = [axis for axis in axes if topology.order.count(axis) > 1]
    faults = [f"lacks {listed(missing, 'and')}"] if missing else []
    if repeated:
        faults.append(f"names {listed(repeated, 'and')} more than once")
    yield Problem(
        "PP106",
        ("order",),
        f"`topology.order` must name each axis once, and it {' and '.join(faults)}",
        help="the default is [tp, cp, ep, dp, pp]",
    )


def _check_num_ranks(topology: TopologySpec) -> Iterator[Problem]:
    """PP106: the product of the axes is within the limit."""
    if topology.num_ranks <= MOST_RANKS:
        return
    axes = {axis: getattr(topology, axis) for axis in get_args(AxisName)}
    largest = max(axes, key=lambda axis: axes[axis])
    yield Problem(
        "PP106",
        (largest,),
        f"`topology` has {topology.num_ranks:,} ranks, and a plan has at most {MOST_RANKS:,}",
        help=f"use a smaller `{largest}`: data-parallel ranks repeat each other, so fewer prove the same",
    )


_CODE = re.compile(r"PP[1-9][0-9]{2}", re.ASCII)


class LossSpec(Section):
    """Normalization of the reported loss and of its gradient."""

    normalization: Literal["global_tokens", "mean_of_micro_batches"] = Field(
        default="global_tokens",
        description="global_tokens: the sum of the token losses is divided by all counted tokens of the step; "
        "mean_of_micro_batches: the mean of the micro-batches' means.",
    )


class RunSpec(Section):
    """Execution of the plan."""

    backend: Literal["paddle", "torch"] = Field(
        default="paddle", description="The framework that computes and communicates."
    )
    device: Literal["cpu", "gpu"] = Field(
        default="cpu", description="The device that computes; on `gpu`, each rank has its own GPU."
    )
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = Field(
        default="float32", description="Type of weights and activations; 16-bit types are for torch."
    )
    main_grad_dtype: Literal["float32", "float64"] | None = Field(
        default=None,
        description="Type in which gradients of weights are accumulated and reduced, and of the main weights that the "
        "optimizer updates and from which weights of `dtype` are rounded. Not narrower than `dtype`. Default: `dtype`.",
    )
    steps: int = Field(default=2, ge=1, le=10**9, description="Number of optimizer steps.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of weights and tokens.")
    optimizer: Literal["sgd", "adamw"] = Field(default="adamw", description="The optimizer.")
    learning_rate: float = Field(default=0.01, gt=0, le=1e6, description="The constant learning rate.")
    clip_norm: float | None = Field(
        default=None,
        gt=0,
        le=1e12,
        description="Largest global norm of the gradients; larger gradients are scaled down to it before the "
        "optimizer's step. Without it, there is no clipping.",
    )
    replay: bool = Field(
        default=False,
        description="On GPUs, whether steps from the second on replay one CUDA graph of the whole step, communication "
        "included, without work of the host.",
    )
    deterministic: bool = Field(
        default=True,
        description="On GPUs, whether PyTorch uses only kernels that add in one order in every run. Otherwise "
        "attention on long sequences is faster, has other bits in every run, and gradients are compared within the "
        "bound.",
    )

    @property
    def weight_dtype(self) -> str:
        """Type of the weights that the optimizer updates, and of their gradients, in a run."""
        return self.main_grad_dtype or self.dtype


class SuppressSpec(Section):
    """A warning or note of ``check`` that is accepted for this plan.

    Errors cannot be suppressed.
    """

    code: str = Field(description="The full code of the finding.", json_schema_extra={"pattern": "^PP[1-9][0-9]{2}$"})
    reason: str = Field(
        description="Why the finding does no harm here; reports show it.",
        json_schema_extra={"pattern": "\\S"},
    )

    def _problems(self) -> Iterator[Problem]:
        """PP106: a full code, and a reason; ``check`` reports codes that do not exist."""
        if not _CODE.fullmatch(self.code):
            guess = self.code.strip().upper()
            message = f"`suppress` needs a full code such as PP202, found {describe_value(self.code)}"
            fix = f"write {guess}" if _CODE.fullmatch(guess) else "`pipeproof check` prints the code of each finding"
            yield Problem("PP106", ("code",), message, help=fix)
        if not self.reason.strip():
            message = "a suppression needs a reason, and this one is empty"
            yield Problem("PP106", ("reason",), message, help="write why the finding does no harm in this plan")


def _family(value: object) -> str:
    """The family of a model by its ``kind``; an unknown kind is validated, and reported, as a GPT."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return "layers" if kind == "layers" else "gpt"


AnyModel: TypeAlias = Annotated[
    Annotated[ModelSpec, Tag("gpt")] | Annotated[CustomModelSpec, Tag("layers")], Discriminator(_family)
]
"""The section ``model``: pydantic puts the tag behind ``model`` in the path of an error."""


class PlanSections(Section):
    """The sections of a plan, each valid by itself."""

    model_config = ConfigDict(defer_build=True)  # only the class that checks them is validated

    pipeproof: Annotated[Literal[1], BeforeValidator(int_only)] = Field(description="Version of the plan format.")
    model: AnyModel = Field(description="The network.")
    topology: TopologySpec = Field(description="The device mesh.")
    schedule: ScheduleSpec = Field(description="The pipeline schedule.")
    stages: StageCut | None = Field(
        default=None,
        description="Names of the layers of each global stage, or Fleet's method of partition: `uniform`, or `layer:` "
        "and a pattern of class names. Without it, an even partition.",
    )
    loss: LossSpec = Field(default_factory=LossSpec, description="The loss.")
    transport: TransportSpec = Field(default_factory=TransportSpec, description="Stage-to-stage communication.")
    boundaries: Annotated[tuple[BoundarySpec, ...], FROM_LIST] = Field(
        default=(), description="Tensors that cross stage boundaries in place of the model's activation."
    )
    edges: Annotated[tuple[LayerEdgeSpec, ...], FROM_LIST] = Field(
        default=(),
        description="Tensors that a custom layer passes to layers after the next one.",
    )
    modules: Annotated[tuple[ModuleSpec, ...], FROM_LIST] = Field(
        default=(),
        description="Parts of a model of custom layers that have pipeline ranks of their own, in the order of their "
        "stages. `topology.pp` is the number of all their ranks: first the ranks of the first module's first replica.",
    )
    buffers: BuffersSpec = Field(default_factory=BuffersSpec, description="Memory of messages.")
    cost: CostSpec = Field(default_factory=CostSpec, description="Times for the simulator.")
    memory: MemorySpec = Field(default_factory=MemorySpec, description="Memory that is kept, and the budget.")
    run: RunSpec = Field(default_factory=RunSpec, description="Execution.")
    suppress: Annotated[tuple[SuppressSpec, ...], FROM_LIST] = Field(
        default=(), description="Warnings and notes of `check` that are known and accepted."
    )

    @property
    def gpt(self) -> ModelSpec:
        """The model of a plan that must have a GPT.

        Raises:
            TypeError: it is a sequence of custom layers.
        """
        if isinstance(self.model, CustomModelSpec):
            raise TypeError("the model is a sequence of custom layers, and a GPT is needed here")
        return self.model

    @property
    def custom(self) -> CustomModelSpec:
        """The model of a plan that must have custom layers.

        Raises:
            TypeError: it is a GPT.
        """
        if not isinstance(self.model, CustomModelSpec):
            raise TypeError("the model is a GPT, and custom layers are needed here")
        return self.model

    @property
    def is_custom(self) -> bool:
        """True if the model is a sequence of custom layers."""
        return isinstance(self.model, CustomModelSpec)

    @property
    def has_layer_times(self) -> bool:
        """True if the times of a stage are sums over its custom layers: they have times, and ``cost`` has none."""
        return self.is_custom and not self.cost.has_times and any(layer.times for layer in self.custom.layers)

    @property
    def cost_source(self) -> CostSource:
        """Origin of the times of computations."""
        return "given" if self.has_layer_times else self.cost.source

    @property
    def placeholder_note(self) -> str:
        """A sentence for outputs about times that the plan leaves out; empty if there are none."""
        return "" if self.has_layer_times else placeholder_note(self.cost.given)

    @property
    def alternation(self) -> tuple[Half, ...] | None:
        """The cycle of halves of overlapped pairs; None if pairs are whole in the graph, as for custom layers."""
        return None if self.is_custom else self.schedule.alternation

    @property
    def gradient_dtype(self) -> str:
        """Type in which gradients of weights are accumulated, for figures of memory and time."""
        return self.run.main_grad_dtype or self.memory.gradient_dtype or "float32"

    @property
    def num_stages(self) -> int:
        """Number of stages over all pipeline ranks."""
        if self.modules:
            return self.modules[-1].stages[1] + 1
        placement = self.schedule.placement
        if isinstance(placement, tuple):
            return len({stage for stages in placement for stage in stages})
        return self.topology.pp * self.schedule.num_chunks

    @property
    def num_replicas(self) -> tuple[int, ...]:
        """By stage, the replicas of its module that share the micro-batches; empty without modules."""
        return tuple(module.dp for module in self.modules for _ in range(module.num_stages))

    @property
    def frozen_stages(self) -> frozenset[int]:
        """The stages whose weights are not trained."""
        return frozenset(
            stage for module in self.modules if module.frozen for stage in range(module.stages[0], module.stages[1] + 1)
        )

    @property
    def first_trained(self) -> int:
        """The first stage that has a backward: frozen stages before it have none."""
        frozen = self.frozen_stages
        return next((stage for stage in range(self.num_stages) if stage not in frozen), self.num_stages)

    @property
    def sequence_lengths(self) -> dict[KeyPath, int]:
        """All sequence lengths of a GPT by key: the model's, and the micro-batches'."""
        lengths: dict[KeyPath, int] = {("model", "seq_length"): self.gpt.seq_length}
        for index, length in enumerate(self.schedule.seq_lengths or ()):
            lengths["schedule", "seq_lengths", index] = length
        return lengths
