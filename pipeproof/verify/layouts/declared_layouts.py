"""209: the layout that a plan declares for its activation between stages is the one that its layers make and take."""

from __future__ import annotations

from collections.abc import Iterator

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.transport import BoundarySpec
from pipeproof.stages.describe.layer import is_empty, layer_kind
from pipeproof.stages.describe.model_family import typed_layers
from pipeproof.stages.describe.typed_values import AxisType
from pipeproof.verify.subject import Rule, Subject

OTHER_LAYOUT = RuleDoc(
    code="PP209",
    title="the declared layout of the activation is not the one that the layers make or take",
    explanation=(
        "The first tensor of an edge with the dims s, b and h represents the model's activation. Its TP layout in "
        "`boundaries` must be the layout that the layers compute: invariant, or sharded along the sequence with "
        "sequence parallelism. With another declaration, every reader of it takes each rank's shard of the sequence "
        "for the whole: transports that assume equal values, buffers, the receiving stage. A stage of empty layers "
        "takes any layout and passes it on."
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
    made = _text(typed_layers(spec)[layer_kind(spec.model, "layer.0")].values["y"].over("tp"))
    taken: dict[int, str] = {}  # by stage
    reported = set()
    for edge, index, entry in _activations(spec):
        hands_on = [all(map(is_empty, subject.plan.stages[stage])) for stage in (edge, edge + 1)]
        takes = entry.receiver_tp or entry.tp
        for key, declared, needed, verb in (
            ("tp", entry.tp, taken.get(edge, made) if hands_on[0] else made, "make"),
            ("receiver_tp", takes, takes if hands_on[1] else made, "take"),
        ):
            if declared == needed or (key == "receiver_tp" and entry.receiver_tp is None) or (index, key) in reported:
                continue
            reported.add((index, key))
            yield OTHER_LAYOUT.finding(
                f"`{entry.name}` is declared {declared} over tp, and the layers {verb} it {needed}",
                location=subject.locate("boundaries", index, key),
                help=f"write `{key}: {needed}`",
            )
        taken[edge + 1] = takes


def _activations(spec: PlanSpec) -> Iterator[tuple[int, int, BoundarySpec]]:
    """(edge, place, entry) of those that represent the model's activation, edge by edge."""
    for edge in range(spec.num_stages - 1):
        for index, entry in enumerate(spec.boundaries):
            if entry.edge in (None, edge) and entry.shape is None and sorted(entry.dims) == ["b", "h", "s"]:
                yield edge, index, entry
                break


def _text(kind: AxisType) -> str:
    return f"sharded({kind.dim})" if kind.is_cut else str(kind.kind)


RULES = (Rule(OTHER_LAYOUT, _check_declared, needs_plan=True),)
