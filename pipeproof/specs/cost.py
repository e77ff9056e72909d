"""The section ``cost``: the times that the simulator uses, given, computed, measured, or from links."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from pipeproof.diagnostics.problems import Problem, listed
from pipeproof.specs.cost_table import CostTable
from pipeproof.specs.exact_times import TIME_KEYS, PositiveTimeByStage, Slowdown, StageTimes, Time, TimeByStage
from pipeproof.specs.section import FROM_LIST, Section, shorthand_schema

DeviceName = Literal["a100", "h100", "h200", "h800", "b200", "gb200", "b300", "gb300", "mi300x"]
"""An accelerator; ``pipeproof.cost.devices`` has the figures of its data sheet."""

MatmulDtype = Literal["float8", "float8_block", "float4"]
"""A narrower type than weights and activations have, for matrix products only.

``float8`` has a scale for each tensor, or as MXFP8, which tensor cores apply as fast; ``float8_block`` one for
each block, as DeepSeek-V3; ``float4`` one for each block of 16, as NVFP4."""

NO_MATMUL: Mapping[MatmulDtype, frozenset[DeviceName]] = MappingProxyType(
    {
        "float8": frozenset({"a100"}),
        "float8_block": frozenset({"a100"}),
        "float4": frozenset({"a100", "h100", "h200", "h800", "mi300x"}),
    }
)
"""Devices without matrix products of a type."""

Execution = Literal["eager", "compiled", "graph"]
"""Start of kernels by the host: each operation by itself, fused by a compiler, or all by one replayed graph."""

Algorithm = Literal["ring", "tree", "auto"]
"""Algorithm of all-reduces; every other collective has one algorithm."""

_BUCKETS = ("megatron", "stage")
_MOST_IN_BUCKET = 10**12


def _bucket_size(value: object) -> object:
    """Refuse other values with one message; pydantic has one for each type of a union."""
    if value in _BUCKETS or (type(value) is int and 1 <= value <= _MOST_IN_BUCKET):
        return value
    raise PydanticCustomError("bucket_size", f"must be an integer from 1 to {_MOST_IN_BUCKET}, {listed(_BUCKETS)}")


BucketSize = Annotated[
    Annotated[int, Field(ge=1, le=_MOST_IN_BUCKET)] | Literal["megatron", "stage"], BeforeValidator(_bucket_size)
]
"""Elements of a bucket of gradients, or how many there are."""

ProfilePath = Annotated[str, Field(min_length=1)]
"""A file that `pipeproof run PLAN --profile FILE` or `pipeproof import profile` wrote, relative to the plan file."""

_DEFAULT_FORWARD_US = Fraction(100)
_DEFAULT_BACKWARD_US = Fraction(200)

CostSource = Literal["placeholder", "given", "profile", "analytic"]
"""Origin of the times of computations: defaults, keys of the plan, a measured profile, or a device's data sheet."""


