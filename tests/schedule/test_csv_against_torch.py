"""The CSV files of the tests, and what our reader makes of them, next to the installed PyTorch."""

import re
from pathlib import Path

import pytest

from pipeproof.schedule.formats.read_schedule import read_schedule
from pipeproof.schedule.formats.schedule_size_checks import Expected
from pipeproof.schedule.ops import TRANSFER_KINDS, OpKind
from pipeproof.specs.schedule import ScheduleFileError
from tests.schedule.make_torch_files import SCHEDULES, theirs, write_all

FILES = Path(__file__).parent / "files"
pytestmark = pytest.mark.needs_torch


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
