"""The file that ``pipeproof run PLAN --profile FILE`` writes and ``cost.profile`` reads.

Times are microseconds of one machine's monotonic clock, as medians and
quartiles over all ranks and counted steps.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from pipeproof.specs.finding import BadPlanError, Finding, Location, Severity
from pipeproof.specs.problems import describe_value, dotted
from pipeproof.specs.profile import NOT_A_PROFILE, UNREADABLE_PROFILE
from pipeproof.specs.times import MAX_TIME_US
from pipeproof.specs.yaml_tree import parse_text

MAX_BYTES = 2**24
"""Largest profile."""
_MOST_FINDINGS = 5

_Time = Annotated[float, Field(ge=0, le=MAX_TIME_US)]
_Count = Annotated[int, Field(ge=1)]
_Bytes = Annotated[int, Field(ge=0)]
_Item = TypeVar("_Item")
_Listed = Annotated[tuple[_Item, ...], Field(strict=False)]
"""A list in the file."""
_Section = Annotated[dict[str, JsonValue], Field(json_schema_extra={"required": []})]
"""A section of a plan, which a release may have other keys for."""

TimedKind = Literal["F", "B", "I", "W", "REDUCE_GRAD", "STEP"]
"""What a stage does that takes time of its own, by its mark in the text form of operations."""

CollectiveName = Literal["ALL_REDUCE", "ALL_GATHER", "REDUCE_SCATTER", "ALL_TO_ALL", "BROADCAST", "BARRIER"]
"""A collective; the gathers of the partial transport are all-gathers."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Spread(_Part):
    """How long something took, as often as it was measured."""

    count: _Count = Field(description="How many were measured.")
    q1_us: _Time = Field(description="Lower quartile.")
    median_us: _Time = Field(description="Median.")
    q3_us: _Time = Field(description="Upper quartile.")
    mean_us: _Time = Field(description="Mean: far above the median where a few took very long.")

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not self.q1_us <= self.median_us <= self.q3_us:
            raise ValueError("quartiles and median are not in order")
        return self


class SizedSpread(Spread):
    """The same of messages of one size."""

    num_bytes: _Bytes = Field(alias="bytes", description="Bytes of one message.")


class CollectivePoint(Spread):
    """The same of collectives of one kind and size, from the arrival of the last member to its end on each."""

    kind: CollectiveName = Field(description="The collective.")
    axis_size: int = Field(ge=2, description="Members of the group.")
    num_bytes: _Bytes = Field(alias="bytes", description="Bytes of the tensor that each rank puts in.")


class StageOp(_Part):
    """One kind of operation of a stage."""

    kind: TimedKind = Field(description="The operation.")
    whole: Spread = Field(description="From start to end, the collectives inside among it.")
    own: Spread = Field(description="The same without the collectives inside.")


class StageTimes(_Part):
    """What one stage takes for a micro-batch, over its tensor- and data-parallel ranks."""

    stage: int = Field(ge=0, description="Global stage.")
    ops: _Listed[StageOp] = Field(description="Each kind of operation once.")


class Machine(_Part):
    """Where it was measured."""

    processor: str = Field(description="Model of the processor.")
    cores: _Count = Field(description="Processors that the processes may use, all together.")
    processes: _Count = Field(description="Processes of the plan's ranks; the reference runs after them.")
    threads: _Count = Field(description="Compute threads of each process.")
    framework: str = Field(description="What computes, with its version.")
    devices: _Listed[str] = Field(default=(), description="The GPU of each rank; none where processors compute.")
    system: str = Field(description="The operating system.")


class MeasuredPlan(_Part):
    """The plan that was measured, as far as its times depend on it. Keys with default values are left out."""

    digest: str = Field(pattern="^[0-9a-f]{64}$", description="Of the plan, as `check` prints it.")
    model: _Section = Field(description="Section `model`.")
    topology: _Section = Field(description="Section `topology`.")
    stages: _Listed[_Listed[str]] = Field(description="The layers of each global stage.")
    schedule: str = Field(description="Kind of schedule.")
    num_micro_batches: _Count = Field(description="Micro-batches of a step.")
    micro_batch_size: _Count = Field(description="Sequences in a micro-batch.")
    uneven: bool = Field(
        default=False,
        description="Whether micro-batches differ in size: times are then of all together, and predict nothing.",
    )
    backend: str = Field(description="`run.backend`.")
    device: str = Field(description="`run.device`.")
    dtype: str = Field(description="`run.dtype`.")
    optimizer: str = Field(description="`run.optimizer`.")


