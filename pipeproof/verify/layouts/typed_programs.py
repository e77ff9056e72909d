"""20x: typed op programs: operations fit the layouts of their inputs, and gradients are reduced where needed.

The rules check the programs that a person writes (``Facts.typed_programs``) and
the programs of the plan's GPT, which must agree with its description by hand.
PP208 compares the collectives of the graph with them: it finds collectives that
all members of a group leave out, add or change in the same way, which no
comparison between ranks can find.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pipeproof.diagnostics.finding import ExampleKind, Finding, RuleDoc
from pipeproof.schedule.derive import BoolColumn, packed, place_in_group
from pipeproof.schedule.op_table import NONE, IntColumn, OpGraph
from pipeproof.schedule.ops import AXES, CHILD_KINDS, KIND_CODE, OpKind
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.boundary import work_item_sizes
from pipeproof.stages.describe.derive_types import TypedLayer, TypeProblem, derive_types
from pipeproof.stages.describe.layer import Collective, layer_kind, weight_calls, with_recomputed
from pipeproof.stages.describe.model_family import typed_layers
from pipeproof.stages.describe.type_rules import Reason
from pipeproof.verify.subject import Rule, Subject, of_small_plan

_MESH = 'p = ProgramBuilder("layer", {"tp": 2}, {"s": 8, "h": 4, "f": 16, "v": 32})\n'


def _example(body: str) -> str:
    return (
        "from pipeproof.stages.describe.typed_ops import ProgramBuilder\n"
        "from pipeproof.verify.declared_facts import Facts\n"
        "from pipeproof.verify.subject import graph_subject\n"
        "from pipeproof.schedule.op_table import build_graph\n\n"
        f"{_MESH}{body}"
        "subject = graph_subject(build_graph([[]], [], []), facts=Facts(typed_programs=(p.build(),)))"
    )


_ADDENDS = 'p.input("x", "s f", tp="S(f)")\np.parameter("w", "f h", tp="S(f)")\np.multiply("y", "x", "w", over="f")\n'
_COLUMN = 'p.parameter("w", "h f", tp="S(f)")\np.multiply("y", "entered", "w", over="h")\np.result("y", tp="S(f)")\n'

OPERAND = RuleDoc(
    code="PP203",
    title="an operation gets a value in a layout with which it computes wrongly",
    explanation=(
        "Each operation is right for some layouts of its operands: a matmul for operands that are sharded along its "
        "summed dim, or not at all; a nonlinear function not for addends; a collective for its own input layout. "
        "With another layout it runs, with shapes that fit, and gives other numbers: a gather of a value that every "
        "rank has doubles the sequence, an all-reduce of equal logits adds log(TP) to the loss, a value whose "
        "gradient is complete on no rank is used as if it were."
    ),
    wrong=_example('p.input("x", "s h", tp="I")\np.all_gather("entered", "x", "tp")\n' + _COLUMN),
    right=_example('p.input("x", "s h", tp="S(s)")\np.all_gather("entered", "x", "tp")\n' + _COLUMN),
    kind=ExampleKind.PYTHON,
)
RELABEL = RuleDoc(
    code="PP204",
    title="a value is declared to have a layout that no operation gave it",
    explanation=(
        "A relabelled value (addends taken for equal values, a shard for the whole) keeps its bytes and its shape. "
        "The missing reduction or gather is never made up for: each rank continues with its own addend. Typical "
        "examples are gradients of chunked losses and statistics of each rank's own tokens."
    ),
    wrong=_example(_ADDENDS + 'p.relabel("z", "y", "tp", to="R")\np.result("z", tp="R")\n'),
    right=_example(_ADDENDS + 'p.all_reduce("z", "y", "tp", to="R")\np.result("z", tp="R")\n'),
    kind=ExampleKind.PYTHON,
)
SIDE_INPUT = RuleDoc(
    code="PP205",
    title="a mask, ids or positions are not sharded like their tensor",
    explanation=(
        "Under sequence or context parallelism each rank has a part of the sequence. A constant that goes with it "
        "along the same dim must be sharded in the same way, on every stage: a mask that only the stage with the "
        "embedding shards has another length on all others."
    ),
    wrong=_example(
        'p.input("x", "s h", tp="S(s)")\np.constant("mask", "s", tp="I")\n'
        'p.multiply("y", "x", "mask")\np.result("y", tp="S(s)")\n'
    ),
    right=_example(
        'p.input("x", "s h", tp="S(s)")\np.constant("mask", "s", tp="S(s)")\n'
        'p.multiply("y", "x", "mask")\np.result("y", tp="S(s)")\n'
    ),
    kind=ExampleKind.PYTHON,
)


def _layers(subject: Subject) -> list[TypedLayer]:
    """Every typed layer of the subject, the plan's kinds of layers first."""
    own = list(typed_layers(subject.plan.spec).values()) if subject.lowered is not None else []
    return own + [derive_types(program) for program in subject.facts.typed_programs]


