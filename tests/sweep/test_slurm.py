"""A sweep in job arrays gives the results of local processes, and a failure of tasks or of Slurm is reported."""

import csv
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import submitit

from pipeproof.analysis.sweep.cluster import ClusterError, TaskError, WorkerDiedError
from pipeproof.analysis.sweep.evaluate_point import Status, evaluate
from pipeproof.analysis.sweep.run_sweep import run_sweep
from pipeproof.analysis.sweep.slurm_arrays import ArrayExecutor, SlurmOptions, open_slurm
from tests.cli.commands import REPOSITORY, invoke
from tests.default_signals import default_signals
from tests.sweep.fake_slurm import install
from tests.sweep.files import dies_at_four, raises_at_four, sleeps, sweep_of, write_sweep

GRID = {"schedule.kind": ["1f1b", "gpipe"], "schedule.num_micro_batches": [3, 4, 5]}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """The folder in which the commands of Slurm keep scripts and states."""
    home = tmp_path / "slurm"
    home.mkdir()
    monkeypatch.setenv("PATH", str(install(tmp_path / "bin")), prepend=os.pathsep)
    monkeypatch.setenv("FAKE_SLURM", str(home))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setattr(ArrayExecutor.__init__, "__defaults__", (None, 0.05, 0.5))
    return home


def no_job_is_left(home):
    states = {path.read_text() for path in home.glob("*.state")}
    return not states & {"PENDING", "RUNNING"}


def test_a_sweep_is_one_array_with_a_task_per_chunk(tmp_path, slurm):
    sweep = write_sweep(tmp_path, {"grid": GRID, "include": [{"cost.forward_us": "1/3"}, {"topology.pp": 8}]})
    tables = []
    for name, options in (
        ("here", ("--workers", "2")),
        ("there", ("--executor", "slurm:partition=cpu,chunk=3,mem=1G")),
    ):
        result = invoke("sweep", sweep, "-o", tmp_path / f"{name}.jsonl", "--format", "csv", *options)
        assert result.exit_code == 0, result.stderr
        tables.append(list(csv.reader(io.StringIO(result.stdout))))
    assert tables[0] == tables[1]
    assert len(tables[0]) == 1 + 8
    (script,) = slurm.glob("*.sh")
    flags = set(re.findall(r"^#SBATCH --(\S+)$", script.read_text(), re.MULTILINE))
    assert flags >= {"array=0-2%3", "partition=cpu", "time=60", "cpus-per-task=1", "mem=1G", "no-requeue"}
    assert not (slurm / "scancel.calls").exists()
    assert not list(tmp_path.glob("pipeproof-slurm-*"))


@pytest.mark.slow
def test_a_task_that_dies_costs_its_own_point_only(tmp_path, slurm):
    sweep = sweep_of(tmp_path, grid={"schedule.num_micro_batches": [3, 4, 5]})
    with open_slurm(SlurmOptions(chunk=3), tmp_path) as cluster:
        results = run_sweep(sweep, **vars(cluster), evaluate_point=dies_at_four)
    assert [result.status for result in results] == [Status.OK, Status.FAILED, Status.OK]
    assert results[1].message == "its worker process died, twice"
    assert re.search(r"task \d+_1 ended without a result \(state FAILED\)", results[1].traceback)
    scripts = sorted(slurm.glob("*.sh"))
    assert [("array=0-2" in script.read_text()) for script in scripts] == [False, True]  # then each point alone


@pytest.mark.slow
def test_a_point_that_raises_keeps_its_traceback(tmp_path, slurm):
    sweep = sweep_of(tmp_path, grid={"schedule.num_micro_batches": [3, 4, 5]})
    with open_slurm(SlurmOptions(), tmp_path) as cluster:
        results = run_sweep(sweep, **vars(cluster), evaluate_point=raises_at_four)
    assert [result.status for result in results] == [Status.OK, Status.FAILED, Status.OK]
    assert results[1].message == "RuntimeError: four, twice"
    assert re.search(r'(?s)Traceback.*files.py", line \d+, in raises_at_four', results[1].traceback)


def test_a_refused_submission_has_the_words_of_slurm(tmp_path, slurm):
    (slurm / "refuse").write_text("sbatch: error: invalid partition specified: none\n")
    result = invoke("sweep", write_sweep(tmp_path, {"grid": GRID}), "--executor", "slurm:partition=none")
    assert result.exit_code == 2
    text = " ".join(result.stderr.split())
    assert "--executor" in text
    assert "the job array was not accepted: sbatch: error: invalid partition specified: none" in text


