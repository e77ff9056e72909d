"""Measured times of one device: curves of products, attention and collectives, shares of bandwidth, host time.

A plan has such a table as ``cost.analytic.table``. ``pipeproof.cost.device_tables``
has the tables of known devices.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeproof.specs.section import FROM_LIST, Section

CollectiveType = Literal["ALL_REDUCE", "ALL_GATHER", "REDUCE_SCATTER", "ALL_TO_ALL"]
"""A collective that is measured inside a node."""

ProductType = Literal["bfloat16", "float8", "float8_block", "float4"]
"""A type of matrix products; ``float8`` has a scale for each tensor, ``float8_block`` and ``float4`` for each block."""

_Share = Annotated[float, Field(gt=0, le=1)]
MAX_SIZE = 10**12
_Size = Annotated[float, Field(ge=0, le=MAX_SIZE)]


class ProductCurve(Section):
    """Times of matrix products [m, k] x [k, n] of one type, with five constants."""

    dtype: ProductType = Field(description="Type of the factors.")
    efficiency: _Share = Field(description="Share of peak of large products before power limits the clock.")
    spare_elements: _Size = Field(description="Elements of the result by which the last wave of tiles is short.")
    spare_inner: _Size = Field(description="Steps along k that a tile takes to start and to end.")
    slowdown: Annotated[float, Field(ge=0, le=4)] = Field(
        description="Share by which very long products are slower: power limits the clock."
    )
    start_us: Annotated[float, Field(ge=0, le=10**6)] = Field(description="Time of the smallest product.")
    gradient_slowdown: Annotated[float, Field(ge=0, le=4)] = Field(
        default=0.0,
        description="Share by which products for gradients take longer than other products of the same shape: in eight "
        "bits Hopper adds them up without its fast accumulation.",
    )


class CollectiveCurve(Section):
    """Times of one collective among the ranks of a node, over the bytes that it moves through each rank."""

    kind: CollectiveType = Field(description="The collective.")
    num_ranks: int = Field(ge=2, le=2**16, description="Members of the group.")
    latency_us: Annotated[float, Field(ge=0, le=10**6)] = Field(description="Time of the smallest one.")
    ramp_us: Annotated[float, Field(ge=0, le=10**6)] = Field(description="Further time of large ones.")
    ramp_bytes: Annotated[float, Field(gt=0, le=10**12)] = Field(description="Bytes at half of `ramp_us`.")
    bandwidth: Annotated[float, Field(gt=0, le=10**6)] = Field(description="Bandwidth of large ones, in GB/s.")


class AttentionCurve(Section):
    """Shares of peak of flash attention, forward and backward."""

    forward: _Share = Field(description="Share of peak of the forward of long sequences.")
    backward: _Share = Field(description="Share of peak of the backward of long sequences.")
    spare_keys: _Size = Field(description="Number of keys at which both shares are halved.")


class CostTable(Section):
    """Measured times of one device."""

    source: str = Field(min_length=1, description="Origin of the figures.")
    products: Annotated[tuple[ProductCurve, ...], FROM_LIST] = Field(description="Curves by type.")
    attention: AttentionCurve = Field(description="Flash attention.")
    memory_efficiency: _Share = Field(description="Share of the memory bandwidth of the data sheet.")
    host_us: Annotated[float, Field(ge=0, le=10**6)] = Field(
        description="Time that the host takes to start one operation in eager execution."
    )
    elementwise_us: Annotated[float, Field(ge=0, le=10**6)] = Field(
        default=0.0, description="Time of the smallest operation other than a product, until the next one starts."
    )
    collectives: Annotated[tuple[CollectiveCurve, ...], FROM_LIST] = Field(
        default=(), description="Curves of collectives inside a node.", json_schema_extra={"default": []}
    )
