"""Times from a profile: medians of stages, and curves over bytes of messages and collectives."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel

from pipeproof.cost.analytic_links import message_sizes
from pipeproof.cost.device_tables import exact
from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.schedule.ops import COLLECTIVE_KINDS, GATHER_KINDS, OpKind
from pipeproof.specs.cost import CostSpec
from pipeproof.specs.exact_times import GRID_US, rounded
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.profile_file import (
    NOT_A_PROFILE,
    OTHER_PLAN,
    UNREADABLE_PROFILE,
    MeasuredPlan,
    Profile,
    ProfileError,
    read_profile,
)
from pipeproof.stages.describe.boundary import work_item_sizes
from pipeproof.stages.describe.model_family import describe_boundaries, stage_layers


@dataclass(frozen=True, slots=True)
class ProfileTimes:
    """Times of stages, messages and collectives from a profile.

    ``messages`` is None if the run had none; ``collectives`` are by kind
    and number of members. ``file`` is the name of the profile in messages.
    """

    profile: Profile
    file: str
    messages: Curve | None
    collectives: Mapping[tuple[OpKind, int], Curve]

    @classmethod
    def of_plan(cls, plan: PlanSpec) -> Self:
        """The times of ``cost.profile``, which is relative to the working directory.

        Raises:
            ProfileError: PP161, it is not a whole profile.
            BadPlanAtError: PP160, it cannot be read; PP162, it was measured on another plan.
        """
        assert plan.cost.profile is not None
        try:
            profile = read_profile(Path(plan.cost.profile))
        except ProfileError as error:
            if error.findings[0].code != UNREADABLE_PROFILE.code:
                raise  # it has its location in the profile
            raise BadPlanAtError(error.findings[0], ("cost", "profile")) from None
        require_fit(profile, plan)
        return cls.of(profile, plan.cost.profile)

    @classmethod
    def of(cls, profile: Profile, file: str) -> Self:
        """The times of a profile. Messages outside of steps count only if the steps themselves had none."""
        points: dict[tuple[OpKind, int], list[tuple[int, Fraction, int]]] = {}
        for point in profile.collectives:
            curve = points.setdefault((OpKind(point.kind), point.axis_size), [])
            curve.append((point.num_bytes, exact(point.median_us), point.count))
        messages = profile.messages or profile.bare_messages
        return cls(
            profile,
            file,
            Curve.through((p.num_bytes, exact(p.median_us), p.count) for p in messages) if messages else None,
            {key: Curve.through(curve) for key, curve in points.items()},
        )

    def message_us(self, num_bytes: int) -> Fraction:
        """Microseconds of one message of ``num_bytes``, to the nanosecond, once both sides are ready.

        Raises:
            BadPlanAtError: PP161, the profile has no message.
        """
        if self.messages is None:
            raise self._missing("message between stages")
        return rounded(self.messages.at(num_bytes))

    def collective_us(self, kind: OpKind, axis_size: int, num_bytes: int) -> Fraction:
        """Microseconds of a collective from the arrival of its last member, to the nanosecond.

        ``num_bytes`` is the size of the tensor that each of its ``axis_size`` members puts in. Gathers of the partial
        transport count as all-gathers. A collective of one member takes no time.

        Raises:
            BadPlanAtError: PP161, the profile has none of this kind among so many ranks.
            ValueError: ``kind`` is not a collective.
        """
        if kind not in COLLECTIVE_KINDS:
            raise ValueError(f"{kind} is not a collective")
        if axis_size == 1:
            return Fraction(0)
        name = OpKind.ALL_GATHER if kind in GATHER_KINDS else kind
        curve = self.collectives.get((name, axis_size))
        if curve is None and self.profile.source is not None:
            return Fraction(0)  # part of the time of its operation
        if curve is None:
            raise self._missing(f"{name} among {axis_size} ranks")
        return rounded(curve.at(num_bytes))

    def resolved(self, plan: PlanSpec) -> CostSpec:
        """The times of the plan's stages as given times; every message has the time of the largest.

        Raises:
            BadPlanAtError: PP161, the profile lacks the time of a stage or of messages.
        """
        times: dict[str, Any] = {
            "forward_us": [max(time, GRID_US) for time in self._stages("F")],  # every stage takes some time
            "optimizer_us": self._stages("STEP"),
            "p2p_latency_us": self._largest_message_us(plan),
            "p2p": plan.cost.p2p,
        }
        return CostSpec.model_validate(times | self._backwards())

    def _backwards(self) -> dict[str, list[Fraction]]:
        """Whole backwards, or both parts if any stage has separate ones; each part of a whole one is half."""
        parts = [(self._median(stage, "I"), self._median(stage, "W")) for stage in range(len(self.profile.stages))]
        if all(None in pair for pair in parts):
            return {"backward_us": self._stages("B")}
        halves: list[tuple[Fraction, Fraction]] = []
        for stage, (first, second) in enumerate(parts):
            if first is not None and second is not None:
                halves.append((rounded(first), rounded(second)))
            else:
                half = rounded(self._time(stage, "B") / 2)
                halves.append((half, half))
        return {"backward_input_us": [i for i, _ in halves], "backward_weight_us": [w for _, w in halves]}

    def _stages(self, kind: str) -> list[Fraction]:
        return [rounded(self._time(stage, kind)) for stage in range(len(self.profile.stages))]

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
            size
            for edge in describe_boundaries(plan)
            for members in edge.variants
            for name in {transport.forward, transport.backward}
            for size in message_sizes(members, name, packed=transport.messages == "packed")
        ]
        return self.message_us(max(sizes)) if sizes else Fraction(0)

    def _missing(self, name: str) -> BadPlanAtError:
        message = f"`{self.file}` has no time of a {name}"
        fix = "measure a run of this plan: `pipeproof run PLAN --profile FILE`"
        return BadPlanAtError(NOT_A_PROFILE.finding(message, help=fix), ("cost", "profile"))


_FREE = frozenset({"pp", "order"})
"""Keys of the topology that do not change the computations of a stage's ranks."""
_MOST_NAMED = 5


