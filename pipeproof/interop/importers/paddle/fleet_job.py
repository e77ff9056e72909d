"""A Fleet job, independent of its file: degrees, order and switches, each with the setting it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import KeyPath, dotted
from pipeproof.interop.importers.imported import Flags

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class SourcedValue(Generic[T_co]):
    """A value, its setting and location; ``by_default`` if no file has the setting."""

    value: T_co
    setting: str
    location: Location | None = None
    by_default: bool = False

    @property
    def origin(self) -> str:
        """The setting, for the comment of a plan file."""
        return f"{self.setting} (by default)" if self.by_default else self.setting

    @property
    def text(self) -> str:
        """The setting with its value, such as `` `partial_send_recv` true``, for messages."""
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"`{self.setting}` {value}" + (" (the default)" if self.by_default else "")


@dataclass(frozen=True)
class FleetJob:
    """The settings on which Fleet's pipeline depends, as the classes of Paddle 3.3.1 read them.

    ``order`` are the axes of Fleet's mesh, the slowest first. ``seq_method``
    is the partition of layers into stages, None if it is not given. With
    ``guard``, a trainer turns partial sends off under sequence parallelism.
    """

    pp: SourcedValue[int]
    tp: SourcedValue[int]
    dp: SourcedValue[int | None]
    sharding: SourcedValue[int | None]
    sep: SourcedValue[int]
    cp: SourcedValue[int]
    ep: SourcedValue[int]
    order: tuple[str, ...]
    accumulate: SourcedValue[int]
    micro_batch_size: SourcedValue[int]
    chunks: SourcedValue[int]
    partial: SourcedValue[bool]
    batched: SourcedValue[bool]
    overlapped: SourcedValue[bool]
    cached_shapes: SourcedValue[bool]
    variable_lengths: SourcedValue[bool]
    balanced: SourcedValue[bool]
    dualpipe_v: SourcedValue[bool]
    overlapped_backward: SourcedValue[bool]
    sequence_parallel: SourcedValue[bool | None]
    guard: bool
    cut: SourcedValue[str] | None = None
    empty_head: SourcedValue[int] | None = None
    empty_tail: SourcedValue[int] | None = None
    mtp: SourcedValue[int] | None = None
    sequence: SourcedValue[int] | None = None
    dtype: SourcedValue[str] | None = None

    @property
    def sends_partially(self) -> bool:
        """True if messages are partial: P2P is batched, and the pipeline class supports it.

        ``PipelineParallel.__init__`` turns the batched path off if P2P is
        overlapped; DualPipeV's helper has no partial sends.
        """
        return (
            self.partial.value
            and self.batched.value
            and not self.overlapped.value
            and not self.dualpipe_v.value
            and self.tp.value > 1
            and self.pp.value > 1
        )


OVERRIDES: Mapping[KeyPath, str] = MappingProxyType(
    {
        ("topology", "pp"): "pp",
        ("topology", "tp"): "tp",
        ("topology", "cp"): "cp",
        ("topology", "sequence_parallel"): "sequence_parallel",
        ("schedule", "num_micro_batches"): "accumulate",
        ("schedule", "micro_batch_size"): "micro_batch_size",
        ("schedule", "num_chunks"): "chunks",
    }
)
"""Plan keys of settings on which other settings of a job depend, and the fields of these settings."""


def overridden(job: FleetJob, flags: Flags) -> FleetJob:
    """Return the job with the changes of the command line; the plan refuses values of a wrong type."""
    changes: dict[str, Any] = {}
    for path, name in OVERRIDES.items():
        value = flags.settings.get(path)
        expected_type = bool if name == "sequence_parallel" else int
        if type(value) is expected_type and (expected_type is bool or value >= 1):
            changes[name] = SourcedValue(value, f"--set {dotted(path)}")
    if "cp" in changes:
        changes["sep"] = SourcedValue(1, job.sep.setting, by_default=True)
    return replace(job, **changes)
