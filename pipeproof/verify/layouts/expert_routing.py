"""217: dispatch, computation and combine of an expert layer mean the same expert by each block of rows."""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.rule_doc import ExampleKind, RuleDoc
from pipeproof.verify.declared_facts import ExpertRouting
from pipeproof.verify.subject import Rule, Subject


def _example(combine: str) -> str:
    return "\n".join(
        [
            "from pipeproof.schedule.op_table import build_graph",
            "from pipeproof.verify.declared_facts import ExpertRouting, Facts",
            "from pipeproof.verify.subject import graph_subject",
            "",
            "experts = {0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}",
            f"combine = {combine}",
            "routing = ExpertRouting('layer 3', (0, 1), experts, {0: (0, 1), 1: (2, 3)}, combine)",
            "subject = graph_subject(build_graph([[], []], [], []), facts=Facts(expert_routings=(routing,)))",
        ]
    )


OTHER_EXPERT = RuleDoc(
    code="PP217",
    title="rows of an expert layer are sent, computed or taken back for different experts",
    explanation=(
        "The exchanges of an expert layer carry rows without names: the position of a block states its expert. The "
        "sender, the rank that computes and the sender that takes the results back each have their own list of "
        "experts. Where the lists differ, counts and shapes agree, and tokens get the results of experts that the "
        "router did not select."
    ),
    wrong=_example("{0: (0, 1, 2, 3), 1: (1, 0, 2, 3)}"),
    right=_example("experts"),
    kind=ExampleKind.PYTHON,
)


def _check(subject: Subject) -> Iterator[Finding]:
    for routing in subject.facts.expert_routings:
        for mistake in _mistakes(routing):
            yield OTHER_EXPERT.finding(
                f"`{routing.name}`: {mistake}",
                help="use one list of experts by rank for dispatch, computation and combine",
            )


def _mistakes(routing: ExpertRouting) -> Iterator[str]:
    """The first mistake of each sender."""
    for sender in routing.ranks:
        sent, taken = routing.dispatch.get(sender, ()), routing.combine.get(sender, ())
        num_computed = sum(len(routing.computes.get(member, ())) for member in routing.ranks)
        if not len(sent) == len(taken) == num_computed:
            yield (
                f"rank {sender} sends {len(sent)} blocks of rows and takes {len(taken)} back; "
                f"the group computes {num_computed} of each sender"
            )
            continue
        computed = ((member, e) for member in routing.ranks for e in routing.computes.get(member, ()))
        for block, ((member, expert), out, back) in enumerate(zip(computed, sent, taken, strict=True)):
            if expert != out:
                yield (
                    f"rank {sender} sends block {block} for expert {out}, and rank {member} computes it "
                    f"with expert {expert}"
                )
                break
            if back != expert:
                yield (
                    f"rank {member} computes block {block} of rank {sender} with expert {expert}, and rank {sender} "
                    f"takes the result for that of expert {back}"
                )
                break


RULES = (Rule(OTHER_EXPERT, _check),)
