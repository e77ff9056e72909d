"""7xx: what a rank holds at most, against the memory that there is.

Only a simulation knows what is held when. A plan without a budget is not
simulated for its check, and the simulator is not even loaded.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import Finding
from pipeproof.verify.subject import Rule, Subject, finding

OVER_BUDGET = RuleDoc(
    code="PP701",
    title="a rank holds more than the memory budget",
    severity="error",
    explanation=(
        "`memory.budget_gib` is the memory of a rank. The simulated step says what each rank holds when: weights, "
        "gradients, optimizer states, activations from their forward to their backward, logits, messages, and the "
        "overhead that the plan states. The message has the rank that needs most, the first time at which it does, and "
        "what its peak is made of; the help names changes with which the same computation fits."
    ),
    wrong="memory: {budget_gib: 0.0001}",
    right="memory: {budget_gib: 1}",
)
NOT_JUDGED = RuleDoc(
    code="PP702",
    title="the memory budget was not judged",
    severity="warning",
    explanation=(
        "The plan has a `memory.budget_gib`, but its step cannot be simulated to its end, so that nobody knows what is "
        "held when. What keeps it from its end is reported by the rules on matching and deadlock."
    ),
    wrong=(
        "topology: {pp: 2}\n"
        "schedule: {kind: custom, num_micro_batches: 2, programs: [['0F0', '0B0', '0F1', '0B1'], "
        "['1F0', '1F1', '1B0', '1B1']]}\n"
        "memory: {budget_gib: 1}"
    ),
    right=(
        "topology: {pp: 2}\n"
        "schedule: {kind: custom, num_micro_batches: 2, programs: [['0F0', '0F1', '0B0', '0B1'], "
        "['1F0', '1F1', '1B0', '1B1']]}\n"
        "memory: {budget_gib: 1}"
    ),
)


def _check_budget(subject: Subject) -> Iterator[Finding]:
    budget = subject.plan.spec.memory.budget_gib
    if budget is None:
        return
    from pipeproof.verify import memory_peak

    worst = subject.once(memory_peak.worst_of)
    if worst is None or not worst.is_over(budget):
        return
    yield finding(
        OVER_BUDGET,
        f"{subject.coords_text(worst.rank)} holds {memory_peak.peak_text(worst, budget)}",
        location=subject.locate("memory", "budget_gib"),
        help=memory_peak.what_fits(subject.plan, budget),
    )


def _check_judged(subject: Subject) -> Iterator[Finding]:
    if subject.plan.spec.memory.budget_gib is None:
        return
    from pipeproof.verify import memory_peak

    if subject.once(memory_peak.worst_of) is None:
        yield finding(
            NOT_JUDGED,
            "the step never ends, so that its memory is not known",
            location=subject.locate("memory", "budget_gib"),
            help="mend the errors of this plan first",
        )


RULES = (
    Rule(OVER_BUDGET, _check_budget, needs_plan=True),
    Rule(NOT_JUDGED, _check_judged, needs_plan=True),
)