def _problems(subject: Subject, doc: RuleDoc, reason: Reason) -> Iterator[Finding]:
    for layer in _layers(subject):
        for problem in layer.problems:
            if problem.reason is reason:
                yield doc.finding(_text(layer, problem), help=problem.help)


def _text(layer: TypedLayer, problem: TypeProblem) -> str:
    return f"`{problem.place}` of `{layer.program.name}`, over {problem.axis}: {problem.message}"


UNREDUCED = RuleDoc(
    code="PP206",
    title="a parameter's gradient is partial over an axis, and its reduction is not declared",
    explanation=(
        "A weight that all ranks of an axis hold, used on values that differ between them, has an addend of its "
        "gradient on each rank: norms under sequence parallelism, every weight under context parallelism, a norm "
        "over heads that are sharded over tp. The addends must be summed over exactly that axis before the optimizer. "
        "Without the sum the copies drift apart, slowly, and the loss looks normal. An unnecessary reduction counts "
        "the gradient once per rank."
    ),
    wrong=_example(
        'p.input("x", "s h", tp="S(s)")\np.parameter("g", "h")\n'
        'p.apply("y", "x", "g", along="h")\np.result("y", tp="S(s)")\n'
    ),
    right=_example(
        'p.input("x", "s h", tp="S(s)")\np.parameter("g", "h", reduced_over=["tp"])\n'
        'p.apply("y", "x", "g", along="h")\np.result("y", tp="S(s)")\n'
    ),
    kind=ExampleKind.PYTHON,
)


def _check_unreduced(subject: Subject) -> Iterator[Finding]:
    for program in subject.facts.typed_programs:
        layer = derive_types(program)
        unknown = {problem.axis for problem in layer.problems}  # not all uses of parameters are known
        for parameter in program.parameters:
            name = parameter.value.name
            owed = [axis for axis in layer.partial_over[name] if axis not in unknown]
            declared = {axis for axis in parameter.reduced_over if program.mesh.get(axis, 1) > 1} - unknown
            yield from _compare(f"{program.name}.{name}", owed, declared)
    if subject.lowered is not None:
        spec = subject.plan.spec
        typed = typed_layers(spec)
        for described in subject.plan.layers:
            needed = typed[layer_kind(spec.model, described.name)]
            for own in (*described.parameters, *described.borrowed):
                name = own.name.removeprefix(f"{described.name}.")
                value = needed.values.get(name)
                is_trained = value is None or value.differentiable  # others have zeros in the sum
                over_ep = {"ep"} if spec.topology.ep > 1 and is_trained and "ep" not in own.sharded_over else set()
                yield from _compare(own.name, needed.partial_over.get(name, ()), {*own.partial_over, *over_ep})


def _compare(name: str, owed: Sequence[str], declared: set[str]) -> Iterator[Finding]:
    missing = [axis for axis in owed if axis not in declared]
    surplus = sorted(declared - set(owed))
    if missing:
        yield UNREDUCED.finding(
            f"each rank has an addend of the gradient of `{name}` over {' and '.join(missing)}, and no reduction there "
            "is declared",
            help=f"sum it over {' and '.join(missing)} before the optimizer",
        )
    if surplus:
        yield UNREDUCED.finding(
            f"the gradient of `{name}` is complete over {' and '.join(surplus)}, and a reduction there is declared",
            help=f"remove the reduction over {' and '.join(surplus)}",
        )


_TOPOLOGY = "{'pp': 2, 'tp': 2, 'sequence_parallel': True}"