class AnalyticSpec(Section):
    """Times computed from the data sheet of a device. A plain string such as ``h200`` is the device's name.

    An efficiency is the reached share of a data sheet's figure, the same for all
    sizes. Without efficiencies, the measured curves of the device are used.
    """

    device: DeviceName = Field(description="The accelerator of every rank.")
    dtype: Literal["bfloat16", "float32"] | None = Field(
        default=None,
        description="Type of weights and activations for these times; without it, `run.dtype`. Gradients of weights "
        "are accumulated in the type that they have in memory (`memory.gradient_dtype`).",
    )
    matmul_dtype: MatmulDtype | None = Field(
        default=None,
        description="Type of the products of blocks with their weights, except in routers; without it, `dtype`. "
        "Tensors are read, written and sent in `dtype`.",
    )
    attention: Literal["flash", "unfused"] = Field(
        default="flash",
        description="flash: only the causal half of the scores is computed, and none are stored; unfused: all scores "
        "are computed and stored.",
    )
    ranks_per_node: int | None = Field(
        default=None,
        ge=1,
        le=2**16,
        description="Number of consecutive global ranks that fast links connect; without it, as in the device's usual "
        "node.",
    )
    matmul_efficiency: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of peak of all matrix products. Without it, the device's measured curves; 0.7 for a device "
        "or a type without them.",
    )
    attention_efficiency: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of peak of attention. Without it, as in the device's table; 0.5 without a table.",
    )
    memory_efficiency: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of memory bandwidth. Without it, as in the device's table; 0.8 without a table.",
    )
    link_efficiency: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the bandwidth of links and network. Without it, the device's measured curves for "
        "collectives inside a node, and 0.75 elsewhere.",
    )
    table: CostTable | None = Field(
        default=None, description="Measured curves of your device, in place of the built-in curves of `device`."
    )
    execution: Execution = Field(
        default="eager",
        description="How the host starts operations: eager, one by one; compiled, each stage as one compiled graph; "
        "graph, all by one replay. A phase takes the time of the host or of the device, whichever is longer.",
    )
    replayed: Annotated[tuple[Literal["attention", "router"], ...], FROM_LIST] = Field(
        default=(),
        description="Parts of each block that one replay starts, forward and backward, while the host starts all other "
        "operations one by one: attention, with its norm; router, with the norm before it and shared experts "
        "(`--cuda-graph-modules attn moe_router` of Megatron-LM).",
        json_schema_extra={"default": []},
    )
    host_us: float | None = Field(
        default=None,
        ge=0,
        le=10**6,
        description="Time that the host takes to start one operation. Without it, as in the device's table; 0 without "
        "a table.",
    )
    collective_us: float | None = Field(
        default=None,
        ge=0,
        le=10**6,
        description="Time that the host takes to start a collective inside a layer. Without it, `host_us`.",
    )
    fill_us: float = Field(
        default=0,
        ge=0,
        le=10**6,
        description="Further time of the host for each operation, to fill the tensor that it makes, as PyTorch does "
        "with deterministic algorithms.",
    )
    step_us: float = Field(
        default=0,
        ge=0,
        le=10**9,
        description="Time of a step outside of its pipeline, such as data, logging and norms of gradients; added to "
        "the optimizer's time.",
    )
    input_us: float = Field(
        default=0,
        ge=0,
        le=10**9,
        description="Time to read a micro-batch before its F on the first stage; part of the host's time.",
    )
    overlap: Annotated[tuple[Literal["tp", "tp_backward", "ep"], ...], FROM_LIST] = Field(
        default=(),
        description="Collectives that run during computations: tp, pipelined with the products next to them "
        "(`--tp-comm-overlap` of Megatron-LM); tp_backward, in a whole backward of products whose columns are sharded: "
        "gathers again next to the gradient of the input, and sums of that gradient next to the gradient of the "
        "weight, as in Megatron-LM without a flag; ep, during the computations of another micro-batch "
        "(`--overlap-moe-expert-parallel-comm`).",
        json_schema_extra={"default": []},
    )
    exchange: Literal["direct", "by_node"] = Field(
        default="direct",
        description="All-to-alls of experts: direct, a token is sent once to each of its experts; by_node, once to "
        "each rank, and over the network once to each node with some of its experts, as in DeepEP.",
    )
    fused_experts: bool = Field(
        default=False,
        description="Whether the activation of experts, and the casts next to it, are part of their products, forward "
        "and backward, as in Transformer Engine's grouped MLP (`--use-transformer-engine-op-fuser`).",
    )
    expert_biases: bool = Field(
        default=False,
        description="Whether biases (which experts of a plan do not have) are added to the outputs of experts by "
        "separate operations, as in Megatron-LM with grouped experts: products with the routing weights, additions and "
        "a concatenation.",
    )
    fused_rotary: bool = Field(
        default=True,
        description="Whether rotary positions are one operation for queries and keys. Megatron-LM has an operation for "
        "each step of the formula with `--no-rope-fusion`, and with YaRN's factor for cosines and sines (GPT OSS).",
    )
    fused_residual: bool = Field(
        default=False,
        description="Whether the addition of the residual includes the bias and the dropout after attention and MLP, "
        "in forward: Megatron-LM's fusion of bias and dropout, its default.",
    )
    fused_softmax: bool = Field(
        default=False,
        description="Whether the softmax of unfused attention scales, masks and reads scores up to the diagonal only: "
        "Megatron-LM's fusion of masked softmax, its default.",
    )
    launch_us: float = Field(
        default=20, ge=0, le=10**6, description="Time of a message or a collective before its first byte moves."
    )
    node_step_us: float = Field(
        default=1, ge=0, le=10**6, description="Latency of a step of a ring, or of a message, inside a node."
    )
    network_step_us: float = Field(
        default=5, ge=0, le=10**6, description="Latency of a step of a ring, or of a message, between nodes."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_plain_string(cls, value: object) -> object:
        return {"device": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema of the mapping, or of the plain string."""
        return shorthand_schema(
            schema, handler, lambda mapping: {"type": "string", "enum": mapping["properties"]["device"]["enum"]}
        )


class LinkSpec(Section):
    """One kind of link."""

    bandwidth: float = Field(
        gt=0,
        le=10**6,
        description="Reached bandwidth in one direction, in GB/s (10^9 bytes); both directions reach it "
        "simultaneously.",
    )
    latency_us: Time = Field(
        default=Fraction(0),
        description="Latency of a message, or of a step of a collective.",
        json_schema_extra={"default": 0},
    )


class EdgeSpec(Section):
    """Measured times of messages from one rank to another; `pipeproof rehearse PLAN -o FILE` writes these."""

    source: int = Field(ge=0, description="Global rank that sends.")
    destination: int = Field(ge=0, description="Global rank that receives.")
    bandwidth: float = Field(gt=0, le=10**6, description="Reached bandwidth in GB/s (10^9 bytes).")
    latency_us: Time = Field(
        default=Fraction(0),
        description="Time of a message apart from its bytes; it includes `launch_us`.",
        json_schema_extra={"default": 0},
    )


class NetworkSpec(Section):
    """The links between ranks, which give messages and collectives their times.

    Together with ``cost.analytic``, whose data sheet describes the links, only
    ``ranks_per_nic``, ``algorithm`` and ``edges`` are allowed.
    """

    ranks_per_node: int | None = Field(
        default=None, ge=1, le=2**16, description="Number of consecutive global ranks that fast links connect."
    )
    node: LinkSpec | None = Field(default=None, description="Link of a rank to the other ranks of its node.")
    between: LinkSpec | None = Field(default=None, description="Link of a network card to other nodes.")
    ranks_per_nic: int = Field(
        default=1, ge=1, le=2**16, description="Number of consecutive ranks of a node that share a network card."
    )
    launch_us: Time | None = Field(
        default=None,
        description="Time of a message or a collective before its first byte moves; without it, 0.",
    )
    algorithm: Algorithm = Field(
        default="ring", description="Algorithm of all-reduces: ring, tree, or auto for the faster one at each size."
    )
    edges: tuple[EdgeSpec, ...] = Field(
        default=(),
        strict=False,
        description="Pairs of ranks with measured message times, each pair and direction once. All other messages, and "
        "all collectives, follow the other keys.",
        json_schema_extra={"default": []},
    )


class CostSpec(Section):
    """Assumed times of operations, in microseconds per stage and micro-batch.

    A time is exact: an integer, a decimal (0.1 is one tenth) or a fraction
    ``a/b``; where stages may differ, also a list by global stage. The backward
    time is given whole (``backward_us``) or as its two halves.
    """

    forward_us: PositiveTimeByStage = Field(
        default=_DEFAULT_FORWARD_US, description="Time of a forward.", json_schema_extra={"default": 100}
    )
    backward_us: TimeByStage | None = Field(
        default=None, description="Time of a backward; 200 if no backward time is given."
    )
    backward_input_us: TimeByStage | None = Field(default=None, description="The backward's input-gradient part.")
    backward_weight_us: TimeByStage | None = Field(default=None, description="The backward's weight-gradient part.")
    overlapped_us: TimeByStage | None = Field(
        default=None,
        description="Time of a forward and a backward that run in parallel, as in DualPipe; a list is by the stage of "
        "the forward. Without it, the sum of both.",
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
        description="When a send ends: async, at once; rendezvous, when its receive is posted; backend, as on "
        "run.backend.",
    )
    recv_slowdown: Slowdown = Field(
        default=None,
        description="Share of its time, 0 to 1, by which a computation gets longer while a receive of its rank is in "
        "progress. Without it, the measured share of the device of `analytic`, else 0.",
    )
    collective_slowdown: Slowdown = Field(
        default=None,
        description="Share of its time, 0 to 1, by which a computation gets longer while a collective of experts of "
        "its rank is in progress on a queue of its own (`schedule.overlap`). Without it, 0.",
    )
    host_bandwidth: float | None = Field(
        default=None,
        gt=0,
        le=10**6,
        description="Reached bandwidth of copies between the memory of a device and its host (OFFLOAD, RELOAD), in "
        "each direction, in GB/s (10^9 bytes). Without it, from the device of `analytic`; else copies take no time.",
    )

    bucket_size: BucketSize | None = Field(
        default=None,
        description="Sums of gradients, and gathers of weights of a sharded optimizer, go by buckets of at least this "
        "number of elements, one collective each: megatron, Megatron-LM's default, the larger of 40000000 and 1000000 "
        "for each rank of dp, cp and ep; stage, one bucket per stage. Without it, one collective per weight. As in "
        "Megatron-LM, only the first stage has several buckets; with `schedule.reduce_gradients: when_ready` their "
        "sums overlap with its last backward.",
    )
    gather_weights: Literal["at_end", "first_forward"] = Field(
        default="at_end",
        description="When the weights of a sharded optimizer are gathered: at_end, after its step; first_forward, "
        "during the first forward of the next step: only the time that is not hidden counts "
        "(`--overlap-param-gather` of Megatron-LM). Needs `bucket_size`.",
    )
    analytic: AnalyticSpec | None = Field(
        default=None, description="The device whose data sheet gives all times, in place of the times here."
    )
    profile: ProfilePath | None = Field(
        default=None,
        description="A file of measured times that `run --profile` wrote, in place of the times here; relative to the "
        "plan file.",
    )
    network: NetworkSpec | None = Field(
        default=None,
        description="The links that give messages and collectives their times, in place of p2p_latency_us.",
    )

    def _problems(self) -> Iterator[Problem]:
        """The backward time is whole or in two parts (PP104), and no time is given twice (PP106)."""
        if self.analytic is not None or self.profile is not None:
            source, verb = ("analytic", "computes") if self.analytic is not None else ("profile", "measured")
            for name in sorted(self.given):
                if name.endswith("_us") or name == "profile" != source:
                    message = f"`cost.{name}` is given together with `cost.{source}`, which {verb} it"
                    fix = f"remove {name}, or give all times and remove {source}"
                    yield Problem("PP106", (name,), message, help=fix, at_key=True)
            return
        parts = [name for name in ("backward_input_us", "backward_weight_us") if getattr(self, name) is not None]
        if self.backward_us is not None and parts:
            names = listed([f"`cost.{name}`" for name in parts], "and")
            message = f"`cost.backward_us` is given together with {names}"
            fix = "give backward_us alone, or backward_input_us and backward_weight_us"
            yield Problem("PP106", ("backward_us",), message, help=fix, at_key=True)
        elif len(parts) == 1:
            missing = "backward_weight_us" if parts == ["backward_input_us"] else "backward_input_us"
            message = f"`cost.{parts[0]}` is given without `cost.{missing}`"
            fix = f"add `{missing}`, or give the whole time as backward_us"
            yield Problem("PP104", (parts[0],), message, help=fix, at_key=True)

    @model_serializer(mode="wrap")
    def _without_unused_times(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit times that ``analytic``, ``profile`` or ``network`` replace: a dump with both would not load."""
        dumped: dict[str, Any] = dump(self)
        is_given = self.analytic is None and self.profile is None
        if is_given and self.network is not None:
            dumped.pop("p2p_latency_us", None)
        return {key: value for key, value in dumped.items() if is_given or not key.endswith("_us")}

    @property
    def source(self) -> CostSource:
        """Origin of the times of computations, except custom layers' own times."""
        return cost_source(self.given)

    @property
    def has_times(self) -> bool:
        """True if a time of computations is given, computed or measured."""
        return not self.given.isdisjoint((*TIME_KEYS, "analytic", "profile"))

    @property
    def given(self) -> frozenset[str]:
        """The keys that have a value in the plan."""
        return frozenset(name for name in self.model_fields_set if getattr(self, name) is not None)

    def forward_of(self, stage: int) -> Fraction:
        """Return the microseconds of one forward of global stage ``stage``."""
        return _at(self.forward_us, stage)

    def backward_input_of(self, stage: int) -> Fraction:
        """Return the microseconds of the input-gradient part; half of the whole if only that is given."""
        part = self.backward_input_us
        return self.backward_of(stage) / 2 if part is None else _at(part, stage)

    def backward_weight_of(self, stage: int) -> Fraction:
        """Return the microseconds of the weight-gradient part; half of the whole if only that is given."""
        part = self.backward_weight_us
        return self.backward_of(stage) / 2 if part is None else _at(part, stage)

    def overlapped_of(self, forward: int, backward: int) -> Fraction:
        """Return the microseconds of a forward of one stage in parallel with a whole backward of another."""
        if self.overlapped_us is None:
            return self.forward_of(forward) + self.backward_of(backward)
        return _at(self.overlapped_us, forward)

    def optimizer_of(self, stage: int) -> Fraction:
        """Return the microseconds of the optimizer's step of global stage ``stage``."""
        return _at(self.optimizer_us, stage)

    def backward_of(self, stage: int) -> Fraction:
        """Return the microseconds of one whole backward (input and weight gradients) of global stage ``stage``."""
        if self.backward_us is not None:
            return _at(self.backward_us, stage)
        if self.backward_input_us is not None and self.backward_weight_us is not None:
            return _at(self.backward_input_us, stage) + _at(self.backward_weight_us, stage)
        return _DEFAULT_BACKWARD_US


def _placeholders(
    cost_keys: Collection[str],
    forward: str = f"{_DEFAULT_FORWARD_US} us",
    backward: str = f"{_DEFAULT_BACKWARD_US} us",
) -> list[str]:
    """Times of computations that a plan leaves out, for the keys of its section ``cost``."""
    if "analytic" in cost_keys or "profile" in cost_keys:
        return []
    is_backward_given = any(key.startswith("backward_") for key in cost_keys)
    return [
        *([] if "forward_us" in cost_keys else [f"{forward} forward"]),
        *([] if is_backward_given else [f"{backward} backward"]),
    ]


def cost_source(cost_keys: Collection[str]) -> CostSource:
    """Return the origin of the times of computations for the keys of a section ``cost``.

    It is ``placeholder`` if a forward or a backward time is left out.
    """
    if "analytic" in cost_keys:
        return "analytic"
    if "profile" in cost_keys:
        return "profile"
    return "placeholder" if _placeholders(cost_keys) else "given"


def placeholder_note(cost_keys: Collection[str] = (), **defaults: str) -> str:
    """Return a sentence about the times that the keys of a section ``cost`` leave out; empty if there are none.

    ``defaults`` are ``forward`` and ``backward`` times with their units, where they are not a plan's.
    """
    times = _placeholders(cost_keys, **defaults)
    return f"times are placeholders ({', '.join(times)} per stage): proportions only" if times else ""


def _at(times: StageTimes, stage: int) -> Fraction:
    return times[stage] if isinstance(times, tuple) else times
