"""The plan that a person writes: every key with its type, bounds, default and meaning.

Values are strict: a quoted number is not a number and ``true`` is not 1. A
spec is frozen and holds together: sizes that must divide each other do, and
lists have the length that the topology asks for. Use
``pipeproof.specs.load`` to read one from a file or a dict with findings in
place of pydantic's errors.
"""

from __future__ import annotations

from fractions import Fraction
from math import prod
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticKnownError

from pipeproof.specs.analytic import AnalyticSpec
from pipeproof.specs.boundary_checks import check_boundaries, check_boundary
from pipeproof.specs.checks import (
    check_analytic,
    check_cost,
    check_lengths,
    check_order,
    check_splits,
    check_suppression,
)
from pipeproof.specs.memory import MemorySpec
from pipeproof.specs.model_checks import check_expert_parallel, check_model, check_tensor_parallel
from pipeproof.specs.model_parts import MlaSpec, MoeSpec
from pipeproof.specs.network import NetworkSpec, check_network
from pipeproof.specs.problems import Problem, describe_value, nearest_name, problems_error
from pipeproof.specs.profile import ProfilePath
from pipeproof.specs.receives import RecvPost, Slowdown
from pipeproof.specs.schedule_checks import StagePlacement, check_own_schedule, check_placed_ranks, check_placement
from pipeproof.specs.times import PositiveTimeByStage, StageTimes, Time, TimeByStage

ScheduleName = Literal[
    "gpipe", "1f1b", "eager_1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "interleaved_zb", "zb_v", "v_half",
    "v_min", "dualpipe", "dualpipe_v", "chimera", "seq1f1b", "optimal", "custom", "file",
]  # fmt: skip
"""A kind of schedule; ``pipeproof.schedule.kinds`` says what each is."""

AxisName = Literal["tp", "cp", "ep", "dp", "pp"]
"""An axis of the device mesh."""

TransportName = Literal["full", "partial"]
"""How a tensor crosses a stage boundary; ``pipeproof.comm.transport`` says what each does."""

_DEFAULT_BACKWARD_US = Fraction(200)


def _tuple_of_list(value: object) -> object:
    """Files have lists where a frozen spec has tuples; nothing else is converted."""
    return tuple(value) if isinstance(value, list) else value


_FROM_LIST = BeforeValidator(_tuple_of_list)


def _int_only(value: object) -> object:
    """``Literal[1]`` alone would accept ``true`` and 1.0, which equal 1."""
    if type(value) is not int:
        raise PydanticKnownError("int_type")
    return value