COLLECTIVES = RuleDoc(
    code="PP207",
    title="a layer lists other collectives than its types need",
    explanation=(
        "The layouts before and after each operation determine the collectives of a layer's forward pass; the duals "
        "of the layouts determine the collectives of its backward pass. A layer whose description lists others would "
        "compute with values that were never reduced or gathered, or wait for a collective that no rank issues."
    ),
    wrong=of_small_plan(
        _TOPOLOGY,
        "layers = tuple(replace(a, backward_collectives=a.backward_collectives[1:]) for a in base.plan.layers)",
        "base = replace(base, lowered=replace(base.plan, layers=layers))",
    ),
    right=of_small_plan(_TOPOLOGY),
    kind=ExampleKind.PYTHON,
)


def _check_collectives(subject: Subject) -> Iterator[Finding]:
    typed = typed_layers(subject.plan.spec)
    for layer in subject.plan.layers:
        needed = typed[layer_kind(subject.plan.spec.model, layer.name)]
        again = needed.weights if subject.plan.spec.memory.sequence_parallel_activations == "regather" else ()
        for way, listed, expected in (
            ("forward", layer.forward_collectives, needed.forward),
            ("backward", layer.backward_collectives, needed.backward),
            ("weights' gradients", weight_calls(subject.plan.spec, layer), again),
        ):
            index = _first_difference(listed, expected)
            if index is not None:
                listed_text, there = (_collective_text(c[index : index + 1]) for c in (listed, expected))
                yield COLLECTIVES.finding(
                    f"collective {index} of the {way} of `{layer.name}` is listed as {listed_text}, and its types need "
                    f"{there}",
                    help="list what the types need, or change the operation that needs it",
                )


def _first_difference(listed: Sequence[Collective], expected: Sequence[Collective]) -> int | None:
    """The first index at which two sequences differ; None if they are equal. Labels do not count."""
    ours, theirs = ([(c.kind, c.axis, c.numel, c.reduction, c.dtype) for c in calls] for calls in (listed, expected))
    if ours == theirs:
        return None
    same = [one == other for one, other in zip(ours, theirs, strict=False)]
    return same.index(False) if False in same else len(same)


def _collective_text(calls: Sequence[Collective]) -> str:
    if not calls:
        return "none"
    (call,) = calls
    dtype = "" if call.dtype is None else f" in {call.dtype}"
    return f"{call.kind} of {call.numel} elements{dtype} over {call.axis} ({call.label})"


ISSUED = RuleDoc(
    code="PP208",
    title="a computation issues other collectives than its layers need",
    explanation=(
        "All members of a group issue the same collectives, but not the collectives that the layouts inside the layers "
        "need: one is missing, is of another kind, size or type, or is at another position. Each rank then "
        "continues with an addend in place of a sum, or with a shard in place of the whole. Nothing hangs, because all "
        "ranks do the same."
    ),
    wrong=of_small_plan(
        "{'pp': 2, 'tp': 2}", "rows = [[r for r in own if str(r.op) != '0F0/1.ALL_REDUCE:tp'] for own in rows]"
    ),
    right=of_small_plan("{'pp': 2, 'tp': 2}"),
    kind=ExampleKind.PYTHON,
)

_FORWARDS, _BACKWARDS = frozenset({OpKind.FORWARD}), frozenset({OpKind.BACKWARD, OpKind.BACKWARD_INPUT})
_COMPUTES = (OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT)


