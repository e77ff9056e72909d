"""Tied embedding and head: ranks that hold the weight, the order of sums, and findings on other sums."""

from dataclasses import replace

import pytest

from pipeproof.comm.accumulation_order import Accumulation, accumulation_of, tied_sums
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import OpKind, child_of, parse_op
from pipeproof.verify.gradients.diagnose import diagnose
from tests.plans import subject
from tests.verify.gradient_mutants import changed, double, drop, own
from tests.verify.programs import codes, errors, mutated

SCHEDULES = {
    "loop": {"kind": "1f1b"},
    "split": {"kind": "zb_h1"},
    "chunks": {"kind": "interleaved", "num_chunks": 2},
    "v": {"kind": "zb_v", "num_chunks": 2},
    "copies": {"kind": "dualpipe", "num_micro_batches": 8},
    "turned": {"kind": "custom", "placement": [[1], [0]],
               "programs": [["1F0", "1B0", "1F1", "1B1"], ["0F0", "0B0", "0F1", "0B1"]], "num_micro_batches": 2},
}  # fmt: skip


def tied(schedule="loop", **topology):
    return subject(
        model={"tied_embedding": True, "num_layers": 8, "vocab_size": 40},
        topology={"pp": 2, **topology},
        schedule=dict(SCHEDULES[schedule]),
    )


def later(part, before):
    """Moves the rows with ``part`` to just before the step of their own stage, on every rank."""

    def change(rows):
        for program in rows:
            taken = [row for row in program if part in str(row.op)]
            if taken:
                program[:] = [row for row in program if part not in str(row.op)]
                place = next(i for i, row in enumerate(program) if str(row.op) == f"{taken[0].op.stage}{before}")
                program[place:place] = taken

    return change


def reductions(seen, rank):
    """(operation, elements, group) of the gradient sums of a rank."""
    graph = seen.graph
    return [
        (str(graph.ops[i]), int(graph.stop[i]), graph.groups[int(graph.group[i])].ranks)
        for i in graph.rank_ops(rank)
        if graph.ops[i].target is not None and graph.ops[i].target.kind is OpKind.REDUCE_GRAD
    ]


@pytest.mark.parametrize(
    "topology", [{}, {"pp": 1}, {"tp": 2, "dp": 2, "sequence_parallel": True}, {"pp": 4, "dp": 2}, {"cp": 2, "ep": 2}]
)
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "turned"])
def test_plans_with_a_tied_embedding_are_proved(schedule, topology):
    if topology.get("pp") == 1 and schedule == "copies":
        topology = {"pp": 2}
    assert errors(tied(schedule, **topology)) == []


EMBEDDING = 40 * 16


@pytest.mark.parametrize(("schedule", "stages"), [("loop", {0: 0, 3: 3}), ("chunks", {0: 0, 3: 7}), ("v", {})])
def test_only_the_ranks_of_embedding_and_head_sum_the_weight(schedule, stages):
    """Each with the stage that uses it; on one rank there is nothing to sum."""
    seen = tied(schedule, pp=4)
    for rank in range(4):
        expected = [(f"{stages[rank]}REDUCE_GRAD:pp/0.ALL_REDUCE:pp", EMBEDDING, (0, 3))] if rank in stages else []
        assert reductions(seen, rank) == expected


def test_copies_of_both_ends_are_summed_once_with_the_embedding():
    seen = tied("copies", pp=4)
    sums = [(name, ranks) for name, numel, ranks in reductions(seen, 0) if numel == EMBEDDING]
    assert sums == [("0REDUCE_GRAD:pp/0.ALL_REDUCE:pp", (0, 3))]
    assert all(ranks == (1, 2) for *_, ranks in reductions(seen, 1))


def test_ranks_are_summed_in_the_order_of_their_numbers_for_any_their_stages():
    seen = tied("turned")
    assert reductions(seen, 0) == [("1REDUCE_GRAD:pp/0.ALL_REDUCE:pp", EMBEDDING, (0, 1))]
    assert tied_sums(seen.plan) == {"embed.weight": ((("head.weight", 0),), (("embed.weight", 0),))}


def test_the_sums_of_a_rank_that_holds_both_are_added_on_it():
    assert tied_sums(tied("v").plan) == {"embed.weight": ((("embed.weight", 0), ("head.weight", 0)),)}
    both = tied_sums(tied("copies").plan)["embed.weight"]
    assert both == ((("embed.weight", 0), ("head.weight", 0)), (("embed.weight", 1), ("head.weight", 1)))


