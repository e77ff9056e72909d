"""The section ``topology``: the device mesh."""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeproof.specs.checks import check_order
from pipeproof.specs.section import FROM_LIST, Section, refuse

AxisName = Literal["tp", "cp", "ep", "dp", "pp"]
"""An axis of the device mesh."""


class TopologySpec(Section):
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
    order: Annotated[tuple[AxisName, ...], FROM_LIST] = Field(
        default=("tp", "cp", "ep", "dp", "pp"),
        description="The five axes; the first changes fastest with the global rank.",
        json_schema_extra={"minItems": 5, "maxItems": 5, "uniqueItems": True},
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        refuse(check_order(self))
        return self

    @property
    def num_ranks(self) -> int:
        """Number of global ranks: the product of all axes."""
        return prod((self.pp, self.tp, self.dp, self.cp, self.ep))
