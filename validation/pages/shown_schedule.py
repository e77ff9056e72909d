"""The content of a schedule page, computed once: case, figures, plan and verdict."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType

import yaml
from sizes_and_times import Case

from pipeproof.schedule.kinds import ScheduleKind
from pipeproof.schedule.ops import OpKind
from pipeproof.schedule.programs import Time, stages_of
from pipeproof.sim.timeline import RankFigures, figures_of, timeline_of
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict
from pipeproof.verify.schedule_verdict import ScheduleVerdict, check_schedule

MEMORY_LIMITS = MappingProxyType({"optimal": 4})
"""The memory limit shown for kinds that have one: one stage per rank, in the memory of 1F1B."""


@dataclass(frozen=True)
class Shown:
    """A kind with everything that its page shows."""

    kind: ScheduleKind

    @cached_property
    def case(self) -> Case:
        """The case of the picture and the index: every rank's share of the network takes 1, 1 and 1."""
        limit = MEMORY_LIMITS.get(self.kind.name)
        num_chunks = 2 if self.kind.max_chunks is None and limit is None else self.kind.min_chunks
        share = 1 if num_chunks == 1 else Fraction(1, num_chunks)
        splits = 2 if self.kind.splits_sequences else 1
        return Case(self.kind.name, v=num_chunks, k=splits, f=share, i=share, w=share, memory_limit=limit)

    @cached_property
    def figures(self) -> tuple[RankFigures, ...]:
        """The figures of each rank in the picture."""
        return figures_of(timeline_of(self.case.timed()))

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        return stages_of(self.case.schedule().programs)

    @cached_property
    def plan(self) -> LoadedPlan:
        """The plan of its page."""
        return plan_from_dict(yaml.safe_load(plan_text(self)))

    @cached_property
    def verdict(self) -> ScheduleVerdict:
        """The verdict of the rules on the plan."""
        return check_schedule(self.plan)

    @cached_property
    def copies(self) -> int:
        """The number of ranks that hold each stage."""
        return sum(map(len, self.stages)) // len({stage for stages in self.stages for stage in stages})

    @cached_property
    def peak(self) -> Fraction:
        """The largest peak of a rank, in shares of the network."""
        num_stages = self.case.p * self.case.num_chunks
        return Fraction(max(own.peak_activations for own in self.figures) * self.case.p, num_stages * self.case.k)

    @cached_property
    def backward(self) -> str:
        """The forms of backward in the schedule, as text."""
        schedule = self.case.schedule()
        kinds = {op.kind for program in schedule.programs for op in program}
        forms = {OpKind.BACKWARD: "whole", OpKind.BACKWARD_INPUT: "in two parts"}
        texts = [text for kind, text in forms.items() if kind in kinds]
        return " and ".join(texts) + (", overlapped with forwards" if any(schedule.pairs) else "")


def caption(case: Case) -> str:
    """Return the caption of a picture."""
    parts = [f"{case.kind}, {case.p} ranks, {case.m} micro-batches"]
    parts += [f"{case.num_chunks} stages per rank"] if case.num_chunks > 1 else []
    parts += [f"sequences in {case.k} splits"] if case.k > 1 else []
    parts += [f"at most {case.memory_limit} activations"] if case.memory_limit is not None else []
    return ", ".join(parts)


def number(value: Time) -> str:
    """Format a time with at most three decimals."""
    return f"{float(value):.3f}".rstrip("0").rstrip(".")


def plan_text(shown: Shown) -> str:
    """Return a plan file with the schedule of the picture."""
    case, kind = shown.case, shown.kind
    further = [f"variant: {kind.variants[0]}"] if kind.variants else []
    further += [f"num_chunks: {case.num_chunks}"] if case.num_chunks > 1 else []
    further += [f"num_sequence_splits: {case.k}"] if case.k > 1 else []
    further += [f"memory_limit: {case.memory_limit}"] if case.memory_limit is not None else []
    schedule = ", ".join(
        [f"kind: {kind.name}", *further, f"num_micro_batches: {case.m}", "micro_batch_size: 1"],
    )
    return (
        "pipeproof: 1\n"
        f"model: {{kind: gpt, num_layers: {case.p * case.num_chunks}, hidden_size: 64, num_heads: 4, ffn_size: 128,\n"
        "        vocab_size: 256, seq_length: 32}\n"
        f"topology: {{pp: {case.p}}}\n"
        f"schedule: {{{schedule}}}\n"
    )
