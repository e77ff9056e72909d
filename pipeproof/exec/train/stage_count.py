"""The number of stages of a pipeline whose layers are still to be cut."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipeproof.exec.train.train_errors import PipelineError
from pipeproof.schedule.kinds import SCHEDULE_KINDS


def num_stages_of(
    plan: Mapping[str, Any] | None, schedule: Mapping[str, Any], num_ranks: int, num_chunks: int | None
) -> int:
    """The stages that a plan names, or ``num_chunks`` for each rank, or as few for each rank as its schedule needs.

    Raises:
        PipelineError: the schedule is in a file, which is not read here.
    """
    content = dict(plan or {})
    section = content.get("schedule", schedule)
    if isinstance(content.get("stages"), list | tuple):
        return len(content["stages"])
    if isinstance(section.get("placement"), list | tuple):
        return len({number for own in section["placement"] for number in own})
    if section.get("programs"):
        numbers = [re.match(r"\d+", str(op)) for program in section["programs"] for op in program]
        return 1 + max((int(found.group()) for found in numbers if found), default=0)
    given = section.get("num_chunks") or num_chunks
    if given:
        return num_ranks * int(given)
    if section.get("kind") == "file":
        raise PipelineError("give num_virtual_pipeline_stages: the stages of each rank by the file of the schedule")
    kind = SCHEDULE_KINDS.get(str(section.get("kind")))
    return num_ranks * (1 if kind is None else kind.min_chunks)
