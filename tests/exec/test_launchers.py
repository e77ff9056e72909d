"""Environments of launchers, as each sets them: the values read from them, and refusals."""

import json
import os

import pytest
from click.testing import CliRunner

from pipeproof.cli.main import main
from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.rehearse.external_launcher import join_launcher
from pipeproof.exec.store.launcher_table import (
    LAUNCHERS,
    OF_BACKEND,
    OPEN_MPI,
    PADDLE,
    SLURM,
    TORCHRUN,
    launched_rank,
)
from pipeproof.specs.plan_sections import RunSpec
from tests.plans import plan_dict

MASTER = {"MASTER_ADDR": "host-a", "MASTER_PORT": "29400"}
TORCH = {
    **MASTER, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "job-7", "TORCHELASTIC_RESTART_COUNT": "2",
}  # fmt: skip
PADDLES = {
    "PADDLE_TRAINER_ID": "5", "PADDLE_TRAINERS_NUM": "8", "PADDLE_LOCAL_RANK": "1", "PADDLE_RANK_IN_NODE": "1",
    "PADDLE_LOCAL_SIZE": "4", "PADDLE_MASTER": "host-a:29400", "PADDLE_TRAINER_ENDPOINTS": "host-a:6170,host-b:6171",
    "PADDLE_JOB_ID": "job-7",
}  # fmt: skip
MPI = {
    **MASTER, "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_NAMESPACE": "job-7",
    "OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:5000",
}  # fmt: skip
TASK = {
    **MASTER,
    "SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "3", "SLURM_RESTART_COUNT": "2",
}  # fmt: skip
OF = {TORCHRUN.name: TORCH, PADDLE.name: PADDLES, OPEN_MPI.name: MPI, SLURM.name: TASK}


def read(environment, backend="torch"):
    launched = launched_rank(environment, backend)
    return None if launched is None else vars(launched)


def refused(environment, backend="torch"):
    with pytest.raises(PipeproofError) as caught:
        launched_rank(environment, backend)
    (finding,) = caught.value.findings
    assert finding.code == "PP907"
    return finding


EXPECTED = {
    TORCHRUN.name: {"run_id": "job-7", "attempt": 2},
    PADDLE.name: {"run_id": "job-7", "attempt": 0},
    OPEN_MPI.name: {"run_id": "job-7", "attempt": 0},
    SLURM.name: {"run_id": "123456.3", "attempt": 2},
}  # fmt: skip


