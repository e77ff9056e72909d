"""The sections ``transport``, ``boundaries`` and ``buffers``: tensors between stages, their transfer and its memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from pipeproof.diagnostics.problems import Problem, describe_value, listed, nearest_name, problems_error
from pipeproof.specs.section import FROM_LIST, Section, shorthand_schema

TransportName = Literal["full", "partial"]
"""A transport of a tensor across a stage boundary; ``pipeproof.stages.describe.boundary`` describes each."""

RecvOrder = Literal["just_in_time", "prefetch_one", "send_order"]
"""When receives are posted; ``pipeproof.comm.lower`` gives the position in a program."""


class TransportSpec(Section):
    """Transfer of tensors across stage boundaries. The plain string ``full`` or ``partial`` sets both directions."""

    forward: TransportName = Field(default="full", description="Transport of activations.")
    backward: TransportName = Field(default="full", description="Transport of activation gradients.")
    connections: Literal["warm", "lazy", "per_pair"] = Field(
        default="warm",
        description="warm: connections are opened before the first step; lazy: at first use, which the deadlock "
        "rules then consider (runs always open them before); per_pair: at first use, with a communicator for each pair "
        "of ranks, as PyTorch makes for unbatched transfers on NCCL.",
    )
    recv_order: RecvOrder = Field(
        default="just_in_time",
        description="When receives are posted: just_in_time, just before the computation that needs them; "
        "prefetch_one, one computation earlier where the order of sends allows it; send_order, in the order of the "
        "sends.",
    )
    queue: Literal["device", "rank", "direction", "communicator", "pair", "directed_edge"] | None = Field(
        default=None,
        description="Transfers of a rank that share one FIFO queue, for a runtime that is stricter than run.backend. "
        "pair is the queue of PyTorch's unbatched transfers on NCCL.",
    )
    messages: Literal["per_tensor", "packed"] = Field(
        default="per_tensor",
        description="Messages of a boundary with several tensors: per_tensor, one for each; packed, one of fixed shape "
        "with the bytes of all of them, in the order of the boundary. Fixed shapes need the transport full and one "
        "layout on both sides.",
    )
    shape_exchange: Literal["none", "per_message"] = Field(
        default="none",
        description="Messages that carry shapes: none, all ranks know the shapes; per_message, an int64 message with "
        "the shape before each tensor, as with Megatron's `variable_seq_lengths`: a receive is posted when its shape "
        "has arrived.",
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

    def _problems(self) -> Iterator[Problem]:
        if self.shape_exchange == "per_message" and self.recv_order != "just_in_time":
            message = f"`recv_order: {self.recv_order}` posts receives before their shapes have arrived"
            fix = "remove recv_order, or shape_exchange"
            yield Problem("PP106", ("recv_order",), message, help=fix)
        elif self.messages == "packed":
            yield from _check_packed(self)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema of the mapping, or of the plain string."""
        return shorthand_schema(schema, handler, lambda _: {"type": "string", "enum": ["full", "partial"]})


def _check_packed(transport: TransportSpec) -> Iterator[Problem]:
    """PP106: a packed message is whole, and its shape is known."""
    fix = "use `messages: per_tensor`"
    for direction in ("forward", "backward"):
        if getattr(transport, direction) == "partial":
            message = "`messages: packed` has no slices of one tensor, which `partial` sends"
            yield Problem("PP106", (direction,), message, help=fix)
    if transport.shape_exchange == "per_message":
        message = "`messages: packed` has fixed shapes, and `shape_exchange: per_message` exchanges shapes of tensors"
        yield Problem("PP106", ("shape_exchange",), message, help=fix)


