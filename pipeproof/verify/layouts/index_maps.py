"""209, 21x: maps of saves, loads, reshards and experts are bijections, both sides have the same, as plans declare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeproof.diagnostics.finding import ElementRange, ExampleKind, Finding, RangesWitness, RuleDoc
from pipeproof.specs.plan import PlanSpec
from pipeproof.specs.transport import BoundarySpec
from pipeproof.stages.describe.index_map import NOWHERE, Count, IndexMap, counts, differences
from pipeproof.stages.describe.layer import is_empty, layer_kind
from pipeproof.stages.describe.model_family import typed_layers
from pipeproof.stages.describe.typed_ops import AxisType
from pipeproof.verify.declared_facts import ExpertRouting, HeldTensor, MapUse
from pipeproof.verify.subject import Rule, Subject


def _example(field: str, fact: str) -> str:
    return (
        "from pipeproof.schedule.op_table import build_graph\n"
        "from pipeproof.stages.describe.index_map import IndexMap, expert_map, token_map\n"
        "from pipeproof.verify.declared_facts import Facts\n"
        "from pipeproof.verify.declared_facts import HeldTensor, LoadedParameter, MapUse\n"
        "from pipeproof.verify.subject import graph_subject\n\n"
        f"fact = {fact}\n"
        f"subject = graph_subject(build_graph([[]], [], []), facts=Facts({field}=(fact,)))"
    )


_EXPERTS = 'HeldTensor("experts", 80, {{0: expert_map(8, 10, 2, 0), 1: expert_map(8, 10, 2, {})}})'

NO_BIJECTION = RuleDoc(
    code="PP210",
    title="parts of a tensor leave elements out or hold some of them too often",
    explanation=(
        "The ranks' parts, each with its map from local to global indices, must hold every element of the whole "
        "tensor as often as declared, and each local element must be one of them. A checkpoint whose expert-parallel "
        "ranks number their experts from 0 has one rank's experts and lacks all others; one whose offsets overlap "
        "overwrites what another rank wrote. Sizes are right, and nothing complains until the model is loaded."
    ),
    wrong=_example("held_tensors", _EXPERTS.format(0)),
    right=_example("held_tensors", _EXPERTS.format(1)),
    kind=ExampleKind.PYTHON,
)


def _check_bijection(subject: Subject) -> Iterator[Finding]:
    for tensor in subject.facts.held_tensors:
        pieces = [(start, length) for part in tensor.parts.values() for _, start, length in part.ranges]
        wrong = [count for count in counts(pieces, tensor.numel) if count.times != _expected(tensor, count)]
        overlaps = [rank for rank, part in tensor.parts.items() if _overlaps(part)]
        if wrong or overlaps:
            yield NO_BIJECTION.finding(
                f"`{tensor.name}` of {tensor.numel} elements: {'; '.join(_facts(tensor, wrong, overlaps))}",
                help="add the rank's own offset to its local indices: its position among the holders of the tensor",
                witness=RangesWitness((), tuple(_repeated(tensor, wrong))),
            )


def _expected(tensor: HeldTensor, count: Count) -> int:
    return tensor.copies if 0 <= count.start < tensor.numel else 0


def _overlaps(part: IndexMap) -> bool:
    """Return True if two ranges of one rank claim the same local element."""
    return bool((part.local[1:] < (part.local + part.length)[:-1]).any())


def _facts(tensor: HeldTensor, wrong: list[Count], overlaps: list[int]) -> Iterator[str]:
    """The first range of each kind of mistake, in words."""
    for mistake in ("outside", "missing", "rare", "repeated"):
        first = next((count for count in wrong if _mistake(tensor, count) == mistake), None)
        if first is None:
            continue
        where = f"elements {first.start}..{first.stop}"
        match mistake:
            case "outside":
                yield f"{where} do not exist and are held"
            case "missing":
                yield f"no rank holds {where}"
            case _:
                yield f"{where} are held {first.times} times, not {_times(tensor.copies)}"
    for rank in overlaps[:1]:
        yield f"two pieces of rank {rank} claim the same local elements"


def _mistake(tensor: HeldTensor, count: Count) -> str:
    if not 0 <= count.start < tensor.numel:
        return "outside"
    if not count.times:
        return "missing"
    return "rare" if count.times < tensor.copies else "repeated"


def _times(copies: int) -> str:
    return "once" if copies == 1 else f"{copies} times"


def _repeated(tensor: HeldTensor, wrong: list[Count]) -> Iterator[ElementRange]:
    """For elements that are held too often: each further holder gets the first holder's elements."""
    for count in wrong:
        if _mistake(tensor, count) != "repeated":
            continue
        length = count.stop - count.start
        holders = [rank for rank, part in tensor.parts.items() if list(_owned(part, count.start, length))]
        for rank in holders[tensor.copies :]:
            yield from _ranges(rank, {holders[0]: tensor.parts[holders[0]]}, count.start, length)