def _refuse(problems: list[Problem]) -> None:
    if problems:
        raise problems_error(problems)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelSpec(_Section):
    """The network: a GPT of pre-norm blocks with rotary attention and a SwiGLU MLP, or experts in its place."""

    kind: Literal["gpt"] = Field(description="The family of the model.")
    num_layers: int = Field(ge=1, le=100_000, description="Number of transformer blocks.")
    hidden_size: int = Field(ge=2, le=2**20, description="Size of a token's activation between blocks.")
    num_heads: int = Field(
        ge=1,
        le=2**16,
        description="Number of attention heads; divides hidden_size, unless the size of a head is given.",
    )
    num_kv_heads: int | None = Field(
        default=None,
        ge=1,
        le=2**16,
        description="Heads of keys and values, each for a group of attention heads (arXiv:2305.13245); divides "
        "num_heads. Without it, as many as num_heads.",
    )
    head_size: int | None = Field(
        default=None, ge=2, le=2**16, description="Size of a head; without it, hidden_size / num_heads."
    )
    ffn_size: int = Field(ge=1, le=2**24, description="Inner size of the MLP.")
    vocab_size: int = Field(ge=2, le=2**26, description="Number of distinct tokens.")
    seq_length: int = Field(ge=1, le=2**26, description="Tokens per sequence.")
    activation_order: Literal["sbh", "bsh"] = Field(
        default="sbh",
        description="Dim order of the tensor between stages: s(equence), b(atch), h(idden).",
    )
    tied_embedding: bool = Field(
        default=False, description="Whether the head multiplies by the transpose of the embedding's weight."
    )
    moe: MoeSpec | None = Field(default=None, description="Experts in place of the MLP of most blocks.")
    mla: MlaSpec | None = Field(
        default=None, description="Latent attention; its head sizes take the place of num_kv_heads and head_size."
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        _refuse(check_model(self))
        return self

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def size_of_head(self) -> int:
        """Elements of a head's query, of its key and of its value, where attention is not latent."""
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size

    @property
    def rotary_size(self) -> int:
        """Elements of a head that rotary positions turn."""
        return self.size_of_head if self.mla is None else self.mla.rope_head_size

    def has_experts(self, block: int) -> bool:
        """Whether the block of that number has experts in place of the MLP."""
        return self.moe is not None and block >= self.moe.dense_layers


class TopologySpec(_Section):
    """The device mesh: how many ranks along each axis, and how global ranks are numbered."""

    pp: int = Field(default=1, ge=1, le=2**16, description="Pipeline-parallel ranks.")
    tp: int = Field(default=1, ge=1, le=2**16, description="Tensor-parallel ranks.")
    dp: int = Field(default=1, ge=1, le=2**16, description="Data-parallel ranks.")
    cp: int = Field(default=1, ge=1, le=2**16, description="Context-parallel ranks, which share each sequence.")
    ep: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Expert-parallel ranks; each has micro-batches of its own, as dp ranks do.",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Whether activations between blocks are cut along the sequence over the TP ranks "
        "(no effect with tp 1).",
    )
    order: Annotated[tuple[AxisName, ...], _FROM_LIST] = Field(
        default=("tp", "cp", "ep", "dp", "pp"),
        description="The five axes; the first changes fastest with the global rank.",
        json_schema_extra={"minItems": 5, "maxItems": 5, "uniqueItems": True},
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        _refuse(check_order(self))
        return self

    @property
    def num_ranks(self) -> int:
        """Number of global ranks: the product of all axes."""
        return prod((self.pp, self.tp, self.dp, self.cp, self.ep))


class ScheduleSpec(_Section):
    """The order in which each pipeline rank works on its micro-batches."""

    kind: ScheduleName = Field(
        description="Which schedule; `pipeproof schedule list` says what each is. file: read from path; custom: as "
        "programs give it."
    )
    variant: Literal["torch", "megatron", "fleet", "fleet_fthenb", "fleet_balanced"] | None = Field(
        default=None,
        description="Whose order, where tools differ; without it, that of the backend's own tool.",
    )
    path: str | None = Field(
        default=None,
        description="With kind file, the file of the schedule, relative to the plan file.",
        json_schema_extra={"minLength": 1},
    )
    format: Literal["auto", "text", "csv", "csv-comms", "fleet"] = Field(
        default="auto",
        description="Of the file: our text form, PyTorch's CSV without or with communication, or the strings of "
        "Fleet's static scheduler; auto looks at it.",
    )
    programs: Annotated[tuple[Annotated[tuple[str, ...], _FROM_LIST], ...], _FROM_LIST] | None = Field(
        default=None, description="With kind custom, the operations of each pipeline rank in order, such as 0F0."
    )
    num_micro_batches: int = Field(ge=1, le=10**6, description="Micro-batches per step and data-parallel rank.")
    micro_batch_size: int = Field(ge=1, le=10**6, description="Sequences in a micro-batch.")
    last_micro_batch_size: int | None = Field(
        default=None, ge=1, le=10**6, description="Sequences in the last micro-batch, where it has fewer."
    )
    seq_lengths: Annotated[tuple[Annotated[int, Field(ge=1, le=2**26)], ...], _FROM_LIST] | None = Field(
        default=None, description="Tokens per sequence of each micro-batch, where they differ."
    )
    num_chunks: int = Field(
        default=1, ge=1, le=2**16, description="Stages per pipeline rank, as many as the schedule takes."
    )
    micro_batch_group_size: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="With variant megatron, micro-batches that go through a chunk at a time; without it, as many as "
        "there are pipeline ranks.",
    )
    num_sequence_splits: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Equal pieces into which each sequence is cut; more than 1 with seq1f1b, file and custom.",
    )
    memory_limit: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Most chunk activations of one micro-batch that a rank may hold, from F to the end of W. With kind "
        "optimal; `advise` keeps to it too.",
    )
    placement: StagePlacement | None = Field(
        default=None,
        description="How stages are dealt to ranks: loop, v (there and back), or the stages of each pipeline rank; a "
        "stage listed on several ranks has a copy on each. Without it, as the schedule needs, and with kinds file and "
        "custom as they compute them.",
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        _refuse([*check_own_schedule(self), *check_placement(self)])
        return self


class LossSpec(_Section):
    """What the reported loss and its gradient mean."""

    normalization: Literal["global_tokens", "mean_of_micro_batches"] = Field(
        default="global_tokens",
        description="Divide summed token losses by all counted tokens of the step, "
        "or take the mean of the micro-batches' means.",
    )


class TransportSpec(_Section):
    """How tensors cross stage boundaries. The plain string ``full`` or ``partial`` sets both directions."""

    forward: TransportName = Field(default="full", description="Transport of activations.")
    backward: TransportName = Field(default="full", description="Transport of activation gradients.")
    connections: Literal["warm", "lazy"] = Field(
        default="warm",
        description="warm: connections are opened before the first step; lazy: at first use, which the deadlock "
        "rules then take into account (runs open them before in either case).",
    )
    recv_post: RecvPost = Field(
        default="just_in_time",
        description="When receives are posted: just before what needs them; one computation earlier, where the order "
        "of sends allows it; or as_sent, in the order in which messages are sent.",
    )
    queue: Literal["device", "rank", "direction", "communicator", "pair", "directed_edge"] | None = Field(
        default=None,
        description="Which transfers of a rank share one FIFO, where a stricter runtime than run.backend is to execute "
        "the plan: pair is what PyTorch's unbatched transfers have on NCCL.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_plain_string(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        names = ("full", "partial")
        if value not in names:
            near = nearest_name(value, names)
            raise problems_error(
                [
                    Problem(
                        "PP106",
                        (),
                        f"`transport` must be full or partial, found {describe_value(value)}",
                        help=f"did you mean `{near}`?" if near else None,
                    )
                ]
            )
        return {"forward": value, "backward": value}

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of the mapping, or the plain string."""
        mapping = handler.resolve_ref_schema(handler(schema))
        description = mapping.pop("description")
        return {
            "title": mapping.pop("title"),
            "description": description,
            "anyOf": [{"type": "string", "enum": ["full", "partial"]}, mapping],
        }


class BoundarySpec(_Section):
    """A tensor that crosses from one stage to the next. Without any, the model's activation crosses every edge.

    Dims are letters: ``s`` sequence (of one context-parallel rank), ``b``
    micro-batch rows, ``h`` hidden have the sizes of the model and the
    micro-batch; other letters need ``shape``.
    """

    edge: int | None = Field(
        default=None, ge=0, le=2**32, description="Between stages `edge` and `edge` + 1; without it, every edge."
    )
    name: str = Field(description="Name of the tensor.", json_schema_extra={"minLength": 1})
    dims: str = Field(description="Dims in order, a letter each.", json_schema_extra={"pattern": "^[a-z]+$"})
    shape: Annotated[tuple[Annotated[int, Field(ge=1, le=2**40)], ...], _FROM_LIST] | None = Field(
        default=None, description="Sizes of the dims over all TP ranks, the same for every micro-batch."
    )
    dtype: Literal["float32", "float64", "bfloat16", "float16", "int64", "int32", "bool"] | None = Field(
        default=None, description="Type of the elements; without it, `run.dtype`."
    )
    tp: str = Field(
        default="invariant",
        description="How it lies over the sender's TP ranks: invariant, replicated or sharded(d).",
        json_schema_extra={"pattern": "^(invariant|replicated|sharded\\([a-z]\\))$"},
    )
    receiver_tp: str | None = Field(
        default=None,
        description="How it lies over the receiver's TP ranks; without it, as at the sender.",
        json_schema_extra={"pattern": "^(invariant|replicated|sharded\\([a-z]\\))$"},
    )
    gradient: bool | None = Field(
        default=None, description="Whether a gradient comes back; without it, for floating-point types."
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        _refuse(check_boundary(self))
        return self


class BuffersSpec(_Section):
    """Which memory messages use, and when a stage's output is given back."""

    receive_slots: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="Slots that the receives of a channel take in turn, a step's first receive the first slot; the "
        "stage works on the tensor there. Without it, each receive has memory of its own.",
    )
    send_slots: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="Slots into which the sends of a channel are copied in turn when they are posted. Without it, "
        "tensors are sent from where they are.",
    )
    release_output: Literal["after_backward", "after_wait", "after_post"] = Field(
        default="after_backward",
        description="When a stage gives back the output that it sent: with the backward, once the wait for the send "
        "is done, or as soon as the send is posted.",
    )


