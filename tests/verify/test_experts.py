"""Plans with experts and with latent attention: right ones are clean, and their typical mistakes are found."""

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.comm import lower as lowering
from pipeproof.schedule.columns import NONE
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import OpKind, child_of
from pipeproof.specs.axis_layout import INVARIANT
from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.layers.layer_operations import layer_operations
from pipeproof.stages.describe.layers.operations import VISITS, Elementwise, Product, RankSizes
from pipeproof.verify.check_plan import check_subject
from tests.plans import subject
from tests.verify.programs import codes

MOE = {"num_experts": 4, "top_k": 2, "ffn_size": 8, "num_shared_experts": 1, "dense_layers": 1}
GATHERED = {**MOE, "dispatcher": "all_gather"}
MLA = {"q_rank": 6, "kv_rank": 4, "nope_head_size": 2, "rope_head_size": 2, "value_head_size": 4}


def experts(moe=MOE, **topology):
    """Stage 0 has a dense block and one with experts, stage 1 two with experts."""
    return subject(model={"moe": moe}, topology={"pp": 2, "ep": 2, "dp": 2, **topology})


def children(one, axis):
    """The sums over ``axis`` below the reductions of stage 1, on rank 0 of them."""
    rank = one.plan.ranks_of_stage(1)[0]
    return [row for row in one.graph.rows()[rank] if f"1REDUCE_GRAD:{axis}/" in str(row.op)]


@settings(max_examples=25, deadline=None)
@given(
    tp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2]),
    sequence_parallel=st.booleans(),
    parts=st.sampled_from(
        [{"moe": MOE}, {"moe": GATHERED}, {"moe": MOE, "mla": MLA}, {"mla": MLA}, {"num_kv_heads": 2, "head_size": 6}]
    ),
    kind=st.sampled_from(["1f1b", "zb_h1"]),
)
def test_right_plans_are_clean(tp, cp, ep, dp, sequence_parallel, parts, kind):
    topology = {"pp": 2, "tp": tp, "cp": cp, "ep": ep, "dp": dp, "sequence_parallel": sequence_parallel}
    one = subject(model=parts, topology=topology, schedule={"kind": kind})
    assert codes(one) == set()
    assert codes(replace(one, lowered=one.plan.unfolded())) == set()


def test_experts_under_copies_of_stages_and_in_two_sizes_of_micro_batches():
    schedule = {"kind": "dualpipe", "num_micro_batches": 4, "last_micro_batch_size": 1}
    assert codes(subject(model={"moe": MOE}, topology={"pp": 2, "ep": 2}, schedule=schedule)) == set()


def test_exchanges_are_below_forwards_and_backwards_of_blocks_with_experts():
    one = experts()
    ops = [one.graph.ops[i] for i in one.graph.rank_ops(0)]
    exchanges = [str(op.target) for op in ops if op.kind is OpKind.ALL_TO_ALL]
    assert exchanges.count("0F0") == 3  # counts, to the experts of one block and back
    assert exchanges.count("0B0") == 2
    stage_1 = [one.graph.ops[i] for i in one.graph.rank_ops(one.plan.ranks_of_stage(1)[0])]
    assert sum(op.kind is OpKind.ALL_TO_ALL and str(op.target) == "1F0" for op in stage_1) == 6


def test_counts_do_not_grow_with_the_tokens():
    """One number for each expert, in a type of their own, of however many tokens a micro-batch has."""
    one = subject(model={"moe": MOE}, topology={"pp": 2, "ep": 2}, schedule={"last_micro_batch_size": 1})
    graph = one.graph
    reported = [
        i for i in graph.rank_ops(0) if str(graph.ops[i]).endswith("/0.ALL_TO_ALL:ep") and "F" in str(graph.ops[i])
    ]
    assert {int(graph.stop[i] - graph.start[i]) for i in reported} == {4}
    assert {graph.tensors[int(graph.tensor[i])].dtype for i in reported} == {"int64"}
    assert len(reported) == 4
    moved = [i for i in graph.rank_ops(0) if str(graph.ops[i]).endswith("F3/1.ALL_TO_ALL:ep")]
    assert [int(graph.stop[i] - graph.start[i]) for i in moved] == [8 * 2 * 16]


def test_experts_are_summed_over_dp_and_not_over_ep():
    one = experts()
    weights = [p for layer in one.plan.layers_of(1) for p in layer.parameters]
    of_experts = [p for p in weights if ".experts." in p.name]
    assert len(of_experts) == 6
    assert len(children(one, "dp")) == len(weights)
    assert len(children(one, "ep")) == len(weights) - 6
    sizes = Counter(row.stop for row in children(one, "dp")) - Counter(row.stop for row in children(one, "ep"))
    assert sizes == {2 * 16 * 8: 6}  # of two of four experts