class _Needed:
    """Collectives that each computation of a plan needs, by size of a work item, stage and kind, as columns."""

    def __init__(self, subject: Subject) -> None:
        plan, graph = subject.plan, subject.graph
        self._num_stages = len(plan.stages)
        sizes, self._by_work_item = work_item_sizes(plan.spec)
        names = {name: code for code, name in enumerate(graph.reduction_names)}
        self.of_activations = plan.spec.run.dtype
        self._dtypes = dtypes = {dtype: code for code, dtype in enumerate({t.dtype: None for t in graph.tensors})}
        self.calls: list[list[Collective]] = []
        self.layers: list[list[str]] = []
        for size in sizes:
            typed = typed_layers(plan.spec, size)
            for stage_layers in plan.stages:
                layers = [(name, typed[layer_kind(plan.spec.model, name)]) for name in stage_layers]
                for kind in _COMPUTES:
                    named = list(_calls(kind, layers, plan.spec))
                    self.layers.append([name for name, _ in named])
                    self.calls.append([call for _, call in named])
        self.count = np.array([len(calls) for calls in self.calls], dtype=np.int64)
        self.first = np.cumsum(self.count) - self.count
        rows = [
            (
                KIND_CODE[OpKind[c.kind.name]],
                AXES.index(c.axis),
                c.numel,
                names.get(c.reduction, NONE),
                NONE if self.dtype_of(c) == self.of_activations else dtypes.get(self.dtype_of(c), len(dtypes)),
            )
            for calls in self.calls
            for c in calls
        ]
        self.table = np.array(rows, dtype=np.int64).reshape(-1, 5)

    def dtype_of(self, call: Collective) -> str:
        """The type of the elements of a call."""
        return call.dtype or self.of_activations

    def found_dtypes(self, graph: OpGraph) -> IntColumn:
        """By operation the type of its elements as in ``table``: ``NONE`` for the type of activations."""
        codes = [
            NONE if tensor.dtype == self.of_activations else self._dtypes[tensor.dtype] for tensor in graph.tensors
        ]
        return np.array([*codes, NONE], dtype=np.int64)[graph.tensor]

    def slots(self, graph: OpGraph, parents: IntColumn) -> IntColumn:
        """The index of each computation in ``calls``; ``NONE`` for a stage or work item that the plan does not have."""
        place_of_kind = np.full(max(KIND_CODE.values()) + 1, NONE, dtype=np.int64)
        for index, kind in enumerate(_COMPUTES):
            place_of_kind[KIND_CODE[kind]] = index
        stage, work_item = graph.stage[parents], graph.work_item[parents]
        inside = (stage >= 0) & (stage < self._num_stages)
        size = np.zeros_like(stage)
        if self._by_work_item:
            inside &= (work_item >= 0) & (work_item < len(self._by_work_item))
            size = np.array(self._by_work_item, dtype=np.int64)[np.where(inside, work_item, 0)]
        slot = (size * self._num_stages + stage) * len(_COMPUTES) + place_of_kind[graph.kind[parents]]
        return np.where(inside, slot, NONE)


def _calls(kind: OpKind, layers: Sequence[tuple[str, TypedLayer]], plan: PlanSpec) -> Iterator[tuple[str, Collective]]:
    """The collectives of one computation, each with the name of its layer.

    Recomputation issues the collectives of its forward again, right before the collectives of its backward. The
    weights' gradients issue none, unless their inputs are gathered again; in a whole backward that comes last.
    """
    if kind in _FORWARDS:
        for name, layer in layers:
            yield from ((name, call) for call in layer.forward)
        return
    if kind in _BACKWARDS:
        for name, layer in reversed(layers):
            yield from ((name, call) for call in with_recomputed(plan, name, layer.forward, layer.backward))
    if kind is not OpKind.BACKWARD_INPUT and plan.memory.sequence_parallel_activations == "regather":
        for name, layer in reversed(layers):
            yield from ((name, call) for call in layer.weights)


def _check_issued(subject: Subject) -> Iterator[Finding]:
    graph = subject.graph
    needed = _Needed(subject)
    parents = np.flatnonzero(graph.is_kind(frozenset(_COMPUTES)))
    wrong = _differs(graph, needed, parents)
    if not wrong.any():
        return
    everywhere = _all_members(subject, parents, wrong)
    reported: set[tuple[int, int]] = set()
    for parent in parents[everywhere].tolist():
        op = graph.ops[parent]
        key = int(graph.stage[parent]), int(graph.kind[parent])
        if key in reported:
            continue
        reported.add(key)
        children = [int(i) for i in np.flatnonzero(graph.parent == parent) if graph.is_kind(CHILD_KINDS)[i]]
        same = everywhere & (graph.stage[parents] == key[0]) & (graph.kind[parents] == key[1])
        batches = len(np.unique(graph.work_item[parents[same]]))
        yield ISSUED.finding(
            f"{op} on {subject.coords_text(int(graph.rank[parent]))} issues {_first(graph, needed, parent, children)}"
            + (f"; so in {batches} micro-batches" if batches > 1 else ""),
            help="issue what the layers need, in their order, on every member of the group",
            witness=subject.witness(parent, *children),
        )