def test_workers_of_another_version_are_refused(tmp_path, slurm, monkeypatch):
    monkeypatch.setattr("pipeproof.analysis.sweep.cluster.__version__", "99.9")
    with (
        pytest.raises(ClusterError, match=r"not of this version, 99\.9: one has pipeproof \d"),
        open_slurm(SlurmOptions(), tmp_path) as cluster,
    ):
        run_sweep(sweep_of(tmp_path, grid=GRID), **vars(cluster))
    assert list(tmp_path.glob("pipeproof-slurm-*"))  # with the logs


def test_an_interrupt_cancels_the_jobs(tmp_path, slurm):
    def interrupt(result):
        raise KeyboardInterrupt

    sweep = sweep_of(tmp_path, grid={"schedule.num_micro_batches": [3, 4, 5, 6]})
    with pytest.raises(KeyboardInterrupt), open_slurm(SlurmOptions(chunk=1), tmp_path) as cluster:
        run_sweep(sweep, **vars(cluster), evaluate_point=sleeps, on_result=interrupt)
    (call,) = (slurm / "scancel.calls").read_text().splitlines()
    assert re.fullmatch(r"--user=\S+ --name=pipeproof-slurm-\S+", call)
    assert no_job_is_left(slurm)


@pytest.mark.slow
def test_ctrl_c_of_the_command_cancels_the_jobs_and_keeps_results(tmp_path, slurm):
    sweep = write_sweep(tmp_path, {"grid": {"schedule.num_micro_batches": list(range(3, 33))}})
    command = [sys.executable, "-m", "pipeproof", "sweep", str(sweep), "--executor", "slurm:chunk=1"]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=default_signals)
    results = sweep.with_suffix(".results.jsonl")
    while not (results.exists() and len(results.read_bytes().splitlines()) > 1):
        assert started.poll() is None, started.stderr.read()
        time.sleep(0.1)
    started.send_signal(signal.SIGINT)
    assert "results so far are in" in started.communicate(timeout=60)[1]
    assert started.returncode == 130
    assert no_job_is_left(slurm)


def test_a_machine_without_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match="no sbatch here"), open_slurm(SlurmOptions(), tmp_path):
        pass


def test_a_slurm_without_accounting(tmp_path, slurm):
    sacct = tmp_path / "bin" / "sacct"
    sacct.write_text("#!/bin/sh\necho Slurm accounting storage is disabled >&2; exit 1\n")
    with pytest.raises(ClusterError, match="is needed: Slurm accounting storage is disabled"):
        open_slurm(SlurmOptions(), tmp_path).__enter__()


# --- submitit's executor of this machine ---


@pytest.fixture
def local(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # under nohup jobs would inherit that it is ignored
    with ArrayExecutor(submitit.LocalExecutor(tmp_path / "jobs"), look_s=0.05, grace_s=0.5) as executor:
        yield executor
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_results_of_processes_are_those_of_evaluating_here(tmp_path, local):
    sweep = sweep_of(tmp_path, grid=GRID)
    assert run_sweep(sweep, local, chunk_size=4) == tuple(evaluate(point, sweep.plan_file) for point in sweep.points)


def raises():
    raise ValueError("seven")


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_calls_end_in_results_tracebacks_and_deaths(local):
    results = list(local.map(pow, [2, 2, 2], [3, 4, 5]))
    raised, died = local.submit(raises), local.submit(dies)
    assert results == [8, 16, 32]
    assert isinstance(raised.exception(60), TaskError)
    assert re.search(r'(?s)Traceback.*test_slurm.py", line \d+, in raises.*ValueError: seven', str(raised.exception()))
    assert isinstance(died.exception(60), WorkerDiedError)


def test_a_cancelled_call_ends_its_process(tmp_path, local):
    mark = tmp_path / "pid"
    future = local.submit(writes_pid_and_sleeps, mark)
    while not mark.exists():
        time.sleep(0.1)
    local.shutdown(cancel_futures=True)
    assert future.cancelled()
    deadline = time.monotonic() + 30
    while Path("/proc", mark.read_text()).exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def writes_pid_and_sleeps(mark):
    new = mark.with_suffix(".new")
    new.write_text(str(os.getpid()))
    new.replace(mark)
    time.sleep(600)
