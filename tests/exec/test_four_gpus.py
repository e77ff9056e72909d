"""``benchmarks/gpu/four.py``: the table of its commands, the time limit of each, and one of them over gloo."""

import shlex

import pytest

from tests.exec.processes import REPOSITORY


@pytest.fixture
def four(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks" / "gpu"))
    import four

    return four


def test_every_command_names_a_script_and_fits_into_ten_minutes(four):
    for command in four.COMMANDS:
        for arguments in (command.gpu, command.cpu):
            (script,) = (each for each in shlex.split(arguments) if each.endswith(".py"))
            assert (REPOSITORY / script).is_file(), script
    assert len({command.name for command in four.COMMANDS}) == len(four.COMMANDS)
    points = {command.name.partition("-")[0] for command in four.COMMANDS}
    assert points == {"1", "1b", "1c", "2", "3", "4", "5", "6", "7"}
    assert max(command.gpu_s for command in four.COMMANDS) <= 600


def test_a_command_that_hangs_is_stopped_and_has_a_row(four, tmp_path):
    row = four.carry_out("x", "-uc 'import time; print(1); time.sleep(100)'", 5, tmp_path, {})
    assert (row["status"], row["output"]) == ("not done within 5 s", ["1"])
    row = four.carry_out(
        "y", '-c \'import os, sys; print(os.environ["Z"], "OUT"); sys.exit(3)\'', 60, tmp_path, {"Z": "2"}
    )
    assert (row["status"], row["output"]) == (3, [f"2 {tmp_path}"])
    assert row["seconds"] < 60


@pytest.mark.slow
@pytest.mark.needs_torch
@pytest.mark.needs("transformers")
def test_a_llama_keeps_every_tensor_from_topology_to_topology(four, tmp_path):
    (command,) = (each for each in four.COMMANDS if each.name == "7")
    row = four.carry_out(command.name, command.cpu, command.cpu_s, tmp_path, {"CUDA_VISIBLE_DEVICES": ""})
    assert row["status"] == 0, row["output"]
    assert sum(" tensors equal " in line for line in row["output"]) == 6
