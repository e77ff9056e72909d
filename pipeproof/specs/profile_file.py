"""The file of measured times that ``pipeproof run PLAN --profile FILE`` writes and ``cost.profile`` reads.

Times are microseconds of a monotonic clock, corrected for several hosts, as
medians and quartiles over all ranks and counted steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, quantiles
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from pipeproof.diagnostics.finding import BadPlanError, Finding, Location, RuleDoc
from pipeproof.diagnostics.problems import grouped
from pipeproof.diagnostics.source import UnreadableTextError, read_utf8
from pipeproof.diagnostics.yaml_tree import parse_text, read_model
from pipeproof.specs.exact_times import MAX_TIME_US

MAX_BYTES = 2**24
"""Largest profile."""

_Time = Annotated[float, Field(ge=0, le=MAX_TIME_US)]
_Count = Annotated[int, Field(ge=1)]
_Bytes = Annotated[int, Field(ge=0)]
_Item = TypeVar("_Item")
_Listed = Annotated[tuple[_Item, ...], Field(strict=False)]
"""A list in the file."""
_Section = Annotated[dict[str, JsonValue], Field(json_schema_extra={"required": []})]
"""A section of a plan; other releases may have other keys."""

TimedKind = Literal["F", "B", "I", "W", "REDUCE_GRAD", "STEP"]
"""An operation of a stage that takes time, by its mark in the text form of operations."""

CollectiveName = Literal["ALL_REDUCE", "ALL_GATHER", "REDUCE_SCATTER", "ALL_TO_ALL", "BROADCAST", "BARRIER"]
"""A collective; the gathers of the partial transport are all-gathers."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Spread(_Part):
    """Statistics of a measured time."""

    count: _Count = Field(description="Number of measurements.")
    q1_us: _Time = Field(description="Lower quartile.")
    median_us: _Time = Field(description="Median.")
    q3_us: _Time = Field(description="Upper quartile.")
    mean_us: _Time = Field(description="Mean: far above the median if a few took very long.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.q1_us <= self.median_us <= self.q3_us:
            raise ValueError("quartiles and median are not in order")
        return self


class SizedSpread(Spread):
    """Statistics of messages of one size."""

    num_bytes: _Bytes = Field(alias="bytes", description="Bytes of one message.")


class CollectivePoint(Spread):
    """Statistics of collectives of one kind and size, from the arrival of the last member to the end on each."""

    kind: CollectiveName = Field(description="The collective.")
    axis_size: int = Field(ge=2, description="Members of the group.")
    num_bytes: _Bytes = Field(alias="bytes", description="Bytes of each rank's input tensor.")


class StageOp(_Part):
    """One kind of operation of a stage."""

    kind: TimedKind = Field(description="The operation.")
    whole: Spread = Field(description="From start to end, including the collectives inside.")
    own: Spread = Field(description="From start to end, without the collectives inside.")


class StageTimes(_Part):
    """Times of one stage for a micro-batch, over its tensor- and data-parallel ranks."""

    stage: int = Field(ge=0, description="Global stage.")
    ops: _Listed[StageOp] = Field(description="Each kind of operation once.")


class Machine(_Part):
    """The machine of the measurement."""

    processor: str = Field(description="Model of the processor.")
    cores: _Count = Field(description="Number of processors that all processes together may use.")
    processes: _Count = Field(description="Number of processes of the plan's ranks; the reference runs after them.")
    threads: _Count = Field(description="Number of compute threads of each process.")
    framework: str = Field(description="The framework, with its version.")
    devices: _Listed[str] = Field(default=(), description="The GPU of each rank; none for runs on CPUs.")
    system: str = Field(description="The operating system.")


class MeasuredPlan(_Part):
    """The keys of the measured plan on which its times depend. Keys with default values are left out."""

    digest: str = Field(pattern="^[0-9a-f]{64}$", description="Digest of the plan, as `check` prints it.")
    model: _Section = Field(description="Section `model`.")
    topology: _Section = Field(description="Section `topology`.")
    stages: _Listed[_Listed[str]] = Field(description="The layers of each global stage.")
    schedule: str = Field(description="Kind of schedule.")
    num_micro_batches: _Count = Field(description="Micro-batches of a step.")
    micro_batch_size: _Count = Field(description="Sequences in a micro-batch.")
    uneven: bool = Field(
        default=False,
        description="Whether micro-batches differ in size: times are then over all of them, and predict nothing.",
    )
    backend: str = Field(description="`run.backend`.")
    device: str = Field(description="`run.device`.")
    dtype: str = Field(description="`run.dtype`.")
    optimizer: str = Field(description="`run.optimizer`.")


class Steps(_Part):
    """Steps of the measurement."""

    run: _Count = Field(description="Number of steps that were run.")
    counted: _Count = Field(description="Number of last steps that are counted: without the first, if there are more.")


class ClockOfTimes(_Part):
    """The clock of the times."""

    name: Literal["host", "device"] = Field(
        description="host: processes that wait for each operation; device: GPUs that run asynchronously."
    )
    accuracy_us: _Time = Field(description="Largest clock difference between two ranks.")


HOST_CLOCK = ClockOfTimes(name="host", accuracy_us=0.0)
"""One clock for all processes of a machine."""


class DeviceMemory(_Part):
    """Peak memory of one rank's allocator in the last step."""

    rank: int = Field(ge=0, description="Global rank.")
    allocated_bytes: _Bytes = Field(description="Bytes in tensors.")
    reserved_bytes: _Bytes = Field(description="Bytes taken from the device; the rest is rounding and fragmentation.")


class Host(_Part):
    """Host overhead, which a simulation takes as zero; no prediction uses it."""

    between_ops: Spread | None = Field(description="From the end of an operation to the start of the next on its rank.")
    after_wait: Spread | None = Field(
        description="From the end of a transfer to the end of the wait for it, if the wait began before."
    )


TraceFormat = Literal["kineto"]
"""A source of times other than our own measurement."""


class ProfileSource(_Part):
    """The files from which `pipeproof import profile` made the times."""

    format: TraceFormat = Field(description="Their kind.")
    files: _Listed[str] = Field(description="Their names.")
    devices: _Listed[str] = Field(description="The GPU of each rank; none for runs on CPUs.")
    step_us: _Time | None = Field(
        description="Median of the counted steps, from the first start to the last end of a computation. Null if "
        "not known."
    )
    assumptions: _Listed[str] = Field(description="Assumptions and omissions.")


class Profile(_Part):
    """Measured times of a plan."""

    profile: Literal[1] = Field(description="Version of this format.")
    machine: Machine | None = Field(description="Null in a profile that was made from traces.")
    plan: MeasuredPlan
    steps: Steps
    stages: _Listed[StageTimes] = Field(description="By global stage.")
    messages: _Listed[SizedSpread] = Field(
        description="In the steps, by bytes: from a send's post until its receive is done, for receives that were "
        "posted before."
    )
    bare_messages: _Listed[SizedSpread] = Field(
        description="Messages before the first step, one at a time without other traffic; by bytes."
    )
    collectives: _Listed[CollectivePoint] = Field(description="By kind, axis size and bytes.")
    host: Host
    clock: ClockOfTimes = Field(default=HOST_CLOCK)
    memory: _Listed[DeviceMemory] = Field(default=(), description="By rank; none for runs on CPUs.")
    source: ProfileSource | None = Field(
        default=None,
        description="The traces that the profile was made from; null for our own measurements. With it, the "
        "times of operations include their collectives, and a collective that is not listed takes no time.",
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        if [stage.stage for stage in self.stages] != list(range(len(self.plan.stages))):
            raise ValueError(f"`stages` does not list stages 0 to {len(self.plan.stages) - 1} in order")
        for stage in self.stages:
            if len({op.kind for op in stage.ops}) != len(stage.ops):
                raise ValueError(f"stage {stage.stage} has an operation twice")
        points: list[list[tuple[str, int, int]]] = [
            [(point.kind, point.axis_size, point.num_bytes) for point in self.collectives],
            [("", 0, point.num_bytes) for point in self.messages],
            [("", 0, point.num_bytes) for point in self.bare_messages],
        ]
        if any(a >= b for series in points for a, b in pairwise(series)):
            raise ValueError("points of messages or collectives are not in order of their sizes, each once")
        return self

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file; see ``docs/schemas/profile.schema.json``."""
        return self.model_dump(mode="json", by_alias=True)


UNREADABLE_PROFILE = RuleDoc(
    code="PP160",
    title="the profile cannot be read",
    explanation=(
        "`cost.profile` is relative to the plan file. The file does not exist, is a directory, may not be read, is "
        "larger than any profile, or is not UTF-8 text."
    ),
    wrong="cost: {profile: profiles/}   # a directory",
    right="cost: {profile: profiles/measured.json}",
)
NOT_A_PROFILE = RuleDoc(
    code="PP161",
    title="the file is not a complete profile",
    explanation=(
        "`pipeproof run PLAN --profile FILE` writes profiles, and this release reads one version of them. A file that "
        "is truncated, edited by hand or written by another tool is refused. So is a profile without a time for an "
        "operation of the plan: a missing time would be simulated as zero."
    ),
    wrong="cost: {profile: profiles/cut_short.json}",
    right="cost: {profile: profiles/measured.json}",
)
OTHER_PLAN = RuleDoc(
    code="PP162",
    title="the profile was measured on another plan",
    explanation=(
        "The time of a stage depends on the model, on the layers of the stage, on the mesh axes that shard them, on "
        "the size of a micro-batch, on the type of the elements and on the optimizer. All of these must equal the "
        "measured run's. Schedules, transports, the number of micro-batches and, if the stages are the same, the "
        "number of pipeline ranks may differ: predicting them is the purpose of a profile."
    ),
    wrong="cost: {profile: profiles/measured.json}\ntopology: {pp: 2, tp: 2}",
    right="cost: {profile: profiles/measured.json}\nschedule: {kind: gpipe, num_micro_batches: 8}",
)

PROFILE_CODES: tuple[RuleDoc, ...] = (UNREADABLE_PROFILE, NOT_A_PROFILE, OTHER_PLAN)


class ProfileError(BadPlanError):
    """A profile that cannot be read, with locations in it."""


def profile_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the file."""
    schema = Profile.model_json_schema(mode="serialization", by_alias=True)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "pipeproof run --profile",
        "description": "Measured times of a plan, in microseconds.",
    }


def read_profile(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ProfileError: PP160, it cannot be read; PP161, it is not a whole profile.
    """
    shown = str(path)
    tree = parse_text(_text_of(path), shown)
    profile = read_model(tree, Profile, "a profile", _finding)
    if isinstance(profile, list):
        raise ProfileError(*profile)
    return profile


def _finding(message: str, location: Location | None) -> Finding:
    fix = "measure again: `pipeproof run PLAN --profile FILE`"
    return NOT_A_PROFILE.finding(message, location, fix)


def _text_of(path: Path) -> str:
    try:
        return read_utf8(str(path), MAX_BYTES, "profile")
    except UnreadableTextError as error:
        fix = "`pipeproof run PLAN --profile FILE` writes a profile"
        raise ProfileError(UNREADABLE_PROFILE.finding(error.message, error.location, fix)) from None


_Spread = TypeVar("_Spread", bound=Spread)


def spread_of(form: type[_Spread], times_ns: Sequence[int], /, **others: object) -> _Spread | None:
    """Quartiles and mean in microseconds, to the nanosecond; None without samples."""
    if not times_ns:
        return None
    quartiles = quantiles(times_ns, n=4, method="inclusive") if len(times_ns) > 1 else [times_ns[0]] * 3
    q1, median, q3 = (round(time) / 1000 for time in quartiles)
    figures = {"q1_us": q1, "median_us": median, "q3_us": q3, "mean_us": round(fmean(times_ns)) / 1000}
    return form.model_validate({**others, "count": len(times_ns), **figures})


def by_size(samples: Iterable[tuple[int, int]]) -> tuple[SizedSpread, ...]:
    """Return the spread of each size in samples of (bytes, nanoseconds)."""
    times = sorted(grouped(samples).items())
    spreads = (spread_of(SizedSpread, of_size, bytes=size) for size, of_size in times)
    return tuple(spread for spread in spreads if spread is not None)
