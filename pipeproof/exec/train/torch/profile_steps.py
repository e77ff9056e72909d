"""Measured times of a pipeline's operations and messages, as a profile for `pipeproof simulate`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from pydantic import TypeAdapter

from pipeproof.exec.measure.idle_messages import IdleMessageEnd, time_idle_messages
from pipeproof.exec.measure.product_peak import product_peak
from pipeproof.exec.measure.profile_from_logs import measured_profile
from pipeproof.exec.rank.op_log import HOST_QUEUE, Clock, LogEntry, Timing, op_ids_of
from pipeproof.exec.rank.torch.arrays import TorchArrays
from pipeproof.exec.rank.torch.op_timing import free_cached_memory, timing_of
from pipeproof.exec.train.agreement import Agreement
from pipeproof.exec.train.module_plan import TrainedPlan
from pipeproof.exec.train.torch.channel_groups import StageWorld
from pipeproof.exec.train.torch.count_products import ProductCounter
from pipeproof.exec.train.train_rank import TrainRank
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.profile_file import Profile
from pipeproof.verify.subject import make_subject

if TYPE_CHECKING:
    from pipeproof.exec.rank.framework_protocol import World

_ANSWER = TypeAdapter(tuple[list[LogEntry], list[IdleMessageEnd], Timing, dict[int, int]])
"""The measurements of one rank, the last are FLOPs by stage."""


def profile_steps(
    rank: TrainRank, clock: Clock, world: StageWorld, device: torch.device, plan: TrainedPlan, agreement: Agreement,
    counter: ProductCounter, count: Callable[[], list[LogEntry]], run: Callable[[], list[LogEntry]], name: str,
    num_steps: int,
) -> Profile:  # fmt: skip
    """Run steps and return their profile, the same on all ranks.

    ``run`` runs one and returns its log; so does ``count``, whose log has FLOPs of ``counter`` in place of times.
    """
    counted, graph = count(), rank.plan.graph
    flops: dict[int, int] = defaultdict(int)
    for op_id, entry in zip(op_ids_of(graph, rank.index, counted), counted, strict=True):
        if op_id is not None and entry.queue == HOST_QUEUE:
            flops[graph.ops[op_id].stage] += entry.end_ns - entry.start_ns
    dtype = counter.main_dtype or plan.lowered.spec.run.dtype
    peak_flops = product_peak(TorchArrays(device), dtype)
    if device.type == "cuda":
        free_cached_memory()
    ends = time_idle_messages(
        cast("World", world), TorchArrays(device), rank.plan.graph, on_device=device.type == "cuda"
    )
    entries = [entry for _ in range(num_steps) for entry in run()]
    timing = replace(timing_of(clock), peak_flops=peak_flops, peak_dtype=dtype)
    answers = agreement.gather(name, lambda: _ANSWER.dump_python((entries, ends, timing, flops), mode="json"))

    def profile() -> Any:
        if agreement.rank:
            return None
        read = [_ANSWER.validate_python(answer) for answer in answers]
        logs, idle, timings = (dict(enumerate(parts)) for parts in zip(*(each[:3] for each in read), strict=True))
        of_stages = {(index, stage): number for index, each in enumerate(read) for stage, number in each[3].items()}
        subject = make_subject(plan_from_dict(plan.content)).with_graph(graph)
        digest, threads = plan.certificate.graph_digest, torch.get_num_threads()
        return measured_profile(subject, digest, logs, idle, threads, timings, of_stages).to_json()

    return Profile.model_validate(agreement.gather(f"{name}: result", profile)[0])
