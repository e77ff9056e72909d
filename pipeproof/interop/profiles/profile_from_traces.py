"""Profile of a plan from traces of PyTorch's profiler: the files, and the profile of their times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import median
from typing import get_args

from pydantic import ValidationError

from pipeproof.cost.measured_profile import measured_sections
from pipeproof.foreign_text import open_foreign
from pipeproof.interop.profiles.kineto_trace import read_kineto
from pipeproof.interop.profiles.profile_codes import not_assigned, unreadable
from pipeproof.interop.profiles.rank_trace import RankTrace
from pipeproof.interop.profiles.trace_measurements import Measurements, measure_traces
from pipeproof.schedule.ops import SEND_KINDS, OpKind
from pipeproof.specs.cost import CostSpec
from pipeproof.specs.load_plan import LoadedPlan
from pipeproof.specs.profile_file import (
    ClockOfTimes,
    Host,
    MeasuredPlan,
    Profile,
    ProfileSource,
    SizedSpread,
    Spread,
    StageOp,
    StageTimes,
    Steps,
    TimedKind,
    by_size,
    spread_of,
)
from pipeproof.verify.certificate import graph_digest
from pipeproof.verify.subject import Subject, make_subject

_TRACES = "traces of PyTorch's profiler"
_SUFFIXES = (".json", ".json.gz")
"""Files of a directory that are read."""
_WHOLE = "give whole files of one run"
_GZIP = b"\x1f\x8b"


def measured_files(names: Sequence[Path]) -> list[Path]:
    """Return the files, and the files in directories that may be traces.

    Raises:
        BadPlanError: PP163, one does not exist, or a directory has none.
    """
    files: list[Path] = []
    for name in names:
        if name.is_dir():
            inside = sorted(p for p in name.iterdir() if p.is_file() and p.name.endswith(_SUFFIXES))
            if not inside:
                raise unreadable(str(name), f"no file there ends with {', '.join(_SUFFIXES)}", f"name {_TRACES}")
            files += inside
        elif not name.exists():
            raise unreadable(str(name), "there is no such file", f"name {_TRACES}")
        else:
            files.append(name)
    return files


def read_trace(path: Path) -> RankTrace:
    """Return the trace of a rank.

    Raises:
        BadPlanError: PP163, it is not a trace, or it cannot be read; PP164.
    """
    try:
        with open_foreign(path) as stream:
            begin = stream.read(64)
    except OSError as error:
        raise unreadable(str(path), f"the file cannot be read: {error.strerror}", f"name {_TRACES}") from error
    if begin.lstrip()[:1] != b"{" and not (begin.startswith(_GZIP) and ".json" in path.name):
        raise unreadable(str(path), "it is not a trace", f"give {_TRACES}")
    return read_kineto(path)


def profile_of_files(paths: Sequence[Path], loaded: LoadedPlan, message_us: Fraction | None) -> Profile:
    """Return the profile of a plan from the files of one of its runs.

    ``message_us`` is the time of a message, for files that do not show it; it replaces measured ones.

    Raises:
        BadPlanError: PP163, a file cannot be read; PP164, its events cannot be assigned to operations of the plan.
    """
    spec = loaded.spec.model_copy(update={"cost": CostSpec()})  # the plan may name the profile that is being made
    subject = make_subject(replace(loaded, spec=spec))
    measurements = measure_traces([read_trace(path) for path in paths], subject)
    try:
        return _profile(measurements, subject, message_us)
    except ValidationError as error:  # a time beyond the limits of a profile
        raise unreadable(
            ", ".join(measurements.files), f"a time is out of range: {error.errors()[0]['msg']}", _WHOLE
        ) from error


def _profile(measurements: Measurements, subject: Subject, message_us: Fraction | None) -> Profile:
    notes = list(measurements.notes)
    return Profile(
        profile=1,
        machine=None,
        plan=MeasuredPlan(digest=graph_digest(subject), **measured_sections(subject.plan.spec)),
        steps=Steps(run=measurements.num_steps, counted=measurements.num_counted),
        stages=tuple(_stages(measurements, subject, notes)),
        messages=() if message_us is not None else by_size(measurements.messages),
        bare_messages=tuple(_given_messages(measurements, subject, message_us, notes)),
        collectives=(),
        host=Host(between_ops=None, after_wait=None),
        clock=ClockOfTimes(name="device" if measurements.devices else "host", accuracy_us=0.0),
        source=ProfileSource(
            format="kineto",
            files=tuple(measurements.files),
            devices=tuple(measurements.devices),
            step_us=None if measurements.step_ns is None else measurements.step_ns / 1000,
            assumptions=tuple(notes),
        ),
    )


def _stages(measurements: Measurements, subject: Subject, notes: list[str]) -> Iterator[StageTimes]:
    """Yield the times of the stages; the optimizer includes the sums of gradients, whose collectives are not listed."""
    num_stages = len(subject.plan.stages)
    reduced = any(kind is OpKind.REDUCE_GRAD for _, kind in measurements.ops)
    if not any(kind is OpKind.STEP for _, kind in measurements.ops):
        notes.append("no time of the optimizer: its step takes 0 us" + (" but for sums of gradients" * reduced))
    elif reduced:
        notes.append("the time of the optimizer includes the sums of gradients")
    for stage in range(num_stages):
        times = {kind: measurements.ops.get((stage, OpKind(kind)), []) for kind in get_args(TimedKind)}
        if not times["F"] or not (times["B"] or (times["I"] and times["W"])):
            lacking = "forward" if not times["F"] else "backward"
            raise not_assigned(
                ", ".join(measurements.files), f"no time of a {lacking} of stage {stage}",
                "give the files of one rank of each stage at least",
            )  # fmt: skip
        sums = round(median(times["REDUCE_GRAD"])) if times["REDUCE_GRAD"] else 0
        times["STEP"] = [time + sums for time in times["STEP"] or [0]]
        spreads = {kind: spread_of(Spread, samples) for kind, samples in times.items()}
        yield StageTimes(
            stage=stage,
            ops=tuple(
                StageOp(kind=kind, whole=spread, own=spread) for kind, spread in spreads.items() if spread is not None
            ),
        )


def _given_messages(
    measurements: Measurements, subject: Subject, message_us: Fraction | None, notes: list[str]
) -> Iterator[SizedSpread]:
    """Yield the time of a message that was given, for all sizes."""
    if message_us is not None:
        spread = spread_of(SizedSpread, [round(message_us * 1000)], bytes=0)
        assert spread is not None
        notes.append(f"every message takes {float(message_us):g} us, as given")
        yield spread
    elif not measurements.messages and subject.graph.is_kind(SEND_KINDS).any():
        raise not_assigned(
            ", ".join(measurements.files), "no message shows its time without waits",
            "give it: `--message-us 20`, for instance from `pipeproof doctor` or `rehearse`; 0 leaves messages out",
        )  # fmt: skip
