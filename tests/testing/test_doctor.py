"""The doctor's report, its exit statuses, and the real backend against its table."""

import dataclasses
import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from pipeproof.comm.backends import backend_table
from pipeproof.exec.measure import doctor
from pipeproof.exec.measure.doctor import (
    BackendStartError,
    DoctorReport,
    backend_pair,
    render_doctor,
    run_doctor,
)
from tests.testing.bodies import wait_in_vain
from tests.testing.fake_backend import fake_world

TABLE = backend_table("paddle", "cpu")


def rendered(report: DoctorReport, width: int = 80) -> str:
    stream = io.StringIO()
    render_doctor(report, Console(file=stream, width=width))
    return stream.getvalue()


def children_of(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.needs_paddle
def test_a_backend_as_its_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "backend_pair", lambda *_: fake_world(TABLE))
    report = run_doctor(asks_devices=False)
    assert (report.exit_status, report.problems) == (0, [])
    assert [row.key for row in report.not_measured] == ["max_batched_transfers"]
    text = rendered(report)
    assert "paddle-gloo behaves as plans assume." in text
    assert text.count("ok ") == len(report.rows) == len(TABLE.values()) - len(report.not_measured)


@pytest.mark.needs_paddle
def test_a_row_that_differs_is_named_with_what_it_means_for_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(TABLE, queue="pair", barrier="wrong")
    monkeypatch.setattr(doctor, "backend_pair", lambda *_: fake_world(other))
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 60.0)
    report = run_doctor(["queue", "barrier", "all_gather"], asks_devices=False)
    assert report.exit_status == 1
    queue, barrier = report.problems
    assert queue.startswith("queue: the table has directed_edge, this machine pair. ")
    assert barrier.startswith("barrier: the table has works, this machine wrong. ")
    assert rendered(report).count("DIFFERS") == 2


def test_without_paddle_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paddle", None)
    report = run_doctor()
    assert (report.exit_status, report.rows) == (2, [])
    assert "pip install 'pipeproof[cpu]'" in rendered(report, width=200)


def test_a_backend_that_does_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pair(backend: str, device: str) -> None:
        raise BackendStartError("rank 1 ended before it was ready: SIGILL")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(doctor, "backend_pair", no_pair)
    report = run_doctor()
    assert report.exit_status == 2
    assert report.problems == [
        "Two processes could not be connected by paddle-gloo: rank 1 ended before it was ready: SIGILL."
    ]


NCCL = backend_table("torch", "gpu")
CERTAIN = ["send_completes", "host_blocks_on_post", "queue", "matching", "all_gather"]


def on_gpus(monkeypatch: pytest.MonkeyPatch, **rows: object) -> DoctorReport:
    """The doctor's report on a machine whose NCCL does otherwise in some rows."""
    table = dataclasses.replace(NCCL, **rows)  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(doctor, "backend_pair", lambda *_: fake_world(table))
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 60.0)
    return run_doctor(CERTAIN, "torch", "gpu", asks_devices=False)


def test_versions_that_no_row_has_are_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"python": "3.11.7", "torch": "2.99.0+cu130", "transformers": "not installed"}
    monkeypatch.setattr(doctor, "_versions", lambda _: versions)
    monkeypatch.setitem(sys.modules, "paddle", None)
    (note,) = run_doctor().notes
    assert note.startswith("PyTorch 2.99.0+cu130 is untested: pipeproof's tests ran with 2.11, 2.13")


def test_a_machine_that_contradicts_the_table_of_nccl_is_told_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    report = on_gpus(monkeypatch, queue="pair", all_gather="wrong")
    assert report.exit_status == 1
    assert [problem.partition(":")[0] for problem in report.problems] == ["queue", "all_gather"]
    assert "posted early blocks the send behind it, and plans that passed can hang" in report.problems[0]


def test_without_a_gpu_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pair(backend: str, device: str) -> None:
        assert (backend, device) == ("torch", "gpu")
        raise BackendStartError("rank 0 failed before it was imported: RuntimeError: PyTorch sees no GPU here")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(doctor, "backend_pair", no_pair)
    report = run_doctor(backend="torch", device="gpu")
    assert report.exit_status == 2
    assert report.problems[0].endswith(
        "PyTorch sees no GPU here. Use --on cpu, or a machine with a GPU and a build of PyTorch for it."
    )


@pytest.mark.needs_torch
@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU")
def test_processes_that_find_no_gpu_are_told_of_and_reaped() -> None:
    before = children_of(os.getpid())
    report = run_doctor(backend="torch", device="gpu")
    assert report.exit_status == 2
    assert "RuntimeError: no GPU is visible here. Use --on cpu, or" in report.problems[0]
    assert children_of(os.getpid()) == before


@pytest.mark.needs_torch
def test_pytorch_behaves_as_its_table_says() -> None:
    report = run_doctor(backend="torch")
    assert {row.key: row.observed for row in report.rows if not row.ok} == {}
    assert (report.backend, report.exit_status) == ("torch-gloo", 0)


@pytest.mark.slow
@pytest.mark.needs_paddle
def test_this_machine_behaves_as_the_table_says() -> None:
    before = children_of(os.getpid())
    report = run_doctor()
    assert {row.key: row.observed for row in report.rows if not row.ok} == {}
    assert report.exit_status == 0
    assert children_of(os.getpid()) == before


@pytest.mark.needs_paddle
def test_a_rank_that_blocks_in_gloo_is_seen_and_killed() -> None:
    before = children_of(os.getpid())
    with backend_pair("paddle") as world:
        workers = children_of(os.getpid()) - before
        assert len(workers) == 2
        outcomes = world.run(wait_in_vain, 2.0)
        assert [outcome.kind for outcome in outcomes] == ["blocked", "returned"]
    assert children_of(os.getpid()) == before
    assert [pid for pid in workers if is_alive(pid)] == []


@pytest.mark.needs_paddle
def test_workers_end_with_a_doctor_that_is_killed() -> None:
    program = (
        "from tests.testing.bodies import wait_in_vain\n"
        "from pipeproof.exec.measure.doctor import backend_pair\n"
        "with backend_pair('paddle') as world:\n"
        "    print('up', flush=True)\n"
        "    world.run(wait_in_vain, 60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        workers = children_of(parent.pid)
        assert len(workers) == 2
        time.sleep(0.3)  # for rank 0 to be inside gloo
        parent.kill()
    deadline = time.monotonic() + 60
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in workers if is_alive(pid)] == []