OTHER_INDICES = RuleDoc(
    code="PP211",
    title="local elements are taken for other elements",
    explanation=(
        "One side lays a tensor out by one map from local to global indices, the other side reads it by another map. "
        "Both are bijections: counts, shapes and bytes agree and no check of sizes can notice. Examples: a token index "
        "computed as rank * tokens + i ignores the batch dim, a fused QKV weight is sliced by rows though its rows "
        "interleave by key-value group, a buffer is sharded along another dim of the same size."
    ),
    wrong=_example("map_uses", 'MapUse("tokens", {1: token_map(2, 8, 2, 1)}, {1: IndexMap.of([(0, 8, 8)])})'),
    right=_example("map_uses", 'MapUse("tokens", {1: token_map(2, 8, 2, 1)}, {1: token_map(2, 8, 2, 1)})'),
    kind=ExampleKind.PYTHON,
)


def _check_uses(subject: Subject) -> Iterator[Finding]:
    for use in subject.facts.map_uses:
        lost: list[ElementRange] = []
        foreign: list[ElementRange] = []
        for rank in sorted(use.holds.keys() | use.taken_for.keys()):
            nothing = IndexMap.of([])
            for one in differences(use.holds.get(rank, nothing), use.taken_for.get(rank, nothing)):
                lost += _ranges(rank, use.holds, one.second, one.length)
                foreign += _ranges(rank, {rank: use.holds.get(rank, nothing)}, one.first, one.length)
        if lost or foreign:
            yield OTHER_INDICES.finding(
                f"`{use.name}`: {_first(use)}",
                help="use the map by which the tensor is laid out on both sides",
                witness=RangesWitness(tuple(lost), tuple(foreign)),
            )


def _first(use: MapUse) -> str:
    """The first element that is taken for another one."""
    for rank in sorted(use.holds.keys() | use.taken_for.keys()):
        nothing = IndexMap.of([])
        for one in differences(use.holds.get(rank, nothing), use.taken_for.get(rank, nothing)):
            held_text, there = (f"global {i}" if i != NOWHERE else "nothing" for i in (one.first, one.second))
            return f"local element {one.local} of rank {rank} is {held_text} and is taken for {there}"
    raise AssertionError("there is a difference")


def _ranges(rank: int, holders: Mapping[int, IndexMap], start: int, length: int) -> Iterator[ElementRange]:
    """The global range that ``rank`` misses or gets, in local elements of the first rank that holds it."""
    if start == NOWHERE:
        return
    for holder, part in holders.items():
        owned = list(_owned(part, start, length))
        for local, whole, num in owned:
            yield ElementRange(rank, local, local + num, holder, f"global {whole} .. {whole + num - 1}")
        if owned:
            return


def _owned(part: IndexMap, start: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(local, global, length) of the ranges of a part within a global range."""
    for whole, local, num in part.inverted().part(start, start + length, start).ranges:
        yield local, whole, num


OTHER_MEMORY = RuleDoc(
    code="PP212",
    title="a parameter is loaded into memory that the model does not use",
    explanation=(
        "A loader writes into the tensors that it was given. Where one of them is a copy (a cast to another dtype, "
        "a contiguous clone), the copy is filled and thrown away, and the model keeps its initial weights: "
        "no error, and a loss at step 0 as of an untrained model."
    ),
    wrong=_example("loads", 'LoadedParameter("w", 0, target="bfloat16 copy of w", memory="w")'),
    right=_example("loads", 'LoadedParameter("w", 0, target="w", memory="w")'),
    kind=ExampleKind.PYTHON,
)


def _check_memory(subject: Subject) -> Iterator[Finding]:
    for load in subject.facts.loads:
        if load.target != load.memory:
            yield OTHER_MEMORY.finding(
                f"on rank {load.rank} `{load.parameter}` is read into `{load.target}`, and the model computes with "
                f"`{load.memory}`",
                help=f"read into `{load.memory}`, or copy `{load.target}` there after the load",
            )


OTHER_LAYOUT = RuleDoc(
    code="PP209",
    title="the declared layout of the activation differs from the layout that the layers make or need",
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


def _routing_example(combine: str) -> str:
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
    wrong=_routing_example("{0: (0, 1, 2, 3), 1: (1, 0, 2, 3)}"),
    right=_routing_example("experts"),
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
                    f"takes it for the result of expert {back}"
                )
                break


RULES: tuple[Rule, ...] = (
    Rule(OTHER_EXPERT, _check),
    Rule(NO_BIJECTION, _check_bijection),
    Rule(OTHER_INDICES, _check_uses),
    Rule(OTHER_MEMORY, _check_memory),
    Rule(OTHER_LAYOUT, _check_declared, needs_plan=True),
)
