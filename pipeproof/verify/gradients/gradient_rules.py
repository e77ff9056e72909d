"""The rules of gradients and of their norm: problems with one root are one finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from pipeproof.comm.step_end_rows import norm_axes, num_weights
from pipeproof.diagnostics.finding import ExampleKind, Finding, RuleDoc
from pipeproof.diagnostics.problems import grouped
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import AXES, CHILD_KINDS, KIND_CODE, OpKind
from pipeproof.verify.gradients.diagnose import diagnose
from pipeproof.verify.gradients.expected_gradients import ADDS
from pipeproof.verify.gradients.explain_sum import Cause, Count, Problem
from pipeproof.verify.gradients.kept_elements import MOST_NAMED, names_text
from pipeproof.verify.subject import Rule, Subject, of_ranks, of_small_plan

MISSING = RuleDoc(
    code="PP601",
    title="a gradient is partial over an axis and nothing sums it there",
    explanation=(
        "Over dp, ep and cp ranks see different tokens, and with sequence parallelism a norm's weight sees the tokens "
        "of one tp rank only: each rank has an addend of the gradient, and the weight's copies drift apart unless the "
        "addends are summed before the optimizer step. Losses look normal. In a graph without a plan, all stages are "
        "expected to be reduced over the data axes over which any stage is."
    ),
    wrong="rank 0: 0F0 1F0 1B0 0B0 0REDUCE_GRAD:dp 0STEP 1STEP",
    right="rank 0: 0F0 1F0 1B0 0B0 0REDUCE_GRAD:dp 1REDUCE_GRAD:dp 0STEP 1STEP",
)

NEEDLESS = RuleDoc(
    code="PP602",
    title="a reduction corrupts a complete gradient",
    explanation=(
        "A sum over ranks that all hold the whole gradient (or a second sum over the same ranks) multiplies it by "
        "their number; a sum over ranks that hold different parts of a weight, or the maximum in place of a sum, "
        "gives a meaningless gradient. An average of equal gradients changes nothing and is accepted."
    ),
    wrong="rank 0: 0F0 0B0 0REDUCE_GRAD:dp 0REDUCE_GRAD:dp 0STEP",
    right="rank 0: 0F0 0B0 0REDUCE_GRAD:dp 0STEP",
)

WRONG_GROUP = RuleDoc(
    code="PP603",
    title="a gradient is reduced over the wrong ranks",
    explanation=(
        "The group of a reduction must be the ranks that hold the addends: all of one line of the mesh, for example "
        "dp and not a half of it, and the same part of the weight. A group that is too small leaves addends out and "
        "reports no error; one across tensor-parallel ranks adds up different parts of a weight."
    ),
    wrong=of_small_plan(
        "{'pp': 1, 'tp': 2, 'dp': 2}",
        "from dataclasses import replace as changed",
        "pairs = [(0, 3), (1, 2)]",
        "groups = [changed(g, ranks=pairs.pop()) if g.axis == 'dp' else g for g in base.graph.groups]",
        "number = {rank: i for i, g in enumerate(groups) if g.axis == 'dp' for rank in g.ranks}",
        "rows = [[changed(r, group=number[k]) if r.group >= 0 and groups[r.group].axis == 'dp' else r for r in own]",
        "        for k, own in enumerate(rows)]",
    ).replace("base.graph.groups))", "groups))"),
    right=of_small_plan("{'pp': 1, 'tp': 2, 'dp': 2}"),
)

EARLY = RuleDoc(
    code="PP604",
    title="a gradient is reduced, or used by the optimizer, before it is whole",
    explanation=(
        "The contribution of a micro-batch after the reduction stays on its rank; contributions and reductions after "
        "the optimizer step are not in the update. Deferred weight gradients (W) count too: the reduction comes after "
        "the last of them."
    ),
    wrong="rank 0: 0F0 0F1 0B0 0REDUCE_GRAD:dp 0B1 0STEP",
    right="rank 0: 0F0 0F1 0B0 0B1 0REDUCE_GRAD:dp 0STEP",
)

LOST = RuleDoc(
    code="PP605",
    title="a micro-batch's gradient is written over or added twice",
    explanation=(
        "Gradients add up over the micro-batches of a step. A backward that writes where it should add (a copy into a "
        "shared buffer, a buffer that is not kept) leaves the last micro-batch only; a hook and an explicit "
        "call add twice. The first micro-batch of a step may write."
    ),
    wrong="rank 0: 0F0 0F1 0B0 0B1{reduction=overwrite} 0STEP",
    right="rank 0: 0F0 0F1 0B0{reduction=overwrite} 0B1 0STEP",
)

MAIN_SCALE = RuleDoc(
    code="PP606",
    title="tokens have another weight than the loss declares",
    explanation=(
        "In the update of every parameter each token's loss has an exact coefficient: the factor of the forward, "
        "times every scale and average that its gradient meets on the way, summed over the ranks that add "
        "it. It must equal `loss.normalization` under every topology: one over the tokens of the whole step, "
        "or the mean of the micro-batches' means. A scale on I, SEND_B or RECV_B is a factor for all "
        "earlier stages. The usual mistakes: scaling by 1/num_micro_batches twice, by the number of expert-data ranks "
        "in place of data ranks, or scaling the running sum at each micro-batch. In a graph without a plan all "
        "micro-batches must have the same weight."
    ),
    wrong="rank 0: 0F0 0F1 0B0 0SCALE_GRAD{scale=1/2} 0B1 0SCALE_GRAD{scale=1/2} 0STEP",
    right="rank 0: 0F0 0F1 0B0 0B1 0SCALE_GRAD{scale=1/2} 0STEP",
)

OTHER_SCALE = RuleDoc(
    code="PP607",
    title="tokens of an auxiliary loss have another weight than declared, or none",
    explanation=(
        "A load-balancing, z or multi-token-prediction loss has factors of its own, and they are easily scaled by tp, "
        "cp, the number of micro-batches or of tokens once too often, or lost with the value that carries them. It is "
        "reported where the loss is off by another factor than the main loss of the same gradient."
    ),
    wrong="rank 0: 0F0{scale=1,aux:0.01} 0F1{scale=1,aux:0} 0B0 0B1 0STEP",
    right="rank 0: 0F0{scale=1,aux:0.01} 0F1{scale=1,aux:0.01} 0B0 0B1 0STEP",
)

COPIES = RuleDoc(
    code="PP608",
    title="the gradients of a weight's copies are not summed, or in no order with other sums",
    explanation=(
        "A weight that is stored on several stages (tied embedding), or a stage that two ranks compute (DualPipe), has "
        "one gradient: the sum over its copies. Without that sum the copies drift apart. The sum over the copies and "
        "the sums over data ranks work on one buffer and must come one after the other."
    ),
    wrong="rank 0: 0F0 0B0 0REDUCE_GRAD:dp{queue=side} 0REDUCE_GRAD:pp{queue=other} 0STEP",
    right=(
        "rank 0: 0F0 0B0 WAIT(0B0){queue=side} 0REDUCE_GRAD:dp{queue=side} 0REDUCE_GRAD:pp{queue=side} "
        "WAIT(0REDUCE_GRAD:pp) 0STEP"
    ),
)

EVALUATION = RuleDoc(
    code="PP609",
    title="tokens have another weight than declared in the loss of an evaluation",
    explanation=(
        "An evaluation adds up the same losses as a training step, without gradients to scale. A factor that belongs "
        "to gradient accumulation (one over the number of micro-batches) makes its loss too small when the loss "
        "function of training is used as it is."
    ),
    wrong="rank 0: 0F0{scale=1} 0F1{scale=1/2}",
    right="rank 0: 0F0{scale=1/2} 0F1{scale=1/2}",
)

UNREADABLE = RuleDoc(
    code="PP610",
    title="a scale or the name of a gradient means nothing here",
    explanation=(
        "A scale is a product of numbers and named sizes: axes (dp, tp, ..), num_micro_batches, data_ranks, "
        "global_tokens, and for one micro-batch or rank micro_batch_tokens, rank_tokens and step_tokens. "
        "On a forward `aux:0.01` scales one loss of its stage. A buffer `grad[NAME]` names a parameter. Nothing is "
        "proved about scales and names that cannot be read."
    ),
    wrong="rank 0: 0F0 0B0 0SCALE_GRAD{scale=1/dpp} 0STEP",
    right="rank 0: 0F0 0B0 0SCALE_GRAD{scale=1/dp} 0STEP",
)

_SUMMED = "0F0 0B0 0REDUCE_GRAD:dp{group=0 writes=grad[weight]}"

UNEXPECTED = RuleDoc(
    code="PP613",
    title="a gradient collective belongs to no gradient, or to no reduction",
    explanation=(
        "Each collective below a REDUCE_GRAD sums gradients of its stage that are partial over its axis. An additional "
        "one (a repeated call at the end of its block, an expert's gradient summed over ep) adds up complete "
        "gradients, or different parts of a weight. A collective elsewhere that writes a gradient "
        "(`writes=grad[NAME]`) takes part in the sum, and is reported if the sum is wrong. A call whose gradient is "
        "known by its name or its number of elements is right if a scale makes up for it."
    ),
    wrong=of_ranks("dp: 0 1", *[f"{_SUMMED} 0ALL_REDUCE:dp{{group=0 writes=grad[weight]}} 0STEP"] * 2),
    right=of_ranks("dp: 0 1", *[f"{_SUMMED} 0STEP"] * 2),
)

_SCATTERED = "0F0 0B0 0REDUCE_GRAD:dp 0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp{group=0 range=0..16}"

ELEMENTS = RuleDoc(
    code="PP614",
    title="the optimizer updates other elements than its rank keeps of the sum",
    explanation=(
        "A reduce-scatter of n elements over k ranks leaves each rank n/k of them, in the order of the group. The "
        "optimizer must update exactly these: elsewhere the gradient is the rank's own addend. Shards that begin at "
        "parameters while the sum is cut into equal parts, or a buffer padded on one side only, move the boundaries; "
        "shapes agree, and the loss goes down. A sum with fewer elements than its gradient leaves out the rest. The "
        "range of a STEP is in the flat buffer of its stage."
    ),
    wrong=of_ranks("dp: 0 1", f"{_SCATTERED} 0STEP{{range=0..10}}", f"{_SCATTERED} 0STEP{{range=10..16}}"),
    right=of_ranks("dp: 0 1", f"{_SCATTERED} 0STEP{{range=0..8}}", f"{_SCATTERED} 0STEP{{range=8..16}}"),
)

ALL = (MISSING, NEEDLESS, WRONG_GROUP, EARLY, LOST, MAIN_SCALE, OTHER_SCALE, COPIES, EVALUATION, UNREADABLE)


def _check(doc: RuleDoc) -> Callable[[Subject], Iterator[Finding]]:
    cause = Cause(doc.code)

    def check(subject: Subject) -> Iterator[Finding]:
        groups = grouped((problem.key, problem) for problem in subject.once(diagnose) if problem.cause is cause)
        for problems in groups.values():
            yield _finding(subject, doc, problems)

    return check


def _finding(subject: Subject, doc: RuleDoc, problems: Sequence[Problem]) -> Finding:
    first = problems[0]
    witness = dict.fromkeys(op for problem in problems[:MOST_NAMED] for op in problem.ops)
    return doc.finding(
        _count_text(first.count, problems) if first.count is not None else f"{_where(subject, problems)}: {first.fact}",
        location=subject.locate("loss" if first.count is not None else "schedule"),
        help=_fix_text(first.count) if first.count is not None else first.fix,
        witness=subject.witness(*witness) if witness else None,
    )


def _where(subject: Subject, problems: Sequence[Problem]) -> str:
    """``rank 0 (pp 0), gradient of `a`, `b` and 4 more``, with how many other ranks have the same."""
    first = problems[0]
    parameters = dict.fromkeys(problem.parameter for problem in problems if problem.parameter)
    ranks = {rank for problem in problems for rank in (problem.rank, *problem.other_ranks)}
    text = subject.coords_text(first.rank)
    text += f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
    return f"{text}, gradient of {names_text(list(parameters))}" if parameters else f"{text}, stage {first.stage}"


def _count_text(count: Count, problems: Sequence[Problem]) -> str:
    parameters = list(dict.fromkeys(problem.parameter for problem in problems if problem.parameter))
    where = f" in the update of {names_text(parameters)}" if parameters else ""
    loss = f"the loss `{count.loss}` of stage {count.stage}"
    if count.declared is None:
        return (
            f"{loss}: each token of {count.tokens} counts {count.found}{where}, but each of {count.like} "
            f"{count.declared_text}; without another declaration, all tokens have the same weight"
        )
    return f"{loss}: each token of {count.tokens} counts {count.found}{where}, declared {count.declared_text}"


def _fix_text(count: Count) -> str:
    if count.declared is None:
        return "apply one scale to every micro-batch, and scale the sum once"
    if not count.found.terms:
        return f"let the backward pass take the loss `{count.loss}` along"
    if len(count.found.terms) > 1:
        return "scale what is added once, after the last micro-batch"
    factor = count.declared * count.found.inverse
    return f"multiply by {factor}: in the loss, in SCALE_GRAD, or by summing in place of averaging"


_CLIPPED = "{'pp': 2}, 'run': {'clip_norm': 1.0}"

INCOMPLETE = RuleDoc(
    code="PP611",
    title="the norm of the gradients does not cover all of them",
    explanation=(
        "With `run.clip_norm` all gradients are scaled by one factor, which depends on the norm of all of them "
        "together. Each rank squares its own gradients; sums over tp, ep and pp, where there are such ranks, make the "
        "norm whole. If one of these sums is missing, doubled, or over a part of the ranks, stages get different "
        "factors: nothing fails, and the step has another direction. A norm that is taken before the gradients are "
        "complete, or after an optimizer has stepped, is the norm of other values."
    ),
    wrong=of_small_plan(_CLIPPED, "rows = [[r for r in own if str(r.op)[1:] != 'ALL_REDUCE:pp'] for own in rows]"),
    right=of_small_plan(_CLIPPED),
    kind=ExampleKind.PYTHON,
)

_BEFORE = frozenset({OpKind.REDUCE_GRAD, OpKind.SCALE_GRAD, *ADDS})


def _check_norm(subject: Subject) -> Iterator[Finding]:
    plan, graph = subject.plan, subject.graph
    steps = np.flatnonzero(graph.kind == KIND_CODE[OpKind.STEP])
    if plan.spec.run.clip_norm is None:
        return
    first_step = _ends(graph, steps, last=False)
    made = graph.is_kind(_BEFORE) | (
        graph.is_kind(CHILD_KINDS) & (graph.target_kind == KIND_CODE[OpKind.REDUCE_GRAD])
    )  # operations that complete gradients
    whole = _ends(graph, np.flatnonzero(made), last=True)
    alone = np.flatnonzero((graph.kind == KIND_CODE[OpKind.ALL_REDUCE]) & (graph.parent == NONE))
    for axis in norm_axes(plan):
        of_axis = alone[graph.axis[alone] == AXES.index(axis)]
        wrong: dict[str, list[tuple[int, int | None]]] = {}
        for rank, step in sorted(first_step.items()):
            selected = of_axis[graph.rank[of_axis] == rank].tolist()
            fact = _fact(subject, axis, selected, step, whole.get(rank, NONE))
            if fact is not None:
                wrong.setdefault(fact, []).append((rank, selected[0] if selected else None))
        for fact, places in wrong.items():
            rank, op_id = places[0]
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            yield INCOMPLETE.finding(
                f"{subject.coords_text(rank)}{more}: the norm of the gradients {fact}",
                location=subject.locate("run", "clip_norm"),
                help=f"sum it once over all of {axis}, after the gradients' own sums and before the first STEP",
                witness=None if op_id is None else subject.witness(op_id),
            )


def _fact(subject: Subject, axis: str, selected: list[int], first_step: int, whole: int) -> str | None:
    """Fact about a wrong sum of one rank's norm over an axis; None if the sum is correct."""
    graph, mesh = subject.graph, subject.plan.mesh
    if len(selected) != 1:
        return f"is summed over {axis} {'never' if not selected else f'{len(selected)} times'}"
    (op_id,) = selected
    size = graph.groups[int(graph.group[op_id])].size if graph.group[op_id] != NONE else 0
    if size != mesh.size(axis):
        return f"is summed over {size} of {mesh.size(axis)} {axis} ranks"
    if graph.reduction_names[int(graph.reduction[op_id])] != "sum":
        return f"is not a sum over {axis}"
    numel, entries = int(graph.stop[op_id] - graph.start[op_id]), num_weights(subject.plan)
    if numel != entries:
        return f"has {numel} entries over {axis}, and the model {entries} weights"
    if op_id < whole:
        return f"is summed over {axis} before gradients are whole: {graph.ops[whole]} comes after"
    if op_id > first_step:
        return f"is summed over {axis} after {graph.ops[first_step]} has used it"
    return None


def _ends(graph: OpGraph, rows: IntColumn, *, last: bool) -> Mapping[int, int]:
    """The first, or last, op id of each rank in ``rows``; op ids of a rank are in program order."""
    ordered = rows if last else rows[::-1]
    return dict(zip(graph.rank[ordered].tolist(), ordered.tolist(), strict=True))


RULES: tuple[Rule, ...] = (
    *(Rule(doc, _check(doc)) for doc in (*ALL, UNEXPECTED, ELEMENTS)),
    Rule(INCOMPLETE, _check_norm, needs_plan=True),
)
