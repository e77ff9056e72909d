"""Measured times of a pipeline's operations and messages, as a profile for `pipeproof simulate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from pydantic import TypeAdapter

from pipeproof.exec.measure.idle_messages import IdleMessageEnd, time_idle_messages
from pipeproof.exec.measure.profile_from_logs import measured_profile
from pipeproof.exec.rank.op_log import Clock, LogEntry, Timing
from pipeproof.exec.rank.torch.arrays import TorchArrays
from pipeproof.exec.rank.torch.op_timing import timing_of
from pipeproof.exec.train.agreement import Agreement
from pipeproof.exec.train.module_plan import TrainedPlan
from pipeproof.exec.train.torch.channel_groups import StageWorld
from pipeproof.exec.train.train_rank import TrainRank
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.profile_file import Profile
from pipeproof.verify.subject import make_subject

if TYPE_CHECKING:
    from pipeproof.exec.rank.framework_protocol import World

_ANSWER = TypeAdapter(tuple[list[LogEntry], list[IdleMessageEnd], Timing])
"""The measurements of one rank."""


def profile_steps(
    rank: TrainRank, clock: Clock, world: StageWorld, device: torch.device, plan: TrainedPlan, agreement: Agreement,
    run: Callable[[], list[LogEntry]], name: str, num_steps: int,
) -> Profile | None:  # fmt: skip
    """Run steps and return their profile on the first rank, else None. ``run`` runs one and returns its log."""
    ends = time_idle_messages(
        cast("World", world), TorchArrays(device), rank.plan.graph, on_device=device.type == "cuda"
    )
    entries = [entry for _ in range(num_steps) for entry in run()]
    answers = agreement.gather(
        name,
        lambda: _ANSWER.dump_python((entries, ends, timing_of(clock)), mode="json"),
    )  # fmt: skip
    if agreement.rank:
        return None
    logs, idle, timings = (dict(enumerate(parts)) for parts in zip(*map(_ANSWER.validate_python, answers), strict=True))
    subject = make_subject(plan_from_dict(plan.content)).with_graph(rank.plan.graph)
    return measured_profile(subject, plan.certificate.graph_digest, logs, idle, torch.get_num_threads(), timings)
