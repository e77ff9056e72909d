"""12x: the optimizer steps once on every stage, on every rank that holds it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeproof.diagnostics.finding import Finding, OpsWitness
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.schedule.derive import packed
from pipeproof.schedule.ops import KIND_CODE, Op, OpKind
from pipeproof.verify.completeness import owns
from pipeproof.verify.subject import Rule, Subject, missing_op

STEPS = RuleDoc(
    code="PP128",
    title="the optimizer does not step once on every stage",
    explanation=(
        "A stage without its step keeps its weights while the others train, on one replica alone even while its "
        "twins move on; a second step applies the same gradient again. Programs that name no step at all leave it "
        "to the caller, and are not checked."
    ),
    wrong="rank 0: 0F0 1F0 1B0 0B0 0STEP",
    right="rank 0: 0F0 1F0 1B0 0B0 0STEP 1STEP",
)


def _check_steps(subject: Subject) -> Iterator[Finding]:
    graph, table = subject.graph, subject.computes
    steps = np.flatnonzero(graph.kind == KIND_CODE[OpKind.STEP])
    if not len(steps):
        return
    ours = owns(subject, table.rank, table.stage)
    rank = np.concatenate([graph.rank[steps], table.rank[ours]])
    stage = np.concatenate([graph.stage[steps], table.stage[ours]])
    held, some, entry = np.unique(packed(rank, stage), return_index=True, return_inverse=True)
    count = np.bincount(entry[: len(steps)], minlength=len(held))
    computes = np.bincount(entry[len(steps) :], minlength=len(held)) > 0
    described = np.isin(rank[some], table.rank)  # of a rank that computes nothing at all, nothing is known
    for place in np.flatnonzero((count != 1) | (~computes & described)).tolist():
        at, of_stage = int(rank[some[place]]), int(stage[some[place]])
        step = Op(OpKind.STEP, of_stage)
        selected = steps[entry[: len(steps)] == place].tolist()
        where = subject.coords_text(at)
        if not selected:
            yield STEPS.finding(
                f"{where} computes stage {of_stage} and never runs {step}, while others step",
                help=f"add {step} at the end of its program",
                witness=OpsWitness((missing_op(graph.global_rank[at], step),)),
            )
        else:
            what = f"{len(selected)} times" if computes[place] else "and computes nothing of that stage"
            yield STEPS.finding(
                f"{where} runs {step} {what}",
                help="keep one for each stage of the rank",
                witness=subject.witness(*selected),
            )


RULES = (Rule(STEPS, _check_steps),)
