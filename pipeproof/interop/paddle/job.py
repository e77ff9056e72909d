"""What a Fleet job is, whichever file says it: degrees, order and switches, each with the setting it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from pipeproof.interop.imported import Flags
from pipeproof.specs.finding import Location
from pipeproof.specs.problems import KeyPath, dotted

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Given(Generic[T_co]):
    """A value, the setting that gives it and its place; ``by_default`` where no file has the setting."""

    value: T_co
    setting: str
    location: Location | None = None
    by_default: bool = False

    @property
    def origin(self) -> str:
        """The setting, as the comment of a plan file names it."""
        return f"{self.setting} (by default)" if self.by_default else self.setting

    @property
    def words(self) -> str:
        """``partial_send_recv`` with its value, as a message names it."""
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"`{self.setting}` {value}" + (" (the default)" if self.by_default else "")


@dataclass(frozen=True)
class FleetJob:
    """The settings on which Fleet's pipeline depends, as the classes of Paddle 3.3.1 read them.

    ``order`` are the axes of Fleet's mesh, the slowest first. ``seq_method``
    is the cut of layers into stages, None where nothing says it. With
    ``guard``, a trainer turns partial sends off beside sequence parallelism.
    """

    pp: Given[int]
    tp: Given[int]
    dp: Given[int | None]
    sharding: Given[int | None]
    sep: Given[int]
    cp: Given[int]
    ep: Given[int]
    order: tuple[str, ...]
    accumulate: Given[int]
    micro_batch_size: Given[int]
    chunks: Given[int]
    partial: Given[bool]
    batched: Given[bool]
    overlapped: Given[bool]
    cached_shapes: Given[bool]
    variable_lengths: Given[bool]
    balanced: Given[bool]
    dualpipe_v: Given[bool]
    overlapped_backward: Given[bool]
    sequence_parallel: Given[bool | None]
    guard: bool
    cut: Given[str] | None = None
    empty_head: Given[int] | None = None
    empty_tail: Given[int] | None = None
    mtp: Given[int] | None = None
    sequence: Given[int] | None = None
    dtype: Given[str] | None = None

    @property
    def sends_partially(self) -> bool:
        """Whether the switch reaches the messages: P2P is batched, and the class is one that looks at it.

        ``PipelineParallel.__init__`` turns the batched path off where P2P is
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
"""Plan keys that say a setting on which others of a job depend, and that setting."""


def overridden(job: FleetJob, flags: Flags) -> FleetJob:
    """The job as the command line changes it; a value of another type is left for the plan to refuse."""
    changes: dict[str, Any] = {}
    for path, name in OVERRIDES.items():
        value = flags.settings.get(path)
        wanted = bool if name == "sequence_parallel" else int
        if type(value) is wanted and (wanted is bool or value >= 1):
            changes[name] = Given(value, f"--set {dotted(path)}")
    if "cp" in changes:
        changes["sep"] = Given(1, job.sep.setting, by_default=True)
    return replace(job, **changes)
