"""The section ``topology``: the device mesh."""

from __future__ import annotations

from math import prod
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from pipeproof.diagnostics.problems import Problem, listed
from pipeproof.specs.section import FROM_LIST, Section, refuse

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
    order: Annotated[tuple[AxisName, ...], FROM_LIST] = Field(
        default=("tp", "cp", "ep", "dp", "pp"),
        description="The five axes; the first changes fastest with the global rank.",
        json_schema_extra={"minItems": 5, "maxItems": 5, "uniqueItems": True},
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        refuse(_check_order(self))
        return self

    @property
    def num_ranks(self) -> int:
        """Number of global ranks: the product of all axes."""
        return prod((self.pp, self.tp, self.dp, self.cp, self.ep))


def _check_order(topology: TopologySpec) -> list[Problem]:
    """PP106: ``order`` names each of the five axes once."""
    axes = get_args(AxisName)
    if sorted(topology.order) == sorted(axes):
        return []
    missing = [axis for axis in axes if axis not in topology.order]
    repeated = [axis for axis in axes if topology.order.count(axis) > 1]
    faults = [f"lacks {listed(missing, 'and')}"] if missing else []
    if repeated:
        faults.append(f"names {listed(repeated, 'and')} more than once")
    return [
        Problem(
            "PP106",
            ("order",),
            f"`topology.order` must name each axis once, and it {' and '.join(faults)}",
            help="the default is [tp, cp, ep, dp, pp]",
        )
    ]
