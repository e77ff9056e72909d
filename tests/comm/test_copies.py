"""Stages on two ranks: each micro-batch takes one copy of every stage, and the copies sum their gradients."""

from dataclasses import replace

import pytest

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import OpKind, parse_op
from pipeproof.verify.check_plan import check_subject
from tests.plans import subject

pytestmark = pytest.mark.usefixtures("known_notes")

TWO_WAYS = [["0F0", "1F1", "1B1", "0B0"], ["1F0", "0F1", "1B0", "0B1"]]
"""Micro-batch 0 enters at rank 0, micro-batch 1 at rank 1; both stages are on both ranks."""


def two_ways(programs=TWO_WAYS, placement=((0, 1), (1, 0)), **sections):
    schedule = {"kind": "custom", "programs": programs, "num_micro_batches": 2,
                "placement": [list(stages) for stages in placement]}  # fmt: skip
    return subject(schedule=schedule, **sections)


def bidirectional(**sections):
    kind = sections.pop("kind", "chimera")
    return subject(topology={"pp": 4, **sections}, schedule={"kind": kind, "num_micro_batches": 8})


def codes(seen):
    return {f.code for f in check_subject(seen).findings} - {"PP411"}


def edited(seen, change):
    graph = seen.graph
    rows = graph.rows()
    for program in rows:
        program[:] = [row for old in program if (row := change(old)) is not None]
    return seen.with_graph(build_graph(rows, graph.tensors, graph.groups))


@pytest.mark.parametrize("kind", ["chimera", "dualpipe"])
@pytest.mark.parametrize("mesh", [{}, {"tp": 2}, {"dp": 2}, {"tp": 2, "dp": 2, "sequence_parallel": True}])
def test_two_directions_are_proved_on_every_mesh(kind, mesh):
    assert codes(bidirectional(kind=kind, **mesh)) == set()


def test_a_micro_batch_meets_the_copies_of_its_direction():
    seen = two_ways()
    graph = seen.graph
    peers = {(int(graph.rank[i]), str(op)): int(graph.peer[i]) for i, op in enumerate(graph.ops) if "SEND" in op.kind}
    assert peers == {(0, "0SEND_F0"): 1, (1, "0SEND_F1"): 0, (1, "1SEND_B0"): 0, (0, "1SEND_B1"): 1}
    assert codes(seen) == set()


def test_copies_sum_their_gradients_before_data_parallel_ranks_do():
    graph = bidirectional(dp=2).graph
    reductions = [str(op) for i, op in enumerate(graph.ops) if op.kind is OpKind.REDUCE_GRAD and graph.rank[i] == 0]
    assert reductions == ["0REDUCE_GRAD:pp", "0REDUCE_GRAD:dp", "3REDUCE_GRAD:pp", "3REDUCE_GRAD:dp"]


def test_copies_that_do_not_sum_drift_apart():
    seen = bidirectional()
    alone = edited(seen, lambda row: None if "REDUCE_GRAD:pp" in str(row.op) else row)
    assert codes(alone) == {"PP608"}


def test_a_mean_over_copies_halves_the_gradient():
    seen = bidirectional()
    mean = edited(seen, lambda row: replace(row, reduction="avg") if "GRAD:pp/" in str(row.op) else row)
    assert codes(mean) == {"PP606"}


def test_work_of_the_other_direction_is_foreign_and_its_own_is_missed():
    seen = bidirectional()
    assert int(seen.plan.owner[0, 0]) == 0
    graph = seen.graph
    rows = graph.rows()
    forward = next(row for row in rows[0] if row.op == parse_op("0F0"))
    rows[0].remove(forward)
    rows[3].insert(0, forward)
    assert {"PP121", "PP124"} <= codes(seen.with_graph(build_graph(rows, graph.tensors, graph.groups)))


def test_a_stage_on_two_ranks_must_be_declared():
    with pytest.raises(PlanFileError) as caught:
        subject(schedule={"kind": "custom", "programs": TWO_WAYS, "num_micro_batches": 2})
    assert {f.code for f in caught.value.findings} == {"PP134"}


def test_a_copy_that_computes_nothing_is_an_error():
    with pytest.raises(PlanFileError) as caught:
        two_ways(programs=[["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
    (finding,) = caught.value.findings
    assert "schedule.placement puts stage 0 on rank 1, which does not compute it" in finding.message
