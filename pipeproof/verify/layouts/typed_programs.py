"""20x: typed op programs: operations fit the layouts of their inputs, and gradients are reduced where needed.

The rules check the programs that a person writes (``Facts.typed_programs``) and
the programs of the plan's GPT, which must agree with its description by hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeproof.diagnostics.finding import ExampleKind, Finding, RuleDoc
from pipeproof.stages.describe.derive_types import TypedLayer, TypeProblem, derive_types
from pipeproof.stages.describe.layer import Collective, layer_kind, weight_calls
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


RULES = (
    Rule(OPERAND, lambda subject: _problems(subject, OPERAND, Reason.OPERAND)),
    Rule(RELABEL, lambda subject: _problems(subject, RELABEL, Reason.RELABEL)),
    Rule(SIDE_INPUT, lambda subject: _problems(subject, SIDE_INPUT, Reason.SIDE_INPUT)),
    Rule(UNREDUCED, _check_unreduced),
    Rule(COLLECTIVES, _check_collectives, needs_plan=True),
)