def measured_sections(plan: PlanSpec) -> dict[str, Any]:
    """Sections that a profile keeps of a plan in addition to its digest, by the names of ``MeasuredPlan``."""
    schedule, run = plan.schedule, plan.run
    return {
        "model": _given(plan.model),
        "topology": _given(plan.topology),
        "stages": stage_layers(plan),
        "schedule": schedule.kind,
        "num_micro_batches": schedule.num_micro_batches,
        "micro_batch_size": schedule.micro_batch_size,
        "uneven": len(work_item_sizes(plan)[0]) > 1,
        "backend": run.backend,
        "device": run.device,
        "dtype": run.dtype,
        "optimizer": run.optimizer,
    }


def require_fit(profile: Profile, plan: PlanSpec) -> None:
    """Refuse a profile that was not measured on the plan's stages.

    Raises:
        BadPlanAtError: PP162, with the differences; the layers cannot be put onto the stages.
    """
    differences = list(_differences(profile.plan, plan))
    if not differences:
        return
    shown = differences[:_MOST_NAMED]
    if len(differences) > len(shown):
        shown.append(f"{len(differences) - len(shown)} more")
    message = f"`{plan.cost.profile}` was measured on another plan: {'; '.join(shown)}"
    fix = "measure this plan: `pipeproof run PLAN --profile FILE`"
    raise BadPlanAtError(OTHER_PLAN.finding(message, help=fix), ("cost", "profile"))


def _given(section: BaseModel) -> dict[str, Any]:
    """The keys of a section that have other values than their defaults: later releases may have more keys."""
    return section.model_dump(mode="json", exclude_defaults=True)


def _differences(measured: MeasuredPlan, plan: PlanSpec) -> Iterator[str]:
    expected = measured_sections(plan)
    yield from _of_section("model", measured.model, expected["model"])
    yield from _of_section("topology", measured.topology, expected["topology"])
    yield from _of_stages(measured.stages, expected["stages"])
    names = {"micro_batch_size": "schedule"} | dict.fromkeys(("backend", "device", "dtype", "optimizer"), "run")
    for name, section in names.items():
        yield from _of_value(f"{section}.{name}", getattr(measured, name), expected[name])
    if measured.uneven or expected["uneven"]:
        where = "there and here" if measured.uneven and expected["uneven"] else "there" if measured.uneven else "here"
        yield f"micro-batches differ in size {where}, and a profile has one time for all"


def _of_section(name: str, measured: Mapping[str, Any], planned: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted((measured.keys() | planned.keys()) - (_FREE if name == "topology" else frozenset())):
        yield from _of_value(f"{name}.{key}", measured.get(key), planned.get(key))


def _of_value(name: str, measured: object, planned: object) -> Iterator[str]:
    if measured != planned:
        yield f"{name} is {_text(measured)} there, {_text(planned)} here"


def _of_stages(measured: tuple[tuple[str, ...], ...], planned: tuple[tuple[str, ...], ...]) -> Iterator[str]:
    if len(measured) != len(planned):
        yield f"it has {len(measured)} stages there, {len(planned)} here"
    elif measured != planned:
        stage = next(number for number, (a, b) in enumerate(zip(measured, planned, strict=True)) if a != b)
        yield f"stage {stage} has layers {', '.join(measured[stage])} there, {', '.join(planned[stage])} here"


def _text(value: object) -> str:
    if value is None:
        return "the default"
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Curve:
    """A time that never falls with the bytes: lines through the points.

    Below the smallest size it is constant, beyond the largest it has the slope of
    the last line; through one point it is constant.
    """

    sizes: tuple[int, ...]
    times: tuple[Fraction, ...]

    @classmethod
    def through(cls, points: Iterable[tuple[int, Fraction, int]]) -> Self:
        """The curve through (bytes, microseconds, how often measured), one or more, in order of their bytes.

        If a larger size took less, the two count as one time, the mean weighted by numbers of measurements (isotonic
        regression by pooling adjacent violators; Barlow et al., Statistical inference under order restrictions, 1972).
        """
        pools: list[tuple[Fraction, int, list[int]]] = []
        for size, time, count in points:
            pool = (time, count, [size])
            while pools and pools[-1][0] > pool[0]:
                before, weight, sizes = pools.pop()
                total = weight + pool[1]
                pool = ((before * weight + pool[0] * pool[1]) / total, total, sizes + pool[2])
            pools.append(pool)
        pairs = [(size, time) for time, _, sizes in pools for size in sizes]
        return cls(tuple(size for size, _ in pairs), tuple(time for _, time in pairs))

    def at(self, num_bytes: int) -> Fraction:
        """Microseconds at a size, exact."""
        sizes, times = self.sizes, self.times
        if num_bytes <= sizes[0] or len(sizes) == 1:
            return times[0]
        after = min(bisect_right(sizes, num_bytes), len(sizes) - 1)
        low, high = sizes[after - 1], sizes[after]
        return times[after - 1] + (times[after] - times[after - 1]) * Fraction(num_bytes - low, high - low)
