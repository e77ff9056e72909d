"""Elements that ranks keep of sums, that their optimizers update, and that gathers return to all."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.comm.plan_context import Mesh
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import OpKind
from pipeproof.stages.describe.gradient_facts import ParameterGradient
from pipeproof.verify.certificate import graph_digest
from pipeproof.verify.declared_facts import Facts, UpdatedElements
from pipeproof.verify.gradients.kept_elements import RULES
from pipeproof.verify.subject import program_subject
from tests.plans import subject
from tests.verify.gradient_models import facts, moe
from tests.verify.gradient_mutants import changed, only, own
from tests.verify.programs import errors, mutated

SHARDED = {"memory": {"shard_optimizer": "dp"}}
ZERO = subject(topology={"dp": 2}, **SHARDED)


def flat(*ranks, buckets=((0, 16),), parameters=(), mesh=None, updates=()):
    """A stage whose flat gradients are cut over dp ranks: (range of the STEP, ranges put into gathers) of each."""
    members = " ".join(map(str, range(len(ranks))))
    sums = " ".join(
        f"0REDUCE_GRAD:dp/{i}.REDUCE_SCATTER:dp{{group=0 range={start}..{stop}}}"
        for i, (start, stop) in enumerate(buckets)
    )
    lines = [f"group dp: {members}"]
    for rank, (updated, given_back) in enumerate(ranks):
        step = f"0STEP{{range={updated}}}" if updated else "0STEP"
        gathers = " ".join(
            f"0GATHER_WEIGHT:dp/{i}.ALL_GATHER:dp{{group=0 range={one}}}" for i, one in enumerate(given_back)
        )
        lines.append(f"rank {rank}: 0F0 0B0 0REDUCE_GRAD:dp {sums} {step} 0GATHER_WEIGHT:dp {gathers}")
    known = Facts(updates=tuple(updates))
    if parameters:
        mesh = Mesh(("dp",), (len(ranks),))
        known = dataclasses.replace(known, gradients=facts(*parameters), mesh=mesh)
    return program_subject("\n".join(lines), facts=known)


A, B = ParameterGradient("a", (0,), numel=10), ParameterGradient("b", (0,), numel=6)
HALVES = (("0..8", ["0..8"]), ("8..16", ["8..16"]))
AT_PARAMETERS = (("0..10", ["0..10"]), ("10..16", ["10..16"]))


def test_halves_of_a_flat_buffer_are_kept_updated_and_gathered():
    assert errors(flat(*HALVES)) == []
    assert errors(flat(*HALVES, parameters=(A, B))) == []
    assert errors(flat(*HALVES, parameters=(dataclasses.replace(A, numel=9), B))) == []  # the last element is padding


def test_shards_that_end_at_parameters_are_not_those_of_an_equal_cut():
    (found,) = (one for one in errors(flat(*AT_PARAMETERS, parameters=(A, B))) if one.code == "PP614")
    assert found.message.startswith("rank 0, gradient of `a`: 0STEP updates elements 8..10 of `a` from a gradient")
    assert "0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp leaves the rank the sum of 0..8" in found.message
    assert [(one.rank, one.op) for one in found.witness.ops] == [
        (0, "0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp"), (0, "0STEP"),
    ]  # fmt: skip


def test_two_buckets_are_cut_each():
    """Each rank keeps a half of each bucket, which one STEP cannot name: the facts do."""
    buckets = ((0, 8), (8, 16))
    halves = [UpdatedElements(0, 0, ((0, 4), (8, 12))), UpdatedElements(1, 0, ((4, 8), (12, 16)))]
    ranks = ((None, ["0..4", "8..12"]), (None, ["4..8", "12..16"]))
    assert errors(flat(*ranks, buckets=buckets, updates=halves)) == []
    assert errors(flat(*ranks, buckets=buckets, updates=halves, parameters=(A, B))) == []
    found = only(flat(*((row, []) for row, _ in HALVES), buckets=buckets, parameters=(A, B)), "PP614")
    assert "0STEP updates elements 4..8 of `a`" in found.message
    assert errors(flat(*ranks, buckets=buckets)) == []  # nothing states the updated elements


def test_stated_updates_of_other_elements_than_are_kept():
    halves = [UpdatedElements(0, 0, ((8, 16),)), UpdatedElements(1, 0, ((0, 8),))]
    found = only(flat((None, []), (None, []), updates=halves, parameters=(A, B)), "PP614")
    assert "0STEP updates elements 8..10 of `a`" in found.message
    assert errors(flat((None, []), (None, []), updates=halves[::-1])) != []
    right = [dataclasses.replace(one, rank=1 - one.rank) for one in halves]
    assert errors(flat((None, []), (None, []), updates=right, parameters=(A, B))) == []


@pytest.mark.parametrize(
    "first",
    [
        "0REDUCE_GRAD:tp{group=1}",
        "0REDUCE_GRAD:tp 0REDUCE_GRAD:tp/0.ALL_REDUCE:tp{group=1 range=0..16}",
    ],
)
def test_a_sum_over_other_ranks_comes_first(first):
    def text(*shards):
        lines = [
            f"rank {rank}: 0F0 0B0 {first.replace('group=1', f'group={2 + rank // 2}')} 0REDUCE_GRAD:dp "
            f"0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp{{group={rank % 2} range=0..16}} 0STEP{{range={shards[rank // 2]}}}"
            for rank in range(4)
        ]
        return "\n".join(["group dp: 0 2", "group dp: 1 3", "group tp: 0 1", "group tp: 2 3", *lines])

    assert "PP614" not in {one.code for one in errors(program_subject(text("0..8", "8..16")))}
    assert "PP614" in {one.code for one in errors(program_subject(text("0..10", "10..16")))}


SUMMED_OVER_TP_FIRST = subject(topology={"dp": 2, "tp": 2, "sequence_parallel": True}, **SHARDED)


@pytest.mark.parametrize("base", [ZERO, ZERO.unfolded(), SUMMED_OVER_TP_FIRST], ids=["folded", "unfolded", "tp first"])
def test_equal_weights_with_one_mistake_are_all_found(base):
    norms = [i for i, weight in enumerate(base.plan.weights_of(0, 0)) if weight.shape == (16,)]

    def padded(rows):
        for i in norms[1:3]:
            changed(f"0REDUCE_GRAD:dp/{i}.", stop=20)(rows)

    found = [one.message for one in errors(mutated(base, padded)) if one.code == "PP614"]
    names = [base.plan.weights_of(0, 0)[i].name for i in norms]
    assert [any(f"`{name}`" in message for message in found) for name in names[:4]] == [False, True, True, False]


@pytest.mark.parametrize(
    ("given_back", "message"),
    [
        ([["8..16"], ["0..8"]], "rank 0 and 1 more: 0GATHER_WEIGHT:dp/0.ALL_GATHER:dp puts in elements 8..16"),
        ([["0..4"], ["8..12"]], "puts in elements 0..4, and the rank has also updated 4..8"),
        ([["0..4", "4..8"], ["8..12", "12..16"]], "puts in elements 8..12, which all members take for 4..8"),
    ],
)
def test_a_gather_that_exchanges_elements_is_found(given_back, message):
    ranks = [(updated, given) for (updated, _), given in zip(HALVES, given_back, strict=True)]
    assert message in only(flat(*ranks), "PP615").message


def test_a_group_in_another_order_exchanges_shards():
    one = flat(*HALVES)
    groups = [dataclasses.replace(one.graph.groups[0], ranks=(1, 0))]
    other = one.with_graph(build_graph(one.graph.rows(), one.graph.tensors, groups))
    assert {"PP614", "PP615"} == {found.code for found in errors(other)}


def exchanges(*lines):
    """(message, ranks of the witness) of each finding on the elements that members put into gathers."""
    text = "\n".join(["group dp: 0 1", *(f"rank {rank}: 0F0 0B0 {line}" for rank, line in enumerate(lines))])
    return [(one.message, [op.rank for op in one.witness.ops]) for one in RULES[0].check(program_subject(text))]


GATHER = "0STEP{range=%s} 0GATHER_WEIGHT:dp 0GATHER_WEIGHT:dp/0.%s:dp{group=0 range=%s}"


@pytest.mark.parametrize(
    "lines",
    [
        # One member does not call: that is PP306.
        (GATHER % ("0..8", "ALL_GATHER", "0..8"), "0STEP{range=8..16}"),
        ("0STEP{range=0..8}", GATHER % ("8..16", "ALL_GATHER", "8..16")),
        # No gather: every member gets the root's value.
        [GATHER % ("8..16", "BROADCAST", "8..16")] * 2,
        # The second gather states sizes alone.
        [GATHER % (own, "ALL_GATHER", own) + " 0GATHER_WEIGHT:dp/1.ALL_GATHER:dp{group=0 range=0..4}"
         for own in ("0..8", "8..16")],
    ],
)  # fmt: skip
def test_what_exchanges_no_elements_is_let_pass(lines):
    assert exchanges(*lines) == []


def test_a_fused_reduce_scatter_does_not_keep_the_shards_of_each_weight():
    def fused(rows):
        for program in rows:
            parts = [row for row in program if row.op.target and row.op.target.kind is OpKind.REDUCE_GRAD]
            for stage in {row.op.stage for row in parts}:
                mine = [row for row in parts if row.op.stage == stage]
                place = program.index(mine[0])
                program[:] = [row for row in program if row not in mine]
                program.insert(place, dataclasses.replace(mine[0], stop=sum(row.stop for row in mine)))

    found = [one for one in errors(mutated(ZERO, fused)) if one.code == "PP614"]
    assert len(found) == 1
    assert "elements 256..512 of `embed.weight` from" in found[0].message, found[0].message


def test_a_reduce_scatter_that_is_gathered_again_is_an_all_reduce():
    text = "0F0 0B0 0REDUCE_GRAD:dp 0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp{group=0 range=0..16}"
    text += " 0REDUCE_GRAD:dp/1.ALL_GATHER:dp{group=0 range=0..8} 0STEP{range=0..16}"
    assert errors(program_subject(f"group dp: 0 1\nrank 0: {text}\nrank 1: {text}")) == []
    without = text.replace(" 0REDUCE_GRAD:dp/1.ALL_GATHER:dp{group=0 range=0..8}", "")
    only(program_subject(f"group dp: 0 1\nrank 0: {without}\nrank 1: {without}"), "PP614")


def test_a_rank_outside_of_the_group_of_its_sum_keeps_no_share_of_it():
    scatter = "0F0 0B0 0REDUCE_GRAD:dp 0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp{group=0 range=0..16} 0STEP{range=%s}"
    lines = [f"rank {rank}: {scatter % own}" for rank, own in enumerate(("0..8", "8..16", "0..8"))]
    found = errors(program_subject("\n".join(["group dp: 0 1", *lines])))
    assert {one.code for one in found} == {"PP308", "PP603"}
    assert {one.witness.ops[0].rank for one in found} == {2}


def test_facts_that_state_no_elements_keep_their_digest():
    """The shards of a plan follow from the plan: no row and no fact states them."""
    assert not ZERO.graph.start.any()
    one = moe()
    assert graph_digest(one).startswith("3f297d8d11751baf")
    updates = dataclasses.replace(one.facts, updates=(UpdatedElements(0, 0, ((0, 8),)),))
    assert graph_digest(dataclasses.replace(one, facts=updates)) != graph_digest(one)


def test_a_folded_plan_has_the_shards_of_all_that_its_ranks_represent():
    """A rank of the graph keeps, and updates, the shards of all 16 members of its dp group."""
    base = subject(
        model={"num_layers": 8}, topology={"pp": 8, "tp": 4, "dp": 16}, schedule={"num_micro_batches": 32}, **SHARDED
    )
    assert base.lowered.folded
    assert own(base) == set()
    name = base.plan.weights_of(0, 0)[0].name
    row = next(row for row in base.graph.rows()[0] if str(row.op) == "0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp")
    wrong = mutated(base, changed("0REDUCE_GRAD:dp/0.", stop=row.stop + 16))
    (found,) = (one for one in errors(wrong) if one.code == "PP614")
    each = row.stop // 16
    assert f"updates elements {each}..{each + 1} of `{name}` from a gradient that is not summed" in found.message


def scattered_over_dp(*updated, sums, parameters=(A, B), rows=""):
    """Four ranks: two tensor-parallel ones (0 and 1, 2 and 3), each with two over dp; ``updated`` is of each rank."""
    lines = [f"group dp: {k} {k + 2}" for k in range(2)] + [f"group tp: {k} {k + 1}" for k in (0, 2)]
    for rank in range(4):
        text = f"0F0 0B0 {rows} 0REDUCE_GRAD:dp {sums} 0STEP".replace("@dp", str(rank % 2))
        lines.append(f"rank {rank}: {text}".replace("@tp", str(2 + rank // 2)))
    known = Facts(
        gradients=facts(*parameters),
        mesh=Mesh(("tp", "dp"), (2, 2)),
        updates=tuple(UpdatedElements(rank, 0, ranges) for rank, ranges in enumerate(updated) if ranges),
    )
    return program_subject("\n".join(lines), facts=known)


SCATTERED = "0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp{group=@dp range=0..16}"
LOWER, UPPER = ((0, 8),), ((8, 16),)


def test_updates_are_compared_on_every_rank_that_states_them():
    """The second tensor-parallel rank exchanges its shards; the first one's are right, and found before."""
    cut_over_tp = [dataclasses.replace(one, sharded_over=("tp",)) for one in (A, B)]
    assert own(scattered_over_dp(LOWER, LOWER, UPPER, UPPER, sums=SCATTERED, parameters=cut_over_tp)) == set()
    wrong = scattered_over_dp(LOWER, UPPER, UPPER, LOWER, sums=SCATTERED, parameters=cut_over_tp)
    assert {one.witness.ops[0].rank for one in errors(wrong) if one.code == "PP614"} == {1}


