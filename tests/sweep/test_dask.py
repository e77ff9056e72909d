"""A sweep on a Dask cluster of this machine gives what local processes give, and what breaks is told."""

import json
import re
import socket
from concurrent.futures import BrokenExecutor, Executor, Future, wait
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import dask
import pytest
from distributed import LocalCluster

from pipeproof import __version__
from pipeproof.analysis.sweep.cluster import ClusterError, require_version
from pipeproof.analysis.sweep.dask_cluster import WatchedExecutor, open_dask
from pipeproof.analysis.sweep.evaluate_point import Status, evaluate
from pipeproof.analysis.sweep.results_file import ResultsFile
from pipeproof.analysis.sweep.run_sweep import run_sweep
from tests.cli.commands import invoke
from tests.sweep.files import dies_at_four, dies_once, raises_at_four, sweep_of, tune_command, write_sweep

GRID = {"schedule.kind": ["1f1b", "gpipe"], "schedule.num_micro_batches": [3, 4, 5]}


@pytest.fixture(scope="module")
def cluster():
    # a worker's death is the point's failure at once: each restart of a worker takes seconds
    with (
        dask.config.set({"distributed.scheduler.allowed-failures": 0}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None, silence_logs=50
        ) as cluster,
    ):
        yield cluster.scheduler_address


@pytest.fixture
def on_cluster(cluster):
    def run(sweep, **options):
        with open_dask(cluster) as opened:
            return run_sweep(sweep, **vars(opened), **options)

    return run


def test_results_are_those_of_evaluating_here(tmp_path, on_cluster):
    sweep = sweep_of(tmp_path, grid=GRID, include=[{"cost.forward_us": "1/3"}, {"topology.pp": 8}])
    new = []
    results = on_cluster(sweep, on_result=new.append)
    assert results == tuple(evaluate(point, sweep.plan_file) for point in sweep.points)
    assert {result.status for result in results} == {Status.OK, Status.REFUSED}
    assert {result.id for result in new} == {point.id for point in sweep.points}


def test_a_worker_that_dies_costs_its_own_point_only(tmp_path, on_cluster):
    results = on_cluster(
        sweep_of(tmp_path, grid={"schedule.num_micro_batches": [3, 4, 5]}), evaluate_point=dies_at_four
    )
    assert [result.status for result in results] == [Status.OK, Status.FAILED, Status.OK]
    assert "KilledWorker" in results[1].message
    assert results[1].message.endswith(", twice")


def test_a_worker_that_dies_once_is_made_good(tmp_path, on_cluster):
    sweep = sweep_of(tmp_path, grid={"schedule.num_micro_batches": [3, 4]})
    assert on_cluster(sweep, evaluate_point=dies_once) == tuple(evaluate(p, sweep.plan_file) for p in sweep.points)
    assert Path(sweep.plan_file).with_suffix(".died").exists()


def test_what_raises_is_tried_twice(tmp_path, on_cluster):
    results = on_cluster(sweep_of(tmp_path, grid=GRID), evaluate_point=raises_at_four)
    assert [r.message for r in results if r.status is Status.FAILED] == ["RuntimeError: four, twice"] * 2


@pytest.mark.slow
def test_the_command_writes_the_same_results_as_with_processes(tmp_path, cluster):
    sweep = write_sweep(tmp_path, {"grid": GRID})
    for name, options in (("here", ("--workers", "2")), ("there", ("--executor", f"dask:{cluster}"))):
        result = invoke("sweep", sweep, "-o", tmp_path / f"{name}.jsonl", "--format", "json", *options)
        assert result.exit_code == 0, result.stderr
        (tmp_path / f"{name}.json").write_text(result.stdout)
    assert json.loads((tmp_path / "here.json").read_text()) == json.loads((tmp_path / "there.json").read_text())
    again = invoke("sweep", sweep, "-o", tmp_path / "there.jsonl", "--executor", f"dask:{cluster}")
    assert f"6 of 6 points are in {tmp_path / 'there.jsonl'}" in again.stderr