class Steps(_Part):
    """Which steps count."""

    run: _Count = Field(description="Steps that were run.")
    counted: _Count = Field(description="The last ones, which are counted: without the first, where there are others.")


class ClockOfTimes(_Part):
    """Whose clock the times are of."""

    name: Literal["host", "device"] = Field(
        description="Of processes that wait for what they ask for, or of GPUs that run behind them."
    )
    accuracy_us: _Time = Field(description="How far times of two ranks may be off against each other, at most.")


HOST_CLOCK = ClockOfTimes(name="host", accuracy_us=0.0)
"""One for all processes of a machine."""


class DeviceMemory(_Part):
    """The most that one rank's allocator had in the last step."""

    rank: int = Field(ge=0, description="Global rank.")
    allocated_bytes: _Bytes = Field(description="Given out to tensors.")
    reserved_bytes: _Bytes = Field(description="Taken from the device; the rest is rounding and gaps.")


class Host(_Part):
    """What the host takes where a simulation has it take nothing; no prediction uses it."""

    between_ops: Spread | None = Field(description="From the end of an operation to the start of the next on its rank.")
    after_wait: Spread | None = Field(
        description="From the end of a transfer to that of the wait for it, which began before."
    )


class Profile(_Part):
    """Measured times of a plan."""

    profile: Literal[1] = Field(description="Version of this format.")
    machine: Machine
    plan: MeasuredPlan
    steps: Steps
    stages: _Listed[StageTimes] = Field(description="By global stage.")
    messages: _Listed[SizedSpread] = Field(
        description="In the steps: from a send's post until its receive is done, where the receive was posted first; "
        "by bytes."
    )
    bare_messages: _Listed[SizedSpread] = Field(
        description="The same before the first step, one message at a time and nothing beside it."
    )
    collectives: _Listed[CollectivePoint] = Field(description="By kind, axis size and bytes.")
    host: Host
    clock: ClockOfTimes = Field(default=HOST_CLOCK)
    memory: _Listed[DeviceMemory] = Field(default=(), description="By rank; none where processors compute.")

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
        if any(a >= b for one in points for a, b in pairwise(one)):
            raise ValueError("points of messages or collectives are not in order of their sizes, each once")
        return self

    def to_json(self) -> dict[str, Any]:
        """The content of the file; see ``docs/schemas/profile.schema.json``."""
        return self.model_dump(mode="json", by_alias=True)


class ProfileError(BadPlanError):
    """A profile that cannot be read, with the place in it."""


def profile_json_schema() -> dict[str, Any]:
    """The JSON Schema of the file."""
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
    problems = [_finding(problem.message, tree.source.at(problem.span)) for problem in tree.problems]
    if problems or not isinstance(tree.data, dict):
        found = "nothing" if tree.data is None else describe_value(tree.data)
        raise ProfileError(
            *(problems or [_finding(f"`{shown}` is not a profile, found {found}", Location(shown, 1, 1))])
        )
    try:
        return Profile.model_validate(tree.data)
    except ValidationError as error:
        findings, details = [], error.errors(include_url=False)
        for detail in details[:_MOST_FINDINGS]:
            at = tuple(detail["loc"])
            where = f"`{dotted(at)}`" if at else f"`{shown}`"
            findings.append(
                _finding(f"{where}: {detail['msg'][:1].lower()}{detail['msg'][1:]}", tree.source.locate(at))
            )
        if len(details) > len(findings):
            findings.append(_finding(f"{len(details) - len(findings)} more of the kind", Location(shown, 1, 1)))
        raise ProfileError(*findings) from error


def _finding(message: str, place: Location) -> Finding:
    mend = "measure anew: `pipeproof run PLAN --profile FILE`"
    return Finding(NOT_A_PROFILE.code, Severity.ERROR, message, place, mend)


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _unreadable(f"cannot read `{path}`: {reason[:1].lower()}{reason[1:]}") from error
    if len(content) > MAX_BYTES:
        raise _unreadable(f"`{path}` has more than {MAX_BYTES} bytes, which no profile needs")
    return text


def _unreadable(message: str) -> ProfileError:
    mend = "`pipeproof run PLAN --profile FILE` writes a profile"
    return ProfileError(Finding(UNREADABLE_PROFILE.code, Severity.ERROR, message, help=mend))
