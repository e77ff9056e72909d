"""The section ``schedule``: in which order each pipeline rank works."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeproof.specs.schedule_checks import StagePlacement, check_own_schedule, check_placement
from pipeproof.specs.section import FROM_LIST, Section, refuse

ScheduleName = Literal[
    "gpipe", "1f1b", "eager_1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "interleaved_zb", "zb_v", "v_half",
    "v_min", "dualpipe", "dualpipe_v", "chimera", "seq1f1b", "optimal", "custom", "file",
]  # fmt: skip
"""A kind of schedule; ``pipeproof.schedule.kinds`` says what each is."""


class ScheduleSpec(Section):
    """The order in which each pipeline rank works on its micro-batches."""

    kind: ScheduleName = Field(
        description="Which schedule; `pipeproof schedule list` says what each is. file: read from path; custom: as "
        "programs give it."
    )
    variant: Literal["torch", "megatron", "fleet", "fleet_fthenb", "fleet_balanced"] | None = Field(
        default=None,
        description="Whose order, where tools differ; without it, that of the backend's own tool.",
    )
    path: str | None = Field(
        default=None,
        description="With kind file, the file of the schedule, relative to the plan file.",
        json_schema_extra={"minLength": 1},
    )
    format: Literal["auto", "text", "csv", "csv-comms", "fleet"] = Field(
        default="auto",
        description="Of the file: our text form, PyTorch's CSV without or with communication, or the strings of "
        "Fleet's static scheduler; auto looks at it.",
    )
    programs: Annotated[tuple[Annotated[tuple[str, ...], FROM_LIST], ...], FROM_LIST] | None = Field(
        default=None, description="With kind custom, the operations of each pipeline rank in order, such as 0F0."
    )
    num_micro_batches: int = Field(ge=1, le=10**6, description="Micro-batches per step and data-parallel rank.")
    micro_batch_size: int = Field(ge=1, le=10**6, description="Sequences in a micro-batch.")
    last_micro_batch_size: int | None = Field(
        default=None, ge=1, le=10**6, description="Sequences in the last micro-batch, where it has fewer."
    )
    seq_lengths: Annotated[tuple[Annotated[int, Field(ge=1, le=2**26)], ...], FROM_LIST] | None = Field(
        default=None, description="Tokens per sequence of each micro-batch, where they differ."
    )
    num_chunks: int = Field(
        default=1, ge=1, le=2**16, description="Stages per pipeline rank, as many as the schedule takes."
    )
    micro_batch_group_size: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="With variant megatron, micro-batches that go through a chunk at a time; without it, as many as "
        "there are pipeline ranks.",
    )
    num_sequence_splits: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Equal pieces into which each sequence is cut; more than 1 with seq1f1b, file and custom.",
    )
    memory_limit: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Most chunk activations of one micro-batch that a rank may hold, from F to the end of W. With kind "
        "optimal; `advise` keeps to it too.",
    )
    reduce_gradients: Literal["at_end", "when_ready"] = Field(
        default="at_end",
        description="When gradients are summed over ranks: after all computations, or those of a stage beside what "
        "follows the last computation that adds to them. A stage that has copies is summed at the end in any case.",
    )
    placement: StagePlacement | None = Field(
        default=None,
        description="How stages are dealt to ranks: loop, v (there and back), or the stages of each pipeline rank; a "
        "stage listed on several ranks has a copy on each. Without it, as the schedule needs, and with kinds file and "
        "custom as they compute them.",
    )

    @model_validator(mode="after")
    def _holds_together(self) -> Self:
        refuse([*check_own_schedule(self), *check_placement(self)])
        return self
