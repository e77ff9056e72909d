"""The sections ``transport``, ``boundaries`` and ``buffers``: what crosses between stages, how, and in which memory."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from pipeproof.specs.boundary_checks import check_boundary
from pipeproof.specs.problems import Problem, describe_value, nearest_name, problems_error
from pipeproof.specs.receives import RecvPost
from pipeproof.specs.section import FROM_LIST, Section, refuse

TransportName = Literal["full", "partial"]
"""How a tensor crosses a stage boundary; ``pipeproof.comm.transport`` says what each does."""


class TransportSpec(Section):
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
    dims: str = Field(description="Dims in order, a letter each.", json_schema_extra={"pattern": "^[a-z]+$"})
    shape: Annotated[tuple[Annotated[int, Field(ge=1, le=2**40)], ...], FROM_LIST] | None = Field(
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
        refuse(check_boundary(self))
        return self


class BuffersSpec(Section):
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
