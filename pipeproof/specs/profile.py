"""The key ``cost.profile``: times that a run measured, and what can be wrong with their file."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pipeproof.specs.codes import RuleDoc

ProfilePath = Annotated[str, Field(min_length=1)]
"""The file that `pipeproof run PLAN --profile FILE` wrote, relative to the plan file."""

UNREADABLE_PROFILE = RuleDoc(
    code="PP160",
    title="the profile cannot be read",
    explanation=(
        "`cost.profile` is relative to the plan file. The file does not exist, is a directory, may not be read, is "
        "larger than any profile, or is not text in UTF-8."
    ),
    wrong="cost: {profile: profiles/}   # a directory",
    right="cost: {profile: profiles/measured.json}",
)
NOT_A_PROFILE = RuleDoc(
    code="PP161",
    title="the file is not a whole profile",
    explanation=(
        "A profile is what `pipeproof run PLAN --profile FILE` writes, in the version that this release reads. A file "
        "that was cut short, edited by hand or written by something else is refused, and so is one that has no time "
        "for something that the plan does: a missing time would be simulated as none."
    ),
    wrong="cost: {profile: profiles/cut_short.json}",
    right="cost: {profile: profiles/measured.json}",
)
OTHER_PLAN = RuleDoc(
    code="PP162",
    title="the profile was measured on another plan",
    explanation=(
        "The time of a stage depends on the model, on the layers of the stage, on the mesh axes that cut them, on the "
        "size of a micro-batch, on the type of the elements and on the optimizer. All of these must be those of the "
        "run that was measured. Schedules, transports, the number of micro-batches and, where the stages are the same, "
        "the number of pipeline ranks may differ: that is what a profile is for."
    ),
    wrong="cost: {profile: profiles/measured.json}\ntopology: {pp: 2, tp: 2}",
    right="cost: {profile: profiles/measured.json}\nschedule: {kind: gpipe, num_micro_batches: 8}",
)

PROFILE_CODES: tuple[RuleDoc, ...] = (UNREADABLE_PROFILE, NOT_A_PROFILE, OTHER_PLAN)