def test_a_weight_of_which_one_bucket_is_scattered_and_the_other_one_is_not():
    sums = "0REDUCE_GRAD:dp/0.REDUCE_SCATTER:dp{group=@dp range=0..8} "
    sums += "0REDUCE_GRAD:dp/1.ALL_REDUCE:dp{group=@dp range=8..16}"
    weight = [ParameterGradient("w", (0,), sharded_over=("tp",), numel=16)]
    first, second = ((0, 4), (8, 16)), ((4, 8), (8, 16))
    assert own(scattered_over_dp(first, first, second, second, sums=sums, parameters=weight)) == set()
    whole = ((0, 16),)
    found = only(scattered_over_dp(whole, whole, whole, whole, sums=sums, parameters=weight), "PP614")
    assert "updates elements 4..8 of `w` from a gradient that is not summed" in found.message
    assert "leaves the rank the sum of 0..4, 8..16" in found.message


def test_a_sum_over_another_axis_without_rows_of_its_own_comes_first():
    partial = [dataclasses.replace(one, partial_over=("tp",)) for one in (A, B)]
    right = scattered_over_dp(
        LOWER, LOWER, UPPER, UPPER, sums=SCATTERED, parameters=partial, rows="0REDUCE_GRAD:tp{group=@tp}"
    )
    assert own(right) == set()
    wrong = scattered_over_dp(
        UPPER, UPPER, LOWER, LOWER, sums=SCATTERED, parameters=partial, rows="0REDUCE_GRAD:tp{group=@tp}"
    )
    assert own(wrong) == {"PP614"}