def test_tune_finds_the_same_layouts_and_resumes(tmp_path, cluster):
    words, out = tune_command(tmp_path), tmp_path / "layouts"
    here = invoke(*words, "--workers", "1")
    there = invoke(*words, "--executor", f"dask:{cluster}", "-o", out)
    assert there.exit_code == 0, there.stderr
    assert there.stdout == here.stdout
    lines = (out / "results.jsonl").read_text().splitlines()
    (out / "results.jsonl").write_text("".join(f"{line}\n" for line in lines[:3]))  # as after an interrupt
    again = invoke(*words, "--executor", f"dask:{cluster}", "-o", out)
    assert again.stdout == here.stdout
    assert sorted((out / "results.jsonl").read_text().splitlines()) == sorted(lines)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_an_address_at_which_nobody_listens():
    address = f"tcp://127.0.0.1:{free_port()}"
    with (
        pytest.raises(ClusterError, match=f"no Dask scheduler answers at {address} within 1 s"),
        open_dask(address, 1),
    ):
        pass


@pytest.mark.parametrize("address", ["carrier-pigeon://x:1", "a:b:c:d"])
def test_what_is_no_address_is_refused_by_the_command(address, tmp_path):
    result = invoke("sweep", write_sweep(tmp_path, {"grid": GRID}), "--executor", f"dask:{address}")
    assert result.exit_code == 2
    assert "is no address of a Dask scheduler" in " ".join(result.stderr.split())


def small_cluster(num_workers):
    """A cluster within this process."""
    return LocalCluster(n_workers=num_workers, processes=False, dashboard_address=":0", silence_logs=50)


def test_a_cluster_without_workers_is_told():
    with (
        small_cluster(0) as cluster,
        pytest.raises(ClusterError, match="has no workers after 1 s"),
        open_dask(cluster.scheduler_address, 1),
    ):
        pass


def test_workers_of_another_version_are_refused(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeproof.analysis.sweep.cluster.__version__", "99.9")
    result = invoke("sweep", write_sweep(tmp_path, {"grid": GRID}), "--executor", f"dask:{cluster}")
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    # all that there are: one of an earlier test's may be about to be replaced
    assert re.search(r"([12]) of \1 workers are not of this version, 99.9: tcp://127.0.0.1:", told)
    assert f"has pipeproof {__version__}; install the same on every worker" in told


def test_workers_without_pipeproof_are_refused():
    found = {"tcp://a:1": __version__, "tcp://b:1": Exception("No module named 'pipeproof'")}
    with pytest.raises(ClusterError, match=r"1 of 2 workers .*: tcp://b:1 has no pipeproof \(No module named"):
        require_version(found)


@pytest.mark.slow
def test_a_cluster_that_goes_away_ends_the_sweep_and_keeps_what_was_done(tmp_path):
    sweep, kept = write_sweep(tmp_path, {"grid": GRID}), tmp_path / "kept.jsonl"
    with small_cluster(1) as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeproof.analysis.sweep.dask_cluster.AT_LEAST_IN_FLIGHT", 1)
        patch.setattr("pipeproof.analysis.sweep.dask_cluster.open_dask", partial(open_dask, timeout_s=2))
        patch.setattr("pipeproof.analysis.sweep.results_file.ResultsFile.append", closing_after_two(cluster))
        result = invoke("sweep", sweep, "-o", kept, "--executor", f"dask:{cluster.scheduler_address}")
    assert result.exit_code == 3
    assert f"error: the cluster broke off; results so far are in {kept}; the same command resumes" in result.stderr
    again = invoke("sweep", sweep, "-o", kept, "--workers", "1", "--format", "json")
    assert again.exit_code == 0
    assert re.search(r"[2-5] of 6 points are in ", again.stderr)
    assert {point["status"] for point in json.loads(again.stdout)["points"]} == {"ok"}


class Forgetful(Executor):
    """Never ends what it is given."""

    def submit(self, function, /, *args, **kwargs):
        return Future()


def test_what_a_closed_cluster_forgets_ends_all_the_same():
    client = SimpleNamespace(status="running")
    executor = WatchedExecutor(Forgetful(), client, look_s=0.01, grace_s=0.01)
    forgotten = executor.submit(print)
    assert wait([forgotten], timeout=0.1).not_done
    client.status = "closed"
    assert isinstance(forgotten.exception(timeout=10), BrokenExecutor)
    with pytest.raises(BrokenExecutor):
        executor.submit(print)
    executor.shutdown()


def closing_after_two(cluster):
    """A replacement of ``append`` that closes the cluster once two results are kept."""
    append, count = ResultsFile.append, 0

    def replaced(file, result):
        nonlocal count
        append(file, result)
        count += 1
        if count == 2:
            cluster.close()

    return replaced
