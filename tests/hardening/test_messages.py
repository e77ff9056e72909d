"""Messages where the machine is the problem, and outputs that another program must not execute."""

import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from pipeproof.api.result import _csv
from pipeproof.cli.main import main
from pipeproof.exec.launch import supervisor
from pipeproof.views.csv_cells import no_formula


@pytest.mark.parametrize("cell", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1"])
def test_no_cell_of_a_table_is_a_formula(cell):
    assert no_formula(cell) == f"'{cell}"


@pytest.mark.parametrize("cell", ["-5", "+1.5", "-1e-3", "1f1b", "", 3, None])
def test_numbers_and_names_stay(cell):
    assert no_formula(cell) == cell


def test_no_cell_of_a_result_is_a_formula():
    assert _csv([{"settings": "=1+1", "change": -2}]) == "settings,change\n'=1+1,-2\n"


def test_names_of_files_do_not_control_the_terminal(tmp_path):
    for arguments in (("state", "align", tmp_path / "a\x1b[31mb", tmp_path / "c"), ("check", tmp_path / "a\x1b[31mb")):
        result = CliRunner().invoke(main, [str(argument) for argument in arguments], color=True)
        assert result.exit_code == 2
        assert "\x1b[31mb" not in result.stderr


def test_a_process_that_ended_on_a_full_disk(tmp_path, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    process.wait()
    launcher = supervisor.Launcher(SimpleNamespace(directory=tmp_path / "job"), None, 1.0)
    worker = supervisor._Worker("reference", None, process, 0, tmp_path / "reference.out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 100))
    finding = launcher._death(worker)
    assert f"ended with status 1: the disk of {tmp_path} is full" in finding.message
    assert "TMPDIR" in finding.help