TOPOLOGIES = st.fixed_dictionaries(
    {"pp": st.sampled_from([1, 2]), "dp": st.sampled_from([1, 2, 3]), "tp": st.sampled_from([1, 2])},
    optional={"ep": st.just(2), "cp": st.just(2), "sequence_parallel": st.just(True)},
)
MODELS = st.fixed_dictionaries(
    {"vocab_size": st.sampled_from([30, 32, 64])},
    optional={"tied_embedding": st.just(True), "moe": st.just({"num_experts": 4, "top_k": 2, "ffn_size": 16})},
)
SCHEDULES = st.sampled_from(
    [{"kind": "1f1b"}, {"kind": "gpipe"}, {"kind": "zb_v", "num_chunks": 2}, {"kind": "dualpipe"},
     {"kind": "interleaved", "num_chunks": 2}, {"kind": "1f1b", "reduce_gradients": "when_ready"}]
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(TOPOLOGIES, MODELS, SCHEDULES, st.sampled_from([{}, SHARDED]), st.booleans())
def test_plans_have_no_finding_on_their_gradients(topology, model, schedule, memory, clip):
    if "moe" not in model or "cp" in topology:
        topology = {axis: size for axis, size in topology.items() if axis != "ep"}
    if schedule["kind"] == "dualpipe":
        topology = {**topology, "pp": 2}
    run = {"clip_norm": 1.0} if clip else {}
    one = subject(model=model, topology=topology, schedule=schedule, run=run, **memory)
    for seen in (one, one.unfolded()):
        assert not [found for found in errors(seen) if found.code.startswith("PP6")]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(2, 4),
    st.integers(1, 4),
    st.booleans(),
    st.data(),
)
def test_right_shards_of_any_flat_buffer_are_let_pass_and_moved_borders_found(sizes, ranks, each, named, data):
    total = -(-sum(sizes) // (ranks * each)) * ranks * each  # padded
    share = total // ranks
    boundaries = [(k * share, (k + 1) * share) for k in range(ranks)]
    parameters = [ParameterGradient(f"w{i}", (0,), numel=size) for i, size in enumerate(sizes)] if named else []

    def cut(ends):
        shards = [f"{start}..{stop}" for start, stop in ends]
        return flat(*((one, [one]) for one in shards), buckets=((0, total),), parameters=parameters)

    assert errors(cut(boundaries)) == []
    moved = data.draw(st.integers(1, ranks - 1))
    by = data.draw(st.sampled_from([-1, 1]))
    ends = [0, *itertools.accumulate([share] * ranks)]
    ends[moved] += by
    used = sum(sizes) if named else total
    if 0 < ends[moved] < total and min(ends[moved], moved * share) < used:
        shards = list(itertools.pairwise(ends))
        if all(start < stop for start, stop in shards):
            assert "PP614" in {one.code for one in errors(cut(shards))}
