"""GradientHistories of gradients and the grid of ranks, as columns: ordinary programs, and each way to leave them."""

import numpy as np
import pytest

from pipeproof.comm.plan_context import Mesh
from pipeproof.schedule.op_table import NONE, Group, build_graph
from pipeproof.schedule.ops import OpKind
from pipeproof.verify.gradients import gradient_history as module
from pipeproof.verify.gradients.gradient_history import (
    guessed_grid,
    mesh_grid,
    micro_batch_places,
    named_parameters,
    read_histories,
    writers_elsewhere,
)
from pipeproof.verify.subject import program_subject

ADDERS = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT})


def graph_of(text):
    return program_subject(text).graph


def read(text, num_micro_batches=2):
    graph = graph_of(text)
    grid = mesh_grid(graph, Mesh(("dp",), (graph.num_ranks,)))
    return read_histories(graph, grid, ADDERS, np.arange(num_micro_batches))


@pytest.mark.parametrize(
    ("program", "is_plain"),
    [
        ("0B0 0B1 0STEP", True),
        ("0W1 0W0 0REDUCE_GRAD:dp 0STEP", True),
        ("0B0 0STEP", False),  # one is missing
        ("0B0 0B0 0STEP", False),  # and another one is there twice
        ("0B0 0B1 0B1 0STEP", False),
        ("0B0 0B1 0B7 0STEP", False),  # one of no micro-batch of the step
        ("0B0 0STEP 0B1", False),
        ("0B0 0B1 0STEP 0B1", False),
    ],
)
def test_plain_histories_add_each_micro_batch_once_before_all_else(program, is_plain, monkeypatch):
    text = f"rank 0: {program}"
    assert read(text).plain.tolist() == [is_plain]
    monkeypatch.setattr(module, "_MOST_CELLS", 2)
    assert read(text).plain.tolist() == [is_plain]
    monkeypatch.setattr(module, "_MOST_CELLS", 1)  # a table of histories by micro-batches would be too large
    assert read(text).plain.tolist() == [False]


def test_a_history_is_of_a_rank_and_a_stage():
    found = read("rank 0: 1B0 0B0 0B1 1STEP 1B1\nrank 1: 0B0 0STEP 0B7 0B1")
    assert len(found) == 3
    assert list(zip(found.rank.tolist(), found.stage.tolist(), strict=True)) == [(0, 0), (0, 1), (1, 0)]
    ops = [str(op) for op in found.graph.ops]
    assert [[ops[i] for i in found.adds[found.adds_of(k)]] for k in range(3)] == [
        ["0B0", "0B1"], ["1B0", "1B1"], ["0B0", "0B7", "0B1"],
    ]  # fmt: skip
    assert [[ops[i] for i in found.entries[found.entries_of(k)]] for k in range(3)] == [[], ["1STEP"], ["0STEP"]]
    assert found.segment.tolist() == [0, 0, 0, 1, 0, 1, 1]
    assert found.place.tolist() == [0, 1, 0, 1, 0, NONE, 1]
    assert found.plain.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("program", "is_elsewhere"),
    [
        ("0F0{queue=side} 0B0 0STEP", False),  # a forward is in no history
        ("0B0{queue=side} 0STEP", True),
        ("0B0 0STEP{queue=side}", True),
        ("0B0{batch=0} 0B1{batch=0} 0STEP", True),
    ],
)
def test_additions_and_entries_on_other_queues_or_in_batches(program, is_elsewhere):
    assert read(f"rank 0: {program}").elsewhere is is_elsewhere


def test_places_of_micro_batches():
    assert micro_batch_places(np.array([0, 2, 4]), np.array([4, 1, 0, 9, 2])).tolist() == [2, NONE, 0, NONE, 1]
    assert micro_batch_places(np.empty(0, dtype=np.int64), np.array([4, 1])).tolist() == [NONE, NONE]


def test_collectives_that_write_gradients_below_no_reduction():
    graph = graph_of(
        "rank 0: 0F0{writes=grad[a]} 0ALL_REDUCE:tp{group=0 writes=grad[a]+other} 0BROADCAST:tp{group=0 reads=grad[a]} "
        "0REDUCE_GRAD:tp 0REDUCE_GRAD:tp/0.ALL_REDUCE:tp{group=0 writes=grad[b]+grad[a]}\ngroup tp: 0"
    )
    assert writers_elsewhere(graph).tolist() == [1]
    assert named_parameters(graph) == {0: {"a"}, 1: {"a"}, 2: {"a"}, 4: {"a", "b"}}
    assert named_parameters(graph_of("rank 0: 0F0{writes=x}")) == {}


def test_coordinates_on_an_axis_of_one_rank():
    grid = mesh_grid(graph_of("rank 0: 0F0\nrank 1: 0F0"), Mesh(("tp", "dp"), (1, 2)))
    assert [grid.place(rank, "dp") for rank in range(2)] == [0, 1]
    assert [grid.place(rank, "tp") for rank in range(2)] == [0, 0]
    ranks = np.array([1, 0, 1])
    assert grid.same(ranks, "dp", 1).tolist() == [True, False, True]
    assert grid.same(ranks, "tp", 0).tolist() == [True] * 3
    assert [grid.line(0, axis) for axis in ("tp", "dp")] == [[0], [0, 1]]


def test_a_grid_is_guessed_from_groups_and_stages():
    """Ranks 0 and 1 hold stage 0, 2 and 3 stage 1; one of the dp groups lacks a rank, and tp ranks are folded."""
    rows = [[] for _ in range(4)]
    groups = [
        Group("pp", (1, 0)), Group("dp", (0,)), Group("dp", (2, 3)), Group("tp", (3,), 2), Group("cp", (0,)),
    ]  # fmt: skip
    grid = guessed_grid(build_graph(rows, (), groups), {0: (0, 1), 1: (2, 3)}, frozenset({"ep", "tp"}))
    assert grid.axes == ("pp", "dp", "tp", "ep")
    assert grid.coords.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert [str(grid.size(axis)) for axis in ("pp", "dp", "tp", "cp", "ep")] == ["2", "2", "2", "1", "ep"]
    assert grid.folded == {"tp", "ep"}


@pytest.mark.parametrize(
    ("group", "axis"),
    [
        (Group("dp", (0, 2)), "dp"),
        (Group("dp", (2, 0)), "dp"),
        (Group("tp", (2, 3)), "tp"),
        (Group("dp", (0, 1)), "tp"),  # by what it holds, not by its name
        (Group("dp", (0, 3)), None),
        (Group("dp", (0, 1, 2, 3)), None),
        (Group("dp", (0,)), None),
        (Group("cp", (0,)), "cp"),
        (Group("cp", (0,), 2), None),
        (Group("dp", (0, 2), 2), None),
    ],
)
def test_the_axis_whose_line_a_group_is(group, axis):
    rows = "\n".join(f"rank {rank}: 0F0" for rank in range(4))
    assert mesh_grid(graph_of(rows), Mesh(("tp", "dp"), (2, 2))).along(group) == axis
