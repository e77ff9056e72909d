"""The section ``cost``: the times that the simulator takes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from pipeproof.specs.analytic import AnalyticSpec
from pipeproof.specs.checks import check_cost
from pipeproof.specs.network import NetworkSpec
from pipeproof.specs.profile import ProfilePath
from pipeproof.specs.receives import Slowdown
from pipeproof.specs.section import Section, refuse
from pipeproof.specs.times import PositiveTimeByStage, StageTimes, Time, TimeByStage

_DEFAULT_BACKWARD_US = Fraction(200)


class CostSpec(Section):
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
        refuse(check_cost(self))
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