def with_rows(one, change):
    rows = one.graph.rows()
    groups = {(group.axis, rank): i for i, group in enumerate(one.graph.groups) for rank in group.ranks}
    changed = [change(rank, program, groups) for rank, program in enumerate(rows)]
    return one.with_graph(build_graph(changed, one.graph.tensors, one.graph.groups))


def test_experts_summed_over_ep_are_found():
    """Every rank's experts of the same place added up, though they are different experts."""

    def also_over_ep(rank, program, groups):
        result = []
        for row in program:
            if ".ALL_REDUCE:ep" in str(row.op) and "REDUCE_GRAD:ep/" in str(row.op):
                continue
            result.append(row)
            if row.op.kind is OpKind.REDUCE_GRAD and row.op.axis == "ep":
                over_dp = [r for r in program if f"{row.op.stage}REDUCE_GRAD:dp/" in str(r.op)]
                for index, sibling in enumerate(over_dp):
                    child = child_of(row.op, index, OpKind.ALL_REDUCE, "ep")
                    result.append(replace(sibling, op=child, group=groups["ep", rank]))
        return result

    one = experts()
    assert codes(with_rows(one, also_over_ep)) == {"PP602"}
    assert codes(with_rows(one, lambda rank, program, groups: program)) == set()


def test_experts_that_are_not_summed_over_dp_are_found():
    """The mistake of taking ep x dp for the one data-parallel group of everything, experts left to ep alone."""
    one = experts()
    weights = [p for layer in one.plan.layers_of(1) for p in layer.parameters]
    of_experts = {i for i, p in enumerate(weights) if ".experts." in p.name}

    def without(rank, program, groups):
        return [row for row in program if not ("1REDUCE_GRAD:dp/" in str(row.op) and row.op.index in of_experts)]

    found = codes(with_rows(one, without))
    assert found == {"PP601"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda p: replace(p, ep=INVARIANT), "PP206"),  # as if every EP rank had all experts
        (lambda p: replace(p, partial_over=()), "PP206"),  # routers and experts see their rank's tokens only
    ],
)
def test_a_wrong_description_of_experts_is_found(monkeypatch, change, code):
    def wrong(plan, *size):
        return tuple(
            replace(layer, parameters=tuple(change(p) if ".mlp." in p.name else p for p in layer.parameters))
            for layer in describe_gpt(plan, *size)
        )

    monkeypatch.setattr(lowering, "describe_layers", wrong)
    assert code in codes(experts(tp=2))


BY_TOKEN = {**MOE, "hash_layers": 1, "score": "sqrtsoftplus"}


