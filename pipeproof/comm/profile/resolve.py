"""From a profile to times: medians of stages, and curves over bytes of messages and collectives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

from pipeproof.comm.analytic.links import message_bytes
from pipeproof.comm.links.network import exact
from pipeproof.comm.profile.curve import Curve
from pipeproof.comm.profile.fit import require_fit
from pipeproof.schedule.ops import COLLECTIVE_KINDS, GATHER_KINDS, OpKind
from pipeproof.specs.cost import CostSpec
from pipeproof.specs.finding import BadPlanAtError, Finding, Severity
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.profile import NOT_A_PROFILE, UNREADABLE_PROFILE
from pipeproof.specs.profile_file import Profile, ProfileError, SizedSpread, read_profile
from pipeproof.specs.times import GRID_US
from pipeproof.stages.describe.edges import describe_boundaries


@dataclass(frozen=True, slots=True)
class ProfileTimes:
    """What a profile says of the time of stages, messages and collectives.

    ``messages`` is None where the run had none; ``collectives`` are by kind
    and number of members. ``file`` is the profile as messages name it.
    """

    profile: Profile
    file: str
    messages: Curve | None
    collectives: Mapping[tuple[OpKind, int], Curve]

    @classmethod
    def of_plan(cls, plan: PlanSpec) -> Self:
        """The times of ``cost.profile``, which is relative to where the process is.

        Raises:
            ProfileError: PP161, it is not a whole profile.
            BadPlanAtError: PP160, it cannot be read; PP162, it was measured on another plan.
        """
        assert plan.cost.profile is not None
        try:
            profile = read_profile(Path(plan.cost.profile))
        except ProfileError as error:
            if error.findings[0].code != UNREADABLE_PROFILE.code:
                raise  # it has its place in the profile
            raise BadPlanAtError(error.findings[0], ("cost", "profile")) from error
        require_fit(profile, plan)
        return cls.of(profile, plan.cost.profile)

    @classmethod
    def of(cls, profile: Profile, file: str) -> Self:
        """The times of a profile. Messages between steps count only where the steps themselves had none."""
        points: dict[tuple[OpKind, int], list[tuple[int, Fraction, int]]] = {}
        for point in profile.collectives:
            curve = points.setdefault((OpKind(point.kind), point.axis_size), [])
            curve.append((point.num_bytes, exact(point.median_us), point.count))
        messages = profile.messages or profile.bare_messages
        return cls(
            profile,
            file,
            Curve.through(_points(messages)) if messages else None,
            {key: Curve.through(curve) for key, curve in points.items()},
        )

    def message_us(self, num_bytes: int) -> Fraction:
        """Microseconds of one message of ``num_bytes``, to the nanosecond, once both sides are ready.

        Raises:
            BadPlanAtError: PP161, the profile has no message.
        """
        if self.messages is None:
            raise self._missing("message between stages")
        return _rounded(self.messages.at(num_bytes))

    def collective_us(self, kind: OpKind, axis_size: int, num_bytes: int) -> Fraction:
        """Microseconds of a collective from the arrival of its last member, to the nanosecond.

        ``num_bytes`` are those of the tensor that each of its ``axis_size`` members puts in. Gathers of the partial
        transport count as all-gathers. A collective of one member takes no time.

        Raises:
            BadPlanAtError: PP161, the profile has none of this kind among so many ranks.
            ValueError: ``kind`` is no collective.
        """
        if kind not in COLLECTIVE_KINDS:
            raise ValueError(f"{kind} is no collective")
        if axis_size == 1:
            return Fraction(0)
        name = OpKind.ALL_GATHER if kind in GATHER_KINDS else kind
        curve = self.collectives.get((name, axis_size))
        if curve is None:
            raise self._missing(f"{name} among {axis_size} ranks")
        return _rounded(curve.at(num_bytes))

    def resolved(self, plan: PlanSpec) -> CostSpec:
        """The times of the plan's stages as given ones; every message has the time of the largest.

        Raises:
            BadPlanAtError: PP161, the profile lacks the time of a stage or of messages.
        """
        times: dict[str, Any] = {
            "forward_us": [max(time, GRID_US) for time in self._stages("F")],  # what is there takes some time
            "optimizer_us": self._stages("STEP"),
            "p2p_latency_us": self._largest_message_us(plan),
            "p2p": plan.cost.p2p,
        }
        return CostSpec.model_validate(times | self._backwards())

    def _backwards(self) -> dict[str, list[Fraction]]:
        """Whole backwards, or both parts where some stage had them apart; of a whole one, each part is half."""
        parts = [(self._median(stage, "I"), self._median(stage, "W")) for stage in range(len(self.profile.stages))]
        if all(None in pair for pair in parts):
            return {"backward_us": self._stages("B")}
        halves: list[tuple[Fraction, Fraction]] = []
        for stage, (first, second) in enumerate(parts):
            if first is not None and second is not None:
                halves.append((_rounded(first), _rounded(second)))
            else:
                half = _rounded(self._time(stage, "B") / 2)
                halves.append((half, half))
        return {"backward_input_us": [i for i, _ in halves], "backward_weight_us": [w for _, w in halves]}

    def _stages(self, kind: str) -> list[Fraction]:
        return [_rounded(self._time(stage, kind)) for stage in range(len(self.profile.stages))]

    def _time(self, stage: int, kind: str) -> Fraction:
        time = self._median(stage, kind)
        if time is None:
            raise self._missing(f"{kind} of stage {stage}")
        return time

    def _median(self, stage: int, kind: str) -> Fraction | None:
        ops = self.profile.stages[stage].ops
        return next((exact(op.whole.median_us) for op in ops if op.kind == kind), None)

    def _largest_message_us(self, plan: PlanSpec) -> Fraction:
        if plan.topology.pp == 1:
            return Fraction(0)
        transport = plan.transport
        sizes = [
            message_bytes(boundary, name)
            for edge in describe_boundaries(plan)
            for members in edge.variants
            for boundary in members
            for name in {transport.forward, transport.backward}
        ]
        return self.message_us(max(sizes)) if sizes else Fraction(0)

    def _missing(self, what: str) -> BadPlanAtError:
        message = f"`{self.file}` has no time of a {what}"
        mend = "measure a run of this plan: `pipeproof run PLAN --profile FILE`"
        return BadPlanAtError(Finding(NOT_A_PROFILE.code, Severity.ERROR, message, help=mend), ("cost", "profile"))


def _points(messages: Iterable[SizedSpread]) -> Iterable[tuple[int, Fraction, int]]:
    return ((point.num_bytes, exact(point.median_us), point.count) for point in messages)


def _rounded(time: Fraction) -> Fraction:
    return round(time / GRID_US) * GRID_US