def _differs(graph: OpGraph, needed: _Needed, parents: IntColumn) -> BoolColumn:
    """Mask of the computations whose children are not those that they need."""
    children = np.flatnonzero(graph.is_kind(CHILD_KINDS) & (graph.parent != NONE))
    children = children[np.isin(graph.kind[graph.parent[children]], [KIND_CODE[kind] for kind in _COMPUTES])]
    slot = np.full(graph.num_ops, NONE, dtype=np.int64)
    slot[parents] = needed.slots(graph, parents)
    num_children = np.bincount(graph.parent[children], minlength=graph.num_ops)
    wrong = np.zeros(graph.num_ops, dtype=bool)
    planned = parents[slot[parents] != NONE]
    wrong[planned] = num_children[planned] != needed.count[slot[planned]]
    parent = graph.parent[children]
    position = place_in_group(parent)
    fits = (slot[parent] != NONE) & (position < needed.count[slot[parent]])
    children, parent, position = children[fits], parent[fits], position[fits]
    if len(children):
        expected = needed.table[needed.first[slot[parent]] + position]
        actual = np.stack(
            [
                graph.kind[children],
                graph.axis[children],
                (graph.stop - graph.start)[children],
                graph.reduction[children],
                needed.found_dtypes(graph)[children],
            ],
            axis=1,
        )
        wrong[parent[(actual != expected).any(axis=1)]] = True
    return wrong[parents]


def _all_members(subject: Subject, parents: IntColumn, wrong: BoolColumn) -> BoolColumn:
    """Mask of the wrong computations that are wrong on every rank of their tensor- and context-parallel groups."""
    graph, mesh = subject.graph, subject.plan.mesh
    rank = np.array(graph.global_rank, dtype=np.int64)
    replica: IntColumn = np.zeros_like(rank)
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        rank, coord = np.divmod(rank, size)
        replica = replica * size + (0 if axis in ("tp", "cp") else coord)
    columns = (replica[graph.rank[parents]], *(c[parents] for c in (graph.stage, graph.kind, graph.work_item)))
    _, team = np.unique(packed(*columns), return_inverse=True)
    right = np.bincount(team, weights=~wrong)
    members_right: BoolColumn = right[team] > 0
    return wrong & ~members_right


def _first(graph: OpGraph, needed: _Needed, parent: int, children: list[int]) -> str:
    """The first call that is not as needed."""
    slot = int(needed.slots(graph, np.array([parent]))[0])
    expected, layers = needed.calls[slot], needed.layers[slot]
    names = graph.reduction_names
    for position in range(max(len(children), len(expected))):
        call = expected[position] if position < len(expected) else None
        child = children[position] if position < len(children) else None
        needs = "none"
        if call is not None:
            where = f"{call.label} of `{layers[position]}`, stage {int(graph.stage[parent])}"
            needs = f"{OpKind[call.kind.name]} of {call.numel} over {call.axis} ({where})"
        if call is not None and call.dtype is not None:
            needs += f" in {call.dtype}"
        if child is None:
            return f"{len(children)} collectives and needs {len(expected)}: number {position} should be {needs}"
        issued = graph.ops[child]
        size = int(graph.stop[child] - graph.start[child])
        tensor = int(graph.tensor[child])
        dtype = needed.of_activations if tensor == NONE else graph.tensors[tensor].dtype
        is_same = call is not None and (issued.kind, issued.axis, size, names[int(graph.reduction[child])], dtype) == (
            OpKind[call.kind.name],
            call.axis,
            call.numel,
            call.reduction,
            needed.dtype_of(call),
        )
        if not is_same:
            own = "" if dtype == needed.of_activations else f" in {dtype}"
            return f"{issued.kind} of {size} over {issued.axis}{own} as its collective {position}, and needs {needs}"
    raise AssertionError("the computation was found wrong")


RULES = (
    Rule(OPERAND, lambda subject: _problems(subject, OPERAND, Reason.OPERAND)),
    Rule(RELABEL, lambda subject: _problems(subject, RELABEL, Reason.RELABEL)),
    Rule(SIDE_INPUT, lambda subject: _problems(subject, SIDE_INPUT, Reason.SIDE_INPUT)),
    Rule(UNREDUCED, _check_unreduced),
    Rule(COLLECTIVES, _check_collectives, needs_plan=True),
    Rule(ISSUED, _check_issued, needs_plan=True),
)
