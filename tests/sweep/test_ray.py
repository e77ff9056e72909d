"""A sweep on a Ray cluster of this machine gives the results of local processes, and failures are reported."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import ray

from pipeproof.analysis.sweep.cluster import ClusterError, TaskError, WorkerDiedError
from pipeproof.analysis.sweep.evaluate_point import Status, evaluate
from pipeproof.analysis.sweep.ray_cluster import open_ray
from pipeproof.analysis.sweep.run_sweep import run_sweep
from tests.cli.commands import REPOSITORY, invoke
from tests.sweep.files import dies_at_four, raises_at_four, sweep_of, tune_command, write_sweep

GRID = {"schedule.kind": ["1f1b", "gpipe"], "schedule.num_micro_batches": [3, 4, 5]}


@pytest.fixture(scope="module")
def connected(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(REPOSITORY))  # its processes inherit it
        patch.setenv("RAY_AUTH_MODE", "token")  # Ray sets it for a new cluster: only so is that undone
        patch.delenv("RAY_AUTH_MODE")
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # where Ray writes the token
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()


@pytest.fixture
def cluster(connected):
    with open_ray() as opened:
        yield opened


def test_the_command_prints_the_table_of_processes(tmp_path, connected):
    sweep = write_sweep(tmp_path, {"grid": GRID, "include": [{"cost.forward_us": "1/3"}, {"topology.pp": 8}]})
    tables = []
    for name, options in (("here", ("--workers", "2")), ("there", ("--executor", "ray"))):
        result = invoke("sweep", sweep, "-o", tmp_path / f"{name}.jsonl", "--format", "csv", *options)
        assert result.exit_code == 0, result.stderr
        tables.append(result.stdout)
    assert tables[0] == tables[1]
    assert len(tables[0].splitlines()) == 1 + 8


def test_tune_finds_the_same_layouts(tmp_path, connected):
    words = tune_command(tmp_path)
    there = invoke(*words, "--executor", "ray")
    assert there.exit_code == 0, there.stderr
    assert there.stdout == invoke(*words, "--workers", "1").stdout


def test_chunks_give_the_same(tmp_path, cluster):
    sweep = sweep_of(tmp_path, grid=GRID)
    results = run_sweep(sweep, cluster.executor, chunk_size=4)
    assert results == tuple(evaluate(point, sweep.plan_file) for point in sweep.points)


@pytest.mark.slow
def test_a_worker_that_dies_costs_its_own_point_only(tmp_path, cluster):
    sweep = sweep_of(tmp_path, grid={"schedule.num_micro_batches": [3, 4, 5]})
    results = run_sweep(sweep, cluster.executor, chunk_size=3, evaluate_point=dies_at_four)
    assert [result.status for result in results] == [Status.OK, Status.FAILED, Status.OK]
    assert results[1].message == "its worker process died, twice"


def test_a_point_that_raises_keeps_its_traceback(tmp_path, cluster):
    sweep = sweep_of(tmp_path, grid={"schedule.num_micro_batches": [3, 4]})
    results = run_sweep(sweep, **vars(cluster), evaluate_point=raises_at_four)
    assert results[1].message == "RuntimeError: four, twice"
    assert re.search(r'(?s)Traceback.*files.py", line \d+, in raises_at_four', results[1].traceback)


def raises():
    raise ValueError("seven")


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def test_calls_end_in_results_tracebacks_and_deaths(cluster):
    executor = cluster.executor
    assert list(executor.map(pow, [2, 2, 2], [3, 4, 5])) == [8, 16, 32]
    error = executor.submit(raises).exception(60)
    assert isinstance(error, TaskError)
    assert re.search(r'(?s)test_ray.py", line \d+, in raises.*ValueError: seven', str(error))
    assert "\x1b" not in str(error)
    assert isinstance(executor.submit(dies).exception(60), WorkerDiedError)


def writes_pid_and_sleeps(mark):
    new = mark.with_suffix(".new")
    new.write_text(str(os.getpid()))
    new.replace(mark)
    time.sleep(600)


def test_leaving_ends_what_is_under_way_and_keeps_the_connection_of_others(tmp_path, connected):
    mark = tmp_path / "pid"
    with open_ray() as cluster:
        futures = [cluster.executor.submit(writes_pid_and_sleeps, mark) for _ in range(4)]
        while not mark.exists():
            time.sleep(0.1)
    assert all(future.cancelled() for future in futures)
    deadline = time.monotonic() + 30
    while Path("/proc", mark.read_text()).exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert ray.is_initialized()


def test_workers_of_another_version_are_refused(connected, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeproof.analysis.sweep.cluster.__version__", "99.9")
    result = invoke("sweep", write_sweep(tmp_path, {"grid": GRID}), "--executor", "ray")
    assert result.exit_code == 2
    assert re.search(r"not of this version, 99\.9: the first has pipeproof \d", " ".join(result.stderr.split()))


@pytest.mark.parametrize("address", ["host", "http://host:1", "a:b:c"])
def test_what_is_no_address(address):
    with pytest.raises(ClusterError, match="is no address of a Ray cluster: write HOST:6379"):
        open_ray_alone(address)


def test_an_address_at_which_nobody_listens():
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"no Ray cluster answers at {address} within 1 s"):
            open_ray_alone(address)


def test_a_machine_without_a_cluster(monkeypatch):
    def init(*arguments, **options):
        raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(ClusterError, match=r"connection to a cluster of this machine .*: Could not find any running"):
        open_ray_alone(None)


def open_ray_alone(address):
    """Open a cluster as in a process that has no connection."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray.is_initialized", lambda: False)
        with open_ray(address, 1):
            pass
