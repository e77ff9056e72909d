"""The key ``cost.analytic``: times computed from the data sheet of a device instead of given."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

DeviceName = Literal["a100", "h100", "h200", "h800", "b200", "mi300x"]
"""An accelerator; ``pipeproof.comm.analytic.devices`` has what its data sheet says."""


MatmulDtype = Literal["float8"]
"""A type narrower than that of weights and activations, for products alone."""

NO_FLOAT8: frozenset[DeviceName] = frozenset({"a100"})
"""Devices without products in eight-bit floating point."""


class AnalyticSpec(BaseModel):
    """Times computed from the data sheet of a device. The plain string, such as ``h200``, is its name.

    Efficiencies are the share of a data sheet's figure that is reached. They
    are assumptions: measure yours.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    device: DeviceName = Field(description="The accelerator of every rank.")
    dtype: Literal["bfloat16", "float32"] | None = Field(
        default=None,
        description="Type of weights and activations for these times; without it, `run.dtype`. Gradients of weights "
        "are added up in float32.",
    )
    matmul_dtype: MatmulDtype | None = Field(
        default=None,
        description="Type in which the products of blocks with their weights are computed, but for routers; without "
        "it, `dtype`. What is read, written and sent stays in `dtype`.",
    )
    attention: Literal["flash", "unfused"] = Field(
        default="flash",
        description="flash: the causal half is computed, and nothing of the size of the scores is stored; unfused: the "
        "scores are computed whole and stored.",
    )
    ranks_per_node: int | None = Field(
        default=None,
        ge=1,
        le=2**16,
        description="Neighbouring global ranks that fast links join; without it, as the device is sold.",
    )
    matmul_efficiency: float = Field(default=0.7, gt=0, le=1, description="Share of peak of matrix products.")
    attention_efficiency: float = Field(default=0.5, gt=0, le=1, description="Share of peak of attention.")
    memory_efficiency: float = Field(default=0.8, gt=0, le=1, description="Share of memory bandwidth.")
    link_efficiency: float = Field(default=0.75, gt=0, le=1, description="Share of the bandwidth of links and network.")
    launch_us: float = Field(
        default=20, ge=0, le=10**6, description="What a message or a collective takes before its first byte moves."
    )
    node_step_us: float = Field(
        default=1, ge=0, le=10**6, description="Latency of a step of a ring, or of a message, inside a node."
    )
    network_step_us: float = Field(default=5, ge=0, le=10**6, description="The same between nodes.")

    @model_validator(mode="before")
    @classmethod
    def _from_plain_string(cls, value: object) -> object:
        return {"device": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of the mapping, or the plain string."""
        mapping: dict[str, Any] = handler.resolve_ref_schema(handler(schema))
        return {
            "title": mapping.pop("title"),
            "description": mapping.pop("description"),
            "anyOf": [{"type": "string", "enum": mapping["properties"]["device"]["enum"]}, mapping],
        }