@pytest.mark.parametrize("row", LAUNCHERS, ids=lambda row: row.name)
def test_each_launcher_names_the_same_identity(row):
    usual = {"rank": 5, "world_size": 8, "local_rank": 1, "local_world_size": 4, "master": ("host-a", 29_400)}
    assert read(OF[row.name]) == {"launcher": row, **usual, **EXPECTED[row.name]}


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        (TORCHRUN.name, "LOCAL_RANK"), (TORCHRUN.name, "MASTER_ADDR"), (TORCHRUN.name, "MASTER_PORT"),
        (PADDLE.name, "PADDLE_TRAINERS_NUM"), (OPEN_MPI.name, "OMPI_COMM_WORLD_SIZE"),
        (OPEN_MPI.name, "OMPI_COMM_WORLD_LOCAL_RANK"), (OPEN_MPI.name, "MASTER_ADDR"), (OPEN_MPI.name, "MASTER_PORT"),
        (SLURM.name, "SLURM_LOCALID"), (SLURM.name, "MASTER_ADDR"), (SLURM.name, "MASTER_PORT"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("empty", [False, True])
def test_a_variable_that_is_missing_is_named_with_the_remedy(launcher, name, empty):
    environment = OF[launcher] | {name: ""}
    if not empty:
        del environment[name]
    finding = refused(environment)
    assert f"{name}" in finding.message
    assert "is missing" in finding.message
    assert "start it with `" in finding.help
    assert "env -u " in finding.help


@pytest.mark.parametrize(
    ("launcher", "changes", "texts"),
    [
        (TORCHRUN.name, {"RANK": "8"}, ["RANK=8 and WORLD_SIZE=8", "8 is not below 8"]),
        (TORCHRUN.name, {"RANK": "-1"}, ["RANK=-1: '-1' is not a number"]),
        (TORCHRUN.name, {"WORLD_SIZE": "two"}, ["WORLD_SIZE=two"]),
        (TORCHRUN.name, {"LOCAL_RANK": "4"}, ["LOCAL_RANK=4 and LOCAL_WORLD_SIZE=4", "4 is not below 4"]),
        (TORCHRUN.name, {"LOCAL_WORLD_SIZE": "9"}, ["LOCAL_WORLD_SIZE=9 and WORLD_SIZE=8", "9 is not at most 8"]),
        (TORCHRUN.name, {"MASTER_PORT": "65536"}, ["MASTER_PORT=65536: there is no port 65536"]),
        (PADDLE.name, {"PADDLE_TRAINER_ID": "9"}, ["PADDLE_TRAINER_ID=9 and PADDLE_TRAINERS_NUM=8"]),
        (PADDLE.name, {"PADDLE_MASTER": "host-a"}, ["PADDLE_MASTER=host-a: 'host-a' is not host:port"]),
        (OPEN_MPI.name, {"OMPI_COMM_WORLD_RANK": "8"}, ["OMPI_COMM_WORLD_RANK=8 and OMPI_COMM_WORLD_SIZE=8"]),
        (SLURM.name, {"SLURM_PROCID": "8"}, ["SLURM_PROCID=8 and SLURM_STEP_NUM_TASKS=8"]),
        (SLURM.name, {"SLURM_NODEID": "2"}, ["SLURM_STEP_TASKS_PER_NODE=4(x2) and SLURM_NODEID=2", "has no node 2"]),
    ],
)
def test_variables_that_contradict_each_other_are_named(launcher, changes, texts):
    message = refused(OF[launcher] | changes).message
    assert all(text in message for text in texts), message


def test_the_innermost_launcher_describes_the_process():
    everything = TASK | MPI | PADDLES | TORCH
    assert read(everything, "torch")["launcher"] is TORCHRUN
    assert read(everything, "paddle")["launcher"] is PADDLE
    assert read(TASK | PADDLES, "torch")["launcher"] is PADDLE
    assert read(TASK | MPI)["launcher"] is OPEN_MPI
    outer = {**TASK, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}
    assert read(outer | TORCH)["rank"] == 5


@pytest.mark.parametrize(
    "environment",
    [
        {},
        MASTER,
        {"RANK": "1"},
        {"WORLD_SIZE": "8", **MASTER},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"},
        {**TASK, "SLURM_PROCID": "0", "SLURM_STEP_ID": str(0xFFFF_FFFA)},
        {**TASK, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_JOB_ID": "1"},
    ],
    ids=[
        "nothing", "an address", "a rank alone", "a size alone", "salloc", "the shell of salloc",
        "srun --pty", "sbatch of one task", "sbatch without --ntasks",
    ],
)  # fmt: skip
def test_without_a_launcher_the_process_is_no_rank(environment):
    assert read(environment) is None


def test_a_batch_script_outside_of_srun_is_refused():
    finding = refused({"SLURM_PROCID": "0", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"})
    assert "SLURM_PROCID is 0 and SLURM_NTASKS is 8, but SLURM_STEP_ID is missing" in finding.message
    assert "`srun " in finding.help
    assert "env -u SLURM_PROCID pipeproof" in finding.help


def test_paddles_addresses_are_taken_in_the_order_of_init_parallel_env():
    assert read(PADDLES | MASTER | {"MASTER_PORT": "1"}, "paddle")["master"] == ("host-a", 1)
    assert read(PADDLES | {"PADDLE_MASTER": ""}, "paddle")["master"] == ("host-a", 6170)


@pytest.mark.parametrize("backend", ["torch", "paddle"])
@pytest.mark.parametrize("row", [OPEN_MPI, SLURM], ids=lambda row: row.name)
def test_the_framework_learns_its_rank_from_its_own_variables(row, backend, monkeypatch):
    monkeypatch.setattr("os.environ", dict(OF[row.name]))
    launched = join_launcher(RunSpec(backend=backend))
    assert launched.launcher is row
    again = launched_rank(os.environ, backend)
    assert again.launcher is OF_BACKEND[backend]
    for field in ("rank", "world_size", "local_rank", "local_world_size", "master"):
        assert getattr(again, field) == getattr(launched, field)
    assert join_launcher(RunSpec(backend=backend)) == again


@pytest.mark.parametrize("row", LAUNCHERS, ids=lambda row: row.name)
@pytest.mark.parametrize("fault", ["another number", "a contradiction"])
def test_a_rehearsal_is_refused_with_status_2(row, fault, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("COLUMNS", "400")
    environment = dict(OF[row.name])
    text = "the launcher started 8 processes, but the plan's topology has 2 ranks"
    if fault == "a contradiction":
        environment[row.rank[0].names[0]] = "8"
        text = "8 is not below 8"
    monkeypatch.setattr("os.environ", environment | {"COLUMNS": "400", "PATH": "/usr/bin"})
    plan = plan_dict(
        model={"num_layers": 8},
        topology={"pp": 2 if fault == "another number" else 8},
        run={"backend": row.backend or "torch"},
    )
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    result = CliRunner().invoke(main, ["rehearse", str(tmp_path / "plan.json")])
    assert result.exit_code == 2, result.output
    assert "error[PP907]" in result.output
    assert text in result.output
    assert row.command.format(ranks="")[:4] in result.output


@pytest.mark.parametrize("row", LAUNCHERS, ids=lambda row: row.name)
def test_a_run_is_refused_under_each_launcher(row, tmp_path, monkeypatch):
    monkeypatch.setattr("os.environ", {**OF[row.name], "COLUMNS": "400", "PATH": "/usr/bin"})
    plan = plan_dict(model={"num_layers": 8}, topology={"pp": 8}, run={"backend": row.backend or "torch"})
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    result = CliRunner().invoke(main, ["run", str(tmp_path / "plan.json")])
    assert result.exit_code == 2, result.output
    assert f"error[PP907]: `run` starts all ranks itself, on one host, and {row.name} started" in result.output
    assert "pipeproof rehearse" in result.output
