"""209: the layout that a plan declares for its activation between stages is the one that its layers make and take."""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import Finding
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.transport import BoundarySpec
from pipeproof.stages.describe.layers import layer_kind
from pipeproof.stages.describe.typed_gpt import typed_gpt
from pipeproof.stages.describe.typed_values import AxisType
from pipeproof.verify.subject import Rule, Subject, finding

OTHER_LAYOUT = RuleDoc(
    code="PP209",
    title="the declared layout of the activation is not the one that the layers make or take",
    severity="error",
    explanation=(
        "The first tensor of an edge with the dims s, b and h stands for the model's activation. What its entry in "
        "`boundaries` says of TP must be what the layers compute: invariant, and under sequence parallelism cut along "
        "the sequence. Declared otherwise, each rank's part of the sequence is taken for the whole by whoever reads "
        "the declaration: transports that presume equal values, buffers, the stage that receives."
    ),
    wrong=("topology: {pp: 2, tp: 2, sequence_parallel: true}\nboundaries: [{name: hidden, dims: sbh, tp: invariant}]"),
    right=(
        "topology: {pp: 2, tp: 2, sequence_parallel: true}\nboundaries: [{name: hidden, dims: sbh, tp: sharded(s)}]"
    ),
)


def _check_declared(subject: Subject) -> Iterator[Finding]:
    spec = subject.plan.spec
    if spec.topology.tp == 1:
        return
    made = _text(typed_gpt(spec)[layer_kind(spec.model, "layer.0")].values["y"].over("tp"))
    for index, entry in _activations(spec):
        for key, declared, verb in (
            ("tp", entry.tp, "make"),
            ("receiver_tp", entry.receiver_tp or entry.tp, "take"),
        ):
            if declared == made or (key == "receiver_tp" and entry.receiver_tp is None):
                continue
            yield finding(
                OTHER_LAYOUT,
                f"`{entry.name}` is declared {declared} over tp, and the layers {verb} it {made}",
                location=subject.locate("boundaries", index, key),
                help=f"write `{key}: {made}`",
            )


def _activations(spec: PlanSpec) -> Iterator[tuple[int, BoundarySpec]]:
    """The entries that stand for the model's activation on some edge, each once."""
    chosen = set()
    for edge in range(spec.num_stages - 1):
        for index, entry in enumerate(spec.boundaries):
            if entry.edge in (None, edge) and entry.shape is None and sorted(entry.dims) == ["b", "h", "s"]:
                chosen.add(index)
                break
    yield from ((index, spec.boundaries[index]) for index in sorted(chosen))


def _text(kind: AxisType) -> str:
    return f"sharded({kind.dim})" if kind.is_cut else str(kind.kind)


RULES = (Rule(OTHER_LAYOUT, _check_declared, needs_plan=True),)