def test_tied_sums_are_no_sums_of_micro_batches_one_by_one():
    assert accumulation_of(tied("v").plan) is Accumulation.TWO_COPIES
    assert accumulation_of(tied("loop").plan) is Accumulation.TWO_COPIES


@pytest.mark.parametrize("schedule", ["loop", "chunks", "copies"])
def test_a_missing_sum_over_the_holders_is_found(schedule):
    wrong = mutated(tied(schedule, dp=2), drop("REDUCE_GRAD:pp"))
    assert codes(wrong) == {"PP608"}
    facts = {problem.parameter: problem.fact for problem in diagnose(wrong)}
    assert facts["embed.weight"].startswith("the weight has copies on stages 0, ")


def test_a_sum_over_the_holders_after_the_one_over_dp_is_right_too():
    """Both orders add the same; the plan sums over ``pp`` first."""
    assert codes(mutated(tied(dp=2), later("REDUCE_GRAD:pp", "STEP"))) == set()


def test_two_holders_in_different_orders_count_gradients_twice():
    """One sums over dp first and puts that in: the other then sums it over dp once more."""
    assert own(mutated(tied(dp=2), later("0REDUCE_GRAD:pp", "STEP"))) == {"PP606", "PP608"}


def test_a_second_sum_over_the_holders_doubles_the_gradient():
    assert own(mutated(tied(), double("REDUCE_GRAD:pp"))) == {"PP602"}


def test_a_mean_over_the_holders_halves_the_gradient():
    assert own(mutated(tied(), changed("REDUCE_GRAD:pp/", reduction="avg"))) == {"PP606"}


def test_a_weight_that_both_stages_of_a_rank_reduce_is_counted_twice():
    """Zero Bubble V has embedding and head on one rank: if both sum the weight over dp, it comes out double."""
    seen = tied("v", dp=2)
    last = parse_op(f"{seen.plan.spec.num_stages - 1}REDUCE_GRAD:dp")

    def twice(rows):
        for program in rows:
            weight = next((row for row in program if str(row.op) == "0REDUCE_GRAD:dp/0.ALL_REDUCE:dp"), None)
            if weight is not None:
                step = next(row for row in program if str(row.op) == "0STEP")
                children = [weight, *(row for row in program if row.op.target == last)]
                rest = [row for row in program if row.op.target != last and row is not step]
                place = next(i for i, row in enumerate(rest) if row.op == last) + 1
                ops = [child_of(last, i, OpKind.ALL_REDUCE, "dp") for i in range(len(children))]
                rest[place:place] = [replace(row, op=op) for row, op in zip(children, ops, strict=True)]
                program[:] = [*rest, step]

    assert own(mutated(seen, lambda rows: None)) == set()
    (problem,) = {problem.cause.value: problem for problem in diagnose(mutated(seen, twice))}.values()
    assert (problem.cause.value, problem.parameter) == ("PP602", "embed.weight")


def test_a_head_in_a_group_of_its_own_is_found():
    """The group of all pipeline ranks, as one that is made carelessly: those between hold no copy."""
    seen = tied(pp=4)
    rows = seen.graph.rows()
    groups = tuple(replace(one, ranks=(0, 1, 2, 3)) if one.ranks == (0, 3) else one for one in seen.graph.groups)
    assert "PP601" in codes(seen.with_graph(build_graph(rows, seen.graph.tensors, groups)))


def test_the_head_has_no_weight_of_its_own():
    seen = tied(tp=2)
    head = seen.plan.layer_by_name["head"]
    assert head.parameters == ()
    (borrowed,) = head.borrowed
    assert borrowed == seen.plan.layer_by_name["embed"].parameters[0]
    assert borrowed.local_shape({"tp": 2, "ep": 1}) == (20, 16)


def test_a_borrowed_weight_owes_what_the_types_say():
    """Under context parallelism the head's share is an addend on each rank, as the embedding's is."""
    seen = tied(cp=2)
    layers = tuple(
        replace(layer, borrowed=tuple(replace(weight, partial_over=()) for weight in layer.borrowed))
        for layer in seen.plan.layers
    )
    (found,) = errors(replace(seen, lowered=replace(seen.plan, layers=layers)))
    assert found.code == "PP206"
    assert "`embed.weight`" in found.message
