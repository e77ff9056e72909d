"""Gradient rules on plans: each kills its mutant of a right plan, folded or not, and leaves right plans alone."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.schedule.columns import NONE
from pipeproof.schedule.op_table import Group, build_graph
from pipeproof.verify.check_plan import check_subject
from pipeproof.verify.gradients.diagnose import diagnose
from tests.plans import subject
from tests.verify.gradient_models import BIAS, DENSE, facts, model, regrouped
from tests.verify.gradient_mutants import changed, double, drop, moved, only, own, plan
from tests.verify.programs import codes, mutated

MUTANTS = {
    "one parameter left out": (drop("0REDUCE_GRAD:dp/3."), "PP601"),
    "the last parameter left out": (drop("1REDUCE_GRAD:dp/15."), "PP601"),
    "maximum of gradients": (changed("0REDUCE_GRAD:dp/1.", reduction="max"), "PP602"),
    "reduced after the step": (moved("0STEP", "0REDUCE_GRAD:dp"), "PP604"),
    "average in place of sum": (changed("REDUCE_GRAD:dp/", reduction="avg"), "PP606"),
    "a wrong factor on a sum": (changed("0REDUCE_GRAD:tp/0.", scale="1/tp"), "PP606"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_of_a_plan_is_found_by_its_rule_alone(name):
    base = plan()
    assert codes(base) == set()
    change, code = MUTANTS[name]
    found = only(mutated(base, change), code)
    assert found.help
    assert found.witness


ONE_SUM = "0F0 0B0 0REDUCE_GRAD:dp{@dp} 0STEP"


def test_a_group_that_crosses_tensor_parallel_ranks():
    base = model(ONE_SUM, facts(DENSE, BIAS), tp=2, dp=2)
    found = only(regrouped(base, "dp", (0, 3), (1, 2)), "PP603")
    assert found.message.startswith("rank 0 and 3 more, gradient of `dense`: 0REDUCE_GRAD:dp sums over ranks 0, 3, ")
    assert found.help == "reduce over ranks 0, 2"
    assert codes(regrouped(plan(pp=1), "dp", (0, 3), (1, 2))) == {"PP309", "PP603"}


def test_d8_a_group_that_is_too_small():
    base = model(ONE_SUM, facts(BIAS), dp=4)
    rows = [[dataclasses.replace(row, group=NONE) for row in program] for program in base.graph.rows()]
    for rank, program in enumerate(rows):
        changed("REDUCE", group=rank // 2)([program])
    halves = [Group("dp", ranks) for ranks in ((0, 1), (2, 3))]
    found = only(base.with_graph(build_graph(rows, (), halves)), "PP603")
    assert "ranks 0, 1, which is not the dp group" in found.message


def test_a_group_of_two_axes_at_once_is_right():
    """One communicator over dp and ep in place of two, as Megatron-LM has it."""
    base = subject(topology={"pp": 1, "dp": 2, "ep": 2})
    both = [dataclasses.replace(base.graph.groups[0], axis="dp", ranks=(0, 1, 2, 3))]
    rows = [
        [
            dataclasses.replace(row, group=0) if row.group >= 0 else row
            for row in program
            if "REDUCE_GRAD:ep" not in str(row.op)
        ]
        for program in base.graph.rows()
    ]
    assert own(base.with_graph(build_graph(rows, base.graph.tensors, both))) == set()


def test_every_axis_is_reduced_once_however_the_scale_is_cut_up():
    base = plan()
    assert own(mutated(base, changed("1F", scale="1/global_tokens"))) == set()

    def averaged(rows):
        changed("REDUCE_GRAD:dp/", reduction="avg", scale="dp")(rows)

    assert own(mutated(base, averaged)) == set()

    def summed(rows):
        changed("1F", scale="1")(rows)
        changed("REDUCE_GRAD:dp/", scale="1/global_tokens")(rows)

    assert own(mutated(base, summed)) == set()


def test_mean_of_micro_batches_in_three_factors():
    base = subject(topology={"pp": 1, "dp": 2}, loss={"normalization": "mean_of_micro_batches"})
    assert codes(base) == set()

    def three(rows):
        changed("0F", scale="1/micro_batch_tokens")(rows)
        changed("0B", scale="1/num_micro_batches")(rows)
        changed("REDUCE_GRAD:dp/", reduction="avg")(rows)

    assert own(mutated(base, three)) == set()
    found = only(mutated(base, changed("0F", scale="1/global_tokens")), "PP606")
    assert "declared 1/(8*micro_batch_tokens)" in found.message


def test_the_order_of_additions_does_not_matter():
    """J7: the same sum in another order of micro-batches, with the first one written."""
    base = subject(schedule={"kind": "gpipe", "num_micro_batches": 3})

    def reordered(rows):
        program = rows[1]
        places = [i for i, row in enumerate(program) if str(row.op) in ("1B0", "1B2")]
        first, last = places
        program[first], program[last] = program[last], dataclasses.replace(program[first])

    assert own(mutated(base, reordered)) == set()


def test_averaging_what_is_equal_changes_nothing():
    base = plan(sequence_parallel=False)
    rows = base.graph.rows()
    tp = {rank: i for i, g in enumerate(base.graph.groups) if g.axis == "tp" for rank in g.ranks}
    for rank, program in enumerate(rows[:4]):  # norms come first on stage 0 alone
        place = next(i for i, row in enumerate(program) if str(row.op) == "0REDUCE_GRAD:dp/1.ALL_REDUCE:dp")
        program.insert(place, dataclasses.replace(program[place], group=tp[rank], reduction="avg"))
    averaged = base.with_graph(build_graph(rows, base.graph.tensors, base.graph.groups))
    assert own(averaged) == set()
    assert own(mutated(averaged, changed("", reduction="sum"))) == {"PP602"}


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    pp=st.integers(1, 3),
    tp=st.sampled_from([1, 2]),
    sp=st.booleans(),
    dp=st.integers(1, 3),
    cp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2]),
    rounds=st.integers(1, 3),
    order=st.permutations(["tp", "cp", "ep", "dp", "pp"]),
    normalization=st.sampled_from(["global_tokens", "mean_of_micro_batches"]),
)
def test_generated_plans_are_right(kind, pp, tp, sp, dp, cp, ep, rounds, order, normalization):
    one = subject(
        model={"num_layers": 6},
        topology={"pp": pp, "tp": tp, "dp": dp, "cp": cp, "ep": ep, "sequence_parallel": sp, "order": list(order)},
        schedule={"kind": kind, "num_micro_batches": pp * rounds, "num_chunks": 2 if kind == "interleaved" else 1},
        loss={"normalization": normalization},
    )
    assert diagnose(one) == ()


FOLDED = {
    "model": {"num_layers": 8},
    "topology": {"pp": 4, "tp": 4, "dp": 64, "sequence_parallel": True},
    "schedule": {"kind": "1f1b", "num_micro_batches": 8},
}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (drop(), set()),
        (drop("2REDUCE_GRAD:dp/0."), {"PP601"}),
        (drop("2REDUCE_GRAD:tp/0."), {"PP601"}),
        (double("2REDUCE_GRAD:dp/0."), {"PP602"}),
        (changed("3F", scale="1/global_tokens/dp"), {"PP606"}),
        (changed("2REDUCE_GRAD:dp/0.", reduction="avg"), {"PP606"}),
        (changed("=2B5=", reduction="overwrite"), {"PP605"}),
    ],
)
def test_a_folded_plan_is_checked_like_a_whole_one(change, expected):
    base = subject(**FOLDED)
    assert base.plan.folded
    rows = base.graph.rows()
    change(rows)
    graph = build_graph(rows, base.graph.tensors, base.graph.groups)
    object.__setattr__(graph, "global_rank", base.graph.global_rank)
    assert own(base.with_graph(graph)) == expected


def test_a_folded_group_with_too_few_copies():
    base = subject(**FOLDED)
    groups = [dataclasses.replace(g, copies=32) if g.axis == "dp" else g for g in base.graph.groups]
    graph = build_graph(base.graph.rows(), base.graph.tensors, groups)
    object.__setattr__(graph, "global_rank", base.graph.global_rank)
    assert own(base.with_graph(graph)) == {"PP603"}


def test_findings_name_what_is_alike_once():
    report = check_subject(mutated(plan(), drop("REDUCE_GRAD:dp")))
    (found,) = report.errors
    assert "rank 0 (pp 0, dp 0, tp 0) and 7 more" in found.message
    assert "and 28 more: each dp rank has an addend" in found.message