@pytest.mark.parametrize("moe", [MOE, GATHERED, BY_TOKEN], ids=["scores", "all-gather", "token ids"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_experts_over_tp_need_no_exchange_and_are_whole(moe, sequence_parallel):
    one = experts(moe, ep=1, tp=2, sequence_parallel=sequence_parallel, experts_over_tp=True)
    assert codes(one) == set()
    split = experts(moe, ep=1, tp=2, sequence_parallel=sequence_parallel)
    assert [str(row.op) for row in one.graph.rows()[0]] == [str(row.op) for row in split.graph.rows()[0]]
    weights = [p for layer in one.plan.layers for p in layer.parameters if ".experts." in p.name]
    assert {(p.tp.dim, p.ep.dim, p.local_shape({"tp": 2, "ep": 1})[0]) for p in weights} == {(0, None, 2)}


def test_whole_experts_are_the_same_work_for_fewer_moved_tokens():
    """Products and activations have half of the rows and twice the columns; tokens are moved for half of the visits."""

    def sizes_of(one, operation):
        sizes = RankSizes(one.plan.spec, "layer.1", MicroBatchSize(8, 2))
        if isinstance(operation, Product):
            inner, columns, _ = sizes.product(operation)
            return sizes.rows(operation.rows) * inner * columns
        return sizes.rows(operation.rows) * sizes.elements(operation)

    whole, split = (experts(ep=1, tp=2, experts_over_tp=over) for over in (True, False))
    operations = {
        one.name: (sizes_of(whole, one), sizes_of(split, one))
        for one in layer_operations(whole.plan.spec.gpt, "layer.1")
        if isinstance(one, Product | Elementwise) and one.rows == VISITS
    }
    ratios = {name: ours / theirs for name, (ours, theirs) in operations.items()}
    assert ratios.pop("mlp.permute") == ratios.pop("mlp.unpermute") == Fraction(1, 2)
    assert ratios == {f"mlp.experts.{name}": 1 for name in ("gate_up", "swiglu", "down")}


def test_inner_sizes_of_whole_experts_need_not_divide():
    assert codes(experts({**MOE, "num_shared_experts": 0, "ffn_size": 7}, ep=1, tp=2, experts_over_tp=True)) == set()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_sum_of_the_tp_ranks_experts_that_all_ranks_leave_out_is_found(sequence_parallel):
    """The only sum of the results of the ranks' own experts is at the end of the block's MLP."""
    one = experts(ep=1, tp=2, sequence_parallel=sequence_parallel, experts_over_tp=True)
    label = "layer.1.mlp.out"
    (layer,) = [layer for layer in one.plan.layers if layer.name == "layer.1"]
    number = sum(len(other.forward_collectives) for other in one.plan.layers[:2])
    number += [c.label for c in layer.forward_collectives].index(label)
    begin = f"0F0/{number}."

    def without(rank, program, groups):
        return [row for row in program if not str(row.op).startswith(begin)]

    assert codes(with_rows(one, without)) == {"PP208"}


@pytest.mark.parametrize("where", ["0F0/0.ALL_TO_ALL:ep", "0F0/1.ALL_TO_ALL:ep", "0B1/1.ALL_TO_ALL:ep"])
def test_an_exchange_that_all_ranks_leave_out_is_found(where):
    def without(rank, program, groups):
        return [row for row in program if str(row.op) != where]

    assert "PP208" in codes(with_rows(experts(), without))


@pytest.mark.parametrize(
    "where",
    ["0F0/0.ALL_GATHER:ep", "0F0/1.ALL_GATHER:ep", "0F0/2.REDUCE_SCATTER:ep", "0B1/0.ALL_GATHER:ep",
     "0B1/1.REDUCE_SCATTER:ep"],
)  # fmt: skip
def test_a_gather_of_tokens_or_a_sum_of_results_that_all_ranks_leave_out_is_found(where):
    def without(rank, program, groups):
        return [row for row in program if str(row.op) != where]

    one = experts(GATHERED)
    assert any(str(row.op) == where for row in one.graph.rows()[0])
    assert codes(with_rows(one, without)) == {"PP208"}
    assert codes(with_rows(one, lambda rank, program, groups: program)) == set()


def test_results_that_are_gathered_and_not_summed_are_found():
    """Each rank would have the results of its own experts alone."""

    def gathered(rank, program, groups):
        return [
            replace(row, op=child_of(row.op.target, 2, OpKind.ALL_GATHER, "ep"))
            if str(row.op) == "0F0/2.REDUCE_SCATTER:ep" else row
            for row in program
        ]  # fmt: skip

    assert "PP208" in codes(with_rows(experts(GATHERED), gathered))


COUNTS = "0F0/0.ALL_TO_ALL:ep"


def typed_otherwise(one, ranks, **change):
    """The plan with the exchange of counts of one micro-batch changed on some ranks."""
    rows = one.graph.rows()
    for rank in ranks:
        rows[rank] = [replace(row, **change) if str(row.op) == COUNTS else row for row in rows[rank]]
    return one.with_graph(build_graph(rows, one.graph.tensors, one.graph.groups))


def test_counts_that_are_sent_as_activations_are_found():
    """A call that names no tensor moves activations: on all ranks, or on one rank among others."""
    one = experts()
    everywhere = typed_otherwise(one, range(one.graph.num_ranks), tensor=NONE)
    assert codes(everywhere) == {"PP208"}
    (found,) = [finding for finding in check_subject(everywhere).findings if finding.code == "PP208"]
    assert (
        "ALL_TO_ALL of 4 over ep as its collective 0, and needs ALL_TO_ALL of 4 over ep (mlp.counts of `layer.1`, "
        "stage 0) in int64"
    ) in found.message
    assert codes(typed_otherwise(one, [0], tensor=NONE)) == {"PP208", "PP306"}


def test_a_call_that_names_the_type_of_activations_is_the_same_as_one_that_names_none():
    one = experts(tp=2)
    hidden = next(place for place, tensor in enumerate(one.graph.tensors) if tensor.dtype == "float32")
    rows = one.graph.rows()
    rows[0] = [replace(row, tensor=hidden) if str(row.op) == "0F0/0.ALL_REDUCE:tp" else row for row in rows[0]]
    assert rows != one.graph.rows()
    assert codes(one.with_graph(build_graph(rows, one.graph.tensors, one.graph.groups))) == set()


def test_a_description_with_another_type_of_counts_is_found(monkeypatch):
    def wrong(plan, *size):
        return tuple(
            replace(layer, forward_collectives=tuple(replace(c, dtype=None) for c in layer.forward_collectives))
            for layer in describe_gpt(plan, *size)
        )

    monkeypatch.setattr(lowering, "describe_layers", wrong)
    assert "PP207" in codes(experts())
