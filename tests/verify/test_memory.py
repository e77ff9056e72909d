"""Number of micro-batches whose activations each rank holds, and bytes of their boundary tensors."""

import dataclasses

import pytest

from pipeproof.schedule.op_table import Row, build_graph
from pipeproof.schedule.ops import parse_op
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.memory_budget import in_flight
from pipeproof.verify.subject import make_subject
from tests.plans import plan_dict, subject
from tests.verify.programs import mutated, rows

BOUNDARY_ELEMENTS = 8 * 2 * 16
"""Sequence, micro-batch size and hidden size of the small plan."""


def peaks(one):
    return [figure.peak_activations for figure in in_flight(one)]


def programs(*texts):
    """The small plan, whose ranks run these compute operations alone."""

    def change(of_ranks):
        of_ranks[:] = [rows(text) for text in texts]

    return mutated(subject(), change)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 6])
def test_gpipe_holds_all_and_1f1b_as_many_as_there_are_stages_to_come(pp, num_micro_batches):
    def plan(kind):
        return subject(topology={"pp": pp}, schedule={"kind": kind, "num_micro_batches": num_micro_batches})

    assert peaks(plan("gpipe")) == [num_micro_batches] * pp
    assert peaks(plan("1f1b")) == [min(pp - rank, num_micro_batches) for rank in range(pp)]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", [1, 2]),
        ("0F0 0I0 0F1 0I1 0W0 0W1", "1F0 1I0 1W0 1F1 1I1 1W1", [2, 1]),  # W frees a tensor that I still needs
        ("0F0 0F1", "1F0 1F1", [2, 2]),  # an evaluation as this plan's ranks would run it: nothing is given back
        ("0F0 0F1 0F2", "1F0", [3, 1]),  # the next rank does not hold the tensors of the first
        ("0F0 0B0 0B1", "1F0 1F1 1B0", [1, 2]),  # nor do surplus releases of the first count for it
        ("", "1F0", [0, 1]),
        ("0B0", "1F0", [0, 1]),
    ],
)
def test_the_peak_is_of_each_rank_s_own_program(first, second, expected):
    assert peaks(programs(first, second)) == expected


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float16", 2), ("bfloat16", 2), ("float32", 4), ("float64", 8), ("int32", 4), ("int64", 8), ("bool", 1)],
)
def test_each_held_micro_batch_weighs_what_its_boundary_tensor_does(dtype, size):
    base = subject(schedule={"kind": "gpipe", "num_micro_batches": 3})
    boundary = dataclasses.replace(base.plan.boundary, dtype=dtype, has_gradient="float" in dtype)
    plan = plan_from_dict(plan_dict(schedule={"kind": "gpipe", "num_micro_batches": 3}))
    figures = in_flight(make_subject(plan, boundary=boundary))
    assert [(figure.rank, figure.boundary_bytes) for figure in figures] == [
        (rank, 3 * BOUNDARY_ELEMENTS * size) for rank in range(2)
    ]


def test_each_stage_weighs_what_its_own_boundary_brings():
    """One boundary has half the width, cut over tp by its sender, the other two tensors. The last micro-batch is half
    as large."""
    hidden = {"name": "hidden", "dims": "sbh"}
    one = subject(
        model={"num_layers": 3},
        topology={"pp": 3, "tp": 2},
        schedule={"kind": "gpipe", "num_micro_batches": 2, "last_micro_batch_size": 1},
        boundaries=[
            {**hidden, "edge": 0, "dtype": "float16", "tp": "sharded(s)", "receiver_tp": "invariant"},
            {**hidden, "edge": 1},
            {**hidden, "edge": 1, "name": "more"},
        ],
    )
    assert [figure.boundary_bytes for figure in in_flight(one)] == [2048, 2048, 1024, 1024, 4096, 4096]
    rows = one.graph.rows()
    rows[5].insert(2, Row(parse_op("9F0")))  # of a stage that the plan has not: as one of the last stage
    foreign = in_flight(one.with_graph(build_graph(rows, one.graph.tensors, one.graph.groups)))
    assert [figure.boundary_bytes for figure in foreign] == [2048, 2048, 1024, 1024, 4096, 4096 + 2048]