class BoundarySpec(Section):
    """A tensor that crosses from one stage to the next. Without any, the model's activation crosses every edge.

    Dims are letters: ``s`` sequence (of one context-parallel rank), ``b``
    micro-batch rows, ``h`` hidden have the sizes of the model and the
    micro-batch; other letters need ``shape``.
    """

    edge: int | None = Field(
        default=None, ge=0, le=2**32, description="Between stages `edge` and `edge` + 1; without it, every edge."
    )
    name: str = Field(description="Name of the tensor.", json_schema_extra={"minLength": 1})
    dims: str = Field(description="Dims in order, one letter each.", json_schema_extra={"pattern": "^[a-z]+$"})
    shape: Annotated[tuple[Annotated[int, Field(ge=1, le=2**40)], ...], FROM_LIST] | None = Field(
        default=None, description="Sizes of the dims over all TP ranks, the same for every micro-batch."
    )
    dtype: Literal["float32", "float64", "bfloat16", "float16", "int64", "int32", "bool"] | None = Field(
        default=None, description="Type of the elements; without it, `run.dtype`."
    )
    tp: str = Field(
        default="invariant",
        description="Placement over the sender's TP ranks: invariant, replicated or sharded(d).",
        json_schema_extra={"pattern": "^(invariant|replicated|sharded\\([a-z]\\))$"},
    )
    receiver_tp: str | None = Field(
        default=None,
        description="Placement over the receiver's TP ranks; without it, the sender's.",
        json_schema_extra={"pattern": "^(invariant|replicated|sharded\\([a-z]\\))$"},
    )
    gradient: bool | None = Field(
        default=None, description="Whether a gradient comes back; without it, for floating-point types."
    )

    def _problems(self) -> Iterator[Problem]:
        return _check_boundary(self)


SHARDED_DIM = re.compile(r"sharded\(([a-z])\)", re.ASCII)
"""A placement that shards one dim, named by its letter."""

_UNSHARDED = ("invariant", "replicated")
_MODEL_DIMS = "sbh"
"""Dims with sizes from the model and the schedule: sequence, micro-batch rows, hidden."""


def is_float(dtype: str) -> bool:
    """Return True if values of the type have gradients."""
    return "float" in dtype


def _check_boundary(entry: BoundarySpec) -> Iterator[Problem]:
    """Dims, shape and placements of one entry agree (PP104, PP106, PP109)."""
    if not re.fullmatch(r"[a-z]+", entry.dims, re.ASCII) or len(set(entry.dims)) != len(entry.dims):
        message = f"`dims` names each dim by its own letter, found {describe_value(entry.dims)}"
        yield Problem("PP106", ("dims",), message, help="write for example sbh: sequence, batch, hidden")
        return
    unknown = [dim for dim in entry.dims if dim not in _MODEL_DIMS]
    if entry.shape is None and unknown:
        message = f"the sizes of the dims {listed(unknown, 'and')} of `{entry.name}` are not known"
        yield Problem("PP104", ("dims",), message, help="add `shape`, one size for each dim")
    if entry.shape is not None and len(entry.shape) != len(entry.dims):
        message = f"`shape` has {len(entry.shape)} sizes, and `dims` names {len(entry.dims)} dims"
        yield Problem("PP109", ("shape",), message, help="give one size for each dim")
    for key in ("tp", "receiver_tp"):
        text: str | None = getattr(entry, key)
        if text is not None:
            yield from _check_placement(key, text, entry.dims)
    if entry.gradient and entry.dtype is not None and not is_float(entry.dtype):
        message = f"`{entry.name}` is {entry.dtype}, which has no gradient, and `gradient` is true"
        yield Problem("PP106", ("gradient",), message, help="remove `gradient`")


def _check_placement(key: str, text: str, dims: str) -> Iterator[Problem]:
    match = SHARDED_DIM.fullmatch(text)
    allowed = [*_UNSHARDED, *(f"sharded({dim})" for dim in dims)]
    if text in _UNSHARDED or (match and match[1] in dims):
        return
    near = nearest_name(text, allowed)
    yield Problem(
        "PP106",
        (key,),
        f"`{key}` must be {listed(allowed)}, found {describe_value(text)}",
        help=f"did you mean `{near}`?" if near else None,
    )


class BuffersSpec(Section):
    """Memory of messages, and the lifetime of a stage's output."""

    receive_slots: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="Number of slots that the receives of a channel use round-robin, beginning with the first slot in "
        "each step; the stage uses the tensor in the slot. Without it, each receive has its own memory.",
    )
    send_slots: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="Number of slots into which the sends of a channel are copied round-robin when they are posted. "
        "Without it, tensors are sent without a copy.",
    )
    free_output: Literal["after_backward", "after_send_done", "after_send_posted"] = Field(
        default="after_backward",
        description="When a stage frees the output that it sent: after its backward, after the send is done, or after "
        "the send is posted.",
    )

    @property
    def has_slots(self) -> bool:
        """True if messages have slots."""
        return self.receive_slots is not None or self.send_slots is not None
