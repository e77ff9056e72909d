"""The number of stages of a pipeline: by its schedule, and whether the script has as many."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement


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


def require_num_stages(schedule: str, num_stages: int, num_ranks: int) -> None:
    """Refuse a number of stages that a kind of schedule does not have on that many ranks.

    Raises:
        PipelineError: names the numbers that it has.
    """
    kind = SCHEDULE_KINDS.get(schedule)
    if kind is None:
        return
    fewest, most = kind.min_chunks * num_ranks, None if kind.max_chunks is None else kind.max_chunks * num_ranks
    is_any = kind.placement is Placement.ANY
    if fewest <= num_stages <= (most or num_stages) and (is_any or not num_stages % num_ranks):
        return
    each = "one stage" if kind.min_chunks == 1 else f"{kind.min_chunks} stages"
    wanted = f"{fewest} stage{'s' * (fewest > 1)}"
    if most is None:
        each += " or more"
        nearest = max(fewest, num_stages - num_stages % num_ranks)
        wanted = wanted if is_any else f"{nearest} or {nearest + num_ranks} stages"
    other = "" if is_any or num_stages < num_ranks else ", or use looped_bfs, which has any number of stages"
    raise PipelineError(
        f"{schedule} has {each} on each rank, and there {'is' if num_stages == 1 else 'are'} {num_stages} on "
        f"{num_ranks} rank{'s' * (num_ranks > 1)}: cut the model into {wanted}{other}"
    )