class CostSpec(_Section):
    """What the simulator assumes each operation takes, in microseconds per stage and micro-batch.

    A time is exact: an integer, a decimal (0.1 is one tenth) or a fraction
    ``a/b``; where a stage's time may differ, also a list by global stage.
    The backward time is given whole (``backward_us``) or as its two halves.
    """

    forward_us: PositiveTimeByStage = Field(
        default=Fraction(100), description="Time of a forward.", json_schema_extra={"default": 100}
    )
    backward_us: TimeByStage | None = Field(
        default=None, description="Time of a backward; 200 where no backward time is given."
    )
    backward_input_us: TimeByStage | None = Field(default=None, description="The backward's input-gradient part.")
    backward_weight_us: TimeByStage | None = Field(default=None, description="The backward's weight-gradient part.")
    overlapped_us: TimeByStage | None = Field(
        default=None,
        description="Time of a forward and a backward that run side by side, as in DualPipe; a list goes by the stage "
        "of the forward. Without it, the sum of both.",
    )
    optimizer_us: TimeByStage = Field(
        default=Fraction(0), description="Time of the optimizer's step.", json_schema_extra={"default": 0}
    )
    p2p_latency_us: Time = Field(
        default=Fraction(0),
        description="Time of a message between two ranks.",
        json_schema_extra={"default": 0},
    )
    p2p: Literal["async", "rendezvous", "backend"] = Field(
        default="async",
        description="When a send ends: at once, when its receive is posted, or as run.backend does it.",
    )
    recv_slowdown: Slowdown = Field(
        default=None,
        description="By which share of its time a computation gets longer while a receive of its rank is under way, 0 "
        "to 1; without it, what is measured of the device of `analytic`, else 0.",
    )

    analytic: AnalyticSpec | None = Field(
        default=None, description="In place of all times here: the device from whose data sheet they are computed."
    )
    profile: ProfilePath | None = Field(
        default=None,
        description="In place of all times here: the file of measured times that `run --profile` wrote, relative to "
        "the plan file.",
    )
    network: NetworkSpec | None = Field(
        default=None,
        description="In place of p2p_latency_us: the links on which messages and collectives take their times.",
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        _refuse(check_cost(self))
        return self

    @model_serializer(mode="wrap")
    def _without_unused_times(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Times beside ``analytic``, ``profile`` or ``network`` would be refused when the dump is loaded."""
        dumped: dict[str, Any] = dump(self)
        is_given = self.analytic is None and self.profile is None
        if is_given and self.network is not None:
            dumped.pop("p2p_latency_us", None)
        return {key: value for key, value in dumped.items() if is_given or not key.endswith("_us")}

    def forward_of(self, stage: int) -> Fraction:
        """Microseconds of one forward of global stage ``stage``."""
        return _at(self.forward_us, stage)

    def backward_input_of(self, stage: int) -> Fraction:
        """Microseconds of the input-gradient part; half of the whole where only that is given."""
        part = self.backward_input_us
        return self.backward_of(stage) / 2 if part is None else _at(part, stage)

    def backward_weight_of(self, stage: int) -> Fraction:
        """Microseconds of the weight-gradient part; half of the whole where only that is given."""
        part = self.backward_weight_us
        return self.backward_of(stage) / 2 if part is None else _at(part, stage)

    def overlapped_of(self, forward: int, backward: int) -> Fraction:
        """Microseconds of a forward of one stage beside a whole backward of another."""
        if self.overlapped_us is None:
            return self.forward_of(forward) + self.backward_of(backward)
        return _at(self.overlapped_us, forward)

    def optimizer_of(self, stage: int) -> Fraction:
        """Microseconds of the optimizer's step of global stage ``stage``."""
        return _at(self.optimizer_us, stage)

    def backward_of(self, stage: int) -> Fraction:
        """Microseconds of one whole backward (input and weight gradients) of global stage ``stage``."""
        if self.backward_us is not None:
            return _at(self.backward_us, stage)
        if self.backward_input_us is not None and self.backward_weight_us is not None:
            return _at(self.backward_input_us, stage) + _at(self.backward_weight_us, stage)
        return _DEFAULT_BACKWARD_US


def _at(times: StageTimes, stage: int) -> Fraction:
    return times[stage] if isinstance(times, tuple) else times


class RunSpec(_Section):
    """How the plan is executed."""

    backend: Literal["paddle"] = Field(default="paddle", description="The framework that computes and communicates.")
    device: Literal["cpu"] = Field(default="cpu", description="Where it computes.")
    dtype: Literal["float32", "float64"] = Field(default="float32", description="Type of weights and activations.")
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


class SuppressSpec(_Section):
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
        _refuse(check_suppression(self))
        return self


class PlanSpec(_Section):
    """A whole plan."""

    pipeproof: Annotated[Literal[1], BeforeValidator(_int_only)] = Field(description="Version of the plan format.")
    model: ModelSpec = Field(description="The network.")
    topology: TopologySpec = Field(description="The device mesh.")
    schedule: ScheduleSpec = Field(description="The pipeline schedule.")
    stages: (
        Annotated[tuple[Annotated[tuple[Annotated[str, Field(min_length=1)], ...], _FROM_LIST], ...], _FROM_LIST] | None
    ) = Field(default=None, description="Names of the layers of each global stage; without it, an even cut.")
    loss: LossSpec = Field(default_factory=LossSpec, description="The loss.")
    transport: TransportSpec = Field(default_factory=TransportSpec, description="Stage-to-stage communication.")
    boundaries: Annotated[tuple[BoundarySpec, ...], _FROM_LIST] = Field(
        default=(), description="Tensors that cross stage boundaries, where others than the model's activation do."
    )
    buffers: BuffersSpec = Field(default_factory=BuffersSpec, description="Memory of messages.")
    cost: CostSpec = Field(default_factory=CostSpec, description="Times for the simulator.")
    memory: MemorySpec = Field(default_factory=MemorySpec, description="What is held, and how much room there is.")
    run: RunSpec = Field(default_factory=RunSpec, description="Execution.")
    suppress: Annotated[tuple[SuppressSpec, ...], _FROM_LIST] = Field(
        default=(), description="Warnings and notes of `check` that are known and wanted."
    )

    @property
    def num_stages(self) -> int:
        """Number of stages over all pipeline ranks."""
        placement = self.schedule.placement
        if isinstance(placement, tuple):
            return len({stage for stages in placement for stage in stages})
        return self.topology.pp * self.schedule.num_chunks

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        _refuse(
            [
                *check_tensor_parallel(self.model, self.topology),
                *check_expert_parallel(self),
                *check_placed_ranks(self),
                *check_lengths(self),
                *check_splits(self),
                *check_analytic(self),
                *check_network(self),
                *check_boundaries(self),
            ]
        )
        return self
