"""Our generators next to PyTorch's own, operation by operation, over grids of sizes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeproof.schedule.formats.read_schedule import read_schedule
from pipeproof.schedule.formats.schedule_size_checks import Expected
from pipeproof.schedule.generators.interleaved import interleaved
from pipeproof.schedule.generators.looped_bfs import looped_bfs
from pipeproof.schedule.ops import TRANSFER_KINDS, OpKind
from pipeproof.schedule.programs import UnfitSizesError
from pipeproof.specs.schedule import ScheduleFileError
from tests.schedule.make_torch_files import SCHEDULES, theirs, write_all

FILES = Path(__file__).parent / "files"


def test_the_files_are_what_pytorch_writes(tmp_path):
    write_all(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in FILES.iterdir()}
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (FILES / path.name).read_bytes(), path.name


@pytest.mark.parametrize("name", SCHEDULES)
def test_actions_are_read_as_pytorch_reads_them(name):
    from torch.distributed.pipelining.schedules import _Action

    for ending in ("", "_comms"):
        path = FILES / f"{name}{ending}.csv"
        ours = read_schedule(path.read_text(), path.name, Expected())
        for rank, line in enumerate(path.read_text().splitlines()):
            actions = [action for cell in line.split(",") if (action := _Action.from_str(cell)) is not None]
            leaves = [str(leaf) for action in actions for leaf in (action.sub_actions or (action,))]
            assert leaves == [str(row.op) for row in ours.rows[rank] if row.op.kind is not OpKind.WAIT]


@pytest.mark.parametrize("name", SCHEDULES)
def test_peers_are_those_of_pytorchs_placement(name):
    rank_of = theirs(*SCHEDULES[name]).stage_index_to_group_rank
    for rank, rows in enumerate(read_schedule((FILES / f"{name}_comms.csv").read_text(), name, Expected()).rows):
        for row in rows:
            assert row.op.kind is OpKind.WAIT or rank_of[row.op.stage] == rank
            if row.op.kind in TRANSFER_KINDS:
                onward = str(row.op.kind) in ("SEND_F", "RECV_B")
                assert row.peer == rank_of[row.op.stage + (1 if onward else -1)]


@pytest.mark.parametrize("cell", ["0F0xyz", "00F0", "0F00", "0F0;0B0", "0UNSHARD3", "0F", "0SEND_F0F1"])
def test_cells_that_pytorch_misreads_are_refused(cell):
    from torch.distributed.pipelining.schedules import _Action

    assert str(_Action.from_str(cell)) != cell or re.fullmatch(r"0F|0UNSHARD3", cell)
    with pytest.raises(ScheduleFileError) as caught:
        read_schedule(f"0F0,{cell}", "s", Expected())
    assert caught.value.findings[0].code == "PP132"


pytestmark = pytest.mark.needs_torch


def actions(schedule, num_ranks):
    """The actions of each rank in text, without PyTorch's idle slots."""
    ranks = map(schedule._calculate_single_rank_operations, range(num_ranks))
    return [[str(action) for action in ops if action is not None] for ops in ranks]


def unmade(class_name, p, v, m):
    """A schedule of PyTorch with the inputs of its generation; its constructor also adds and checks transfers."""
    from torch.distributed.pipelining import schedules

    made = object.__new__(getattr(schedules, class_name))
    made.pp_group_size, made.n_local_stages, made._n_microbatches, made._stages = p, v, m, [None] * v
    made.number_of_rounds = max(1, m // p)
    made.microbatches_per_round = m // made.number_of_rounds
    return made


def texts(schedule):
    return [[str(op) for op in program] for program in schedule.programs]


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_interleaved_is_pytorchs_wherever_that_exists(p, v):
    for m in range(1, 4 * p + 2):
        if m % max(1, m // p) == 0:
            assert texts(interleaved(p, m, v)) == actions(unmade("ScheduleInterleaved1F1B", p, v, m), p), m
        else:
            with pytest.raises(UnfitSizesError):
                interleaved(p, m, v)


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 3), (4, 2, 10), (3, 3, 7), (4, 2, 9), (4, 2, 13), (2, 2, 2)])
def test_its_constructor_takes_and_refuses_the_same_sizes(p, v, m):
    try:
        ours = texts(interleaved(p, m, v))
    except UnfitSizesError:
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            theirs("ScheduleInterleaved1F1B", p, v, m)
    else:
        assert ours == actions(theirs("ScheduleInterleaved1F1B", p, v, m), p)


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_looped_breadth_first_is_pytorchs(p, v):
    for m in range(1, 2 * p + 3):
        assert texts(looped_bfs(p, m, v)) == actions(unmade("ScheduleLoopedBFS", p, v, m), p), m
