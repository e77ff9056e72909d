"""PP611: the norm for gradient clipping covers all gradients and is complete before the optimizer step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from pipeproof.comm.step_end_rows import norm_axes, num_weights
from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.rule_doc import ExampleKind, RuleDoc
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import AXES, CHILD_KINDS, KIND_CODE, OpKind
from pipeproof.verify.gradients.expected_gradients import ADDS
from pipeproof.verify.subject import Rule, Subject


def _example(changed: str) -> str:
    return "\n".join(
        [
            "from pipeproof.schedule.op_table import build_graph",
            "from pipeproof.specs.load_plan import plan_from_dict",
            "from pipeproof.verify.subject import make_subject",
            "",
            "model = {'kind': 'gpt', 'num_layers': 2, 'hidden_size': 16, 'num_heads': 4, 'ffn_size': 32}",
            "model |= {'vocab_size': 32, 'seq_length': 8}",
            "schedule = {'kind': '1f1b', 'num_micro_batches': 2, 'micro_batch_size': 2}",
            "plan = {'pipeproof': 1, 'model': model, 'topology': {'pp': 2}, 'schedule': schedule}",
            "base = make_subject(plan_from_dict(plan | {'run': {'clip_norm': 1.0}}))",
            f"rows = [{changed} for program in base.graph.rows()]",
            "subject = base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))",
        ]
    )


INCOMPLETE = RuleDoc(
    code="PP611",
    title="the norm of the gradients does not cover all of them",
    explanation=(
        "With `run.clip_norm` all gradients are scaled by one factor, which depends on the norm of all of them "
        "together. Each rank squares what it holds; sums over tp, ep and pp, where there are such ranks, make the "
        "norm whole. If one of these sums is missing, doubled, or over a part of the ranks, stages get different "
        "factors: nothing fails, and the step has another direction. A norm that is taken before the gradients are "
        "complete, or after an optimizer has stepped, is the norm of other values."
    ),
    wrong=_example("[row for row in program if str(row.op) not in ('0ALL_REDUCE:pp', '1ALL_REDUCE:pp')]"),
    right=_example("program"),
    kind=ExampleKind.PYTHON,
)

_BEFORE = frozenset({OpKind.REDUCE_GRAD, OpKind.SCALE_GRAD, *ADDS})


def _check(subject: Subject) -> Iterator[Finding]:
    plan, graph = subject.plan, subject.graph
    steps = np.flatnonzero(graph.kind == KIND_CODE[OpKind.STEP])
    if plan.spec.run.clip_norm is None:
        return
    first_step = _ends(graph, steps, last=False)
    made = graph.is_kind(_BEFORE) | (
        graph.is_kind(CHILD_KINDS) & (graph.target_kind == KIND_CODE[OpKind.REDUCE_GRAD])
    )  # what makes gradients whole
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
        return f"is no sum over {axis}"
    numel, entries = int(graph.stop[op_id] - graph.start[op_id]), num_weights(subject.plan)
    if numel != entries:
        return f"has {numel} entries over {axis}, and the model {entries} weights"
    if op_id < whole:
        return f"is summed over {axis} before gradients are whole: {graph.ops[whole]} comes after"
    if op_id > first_step:
        return f"is summed over {axis} after {graph.ops[first_step]} has used it"
    return None


def _ends(graph: OpGraph, rows: IntColumn, *, last: bool) -> Mapping[int, int]:
    """By rank its first, or last, op id among some; op ids of a rank are in the order of its program."""
    ordered = rows if last else rows[::-1]
    return dict(zip(graph.rank[ordered].tolist(), ordered.tolist(), strict=True))


RULES = (Rule(INCOMPLETE, _check, needs_plan=True),)
