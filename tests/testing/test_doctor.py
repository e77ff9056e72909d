"""The doctor's report, its exit statuses, and the real backend against its table."""

import dataclasses
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from pipeproof.comm.backends import backend_table
from pipeproof.exec import doctor, pair
from pipeproof.exec.doctor import DoctorReport, doctor_to_json, render_doctor, run_doctor
from pipeproof.exec.pair import BackendStartError, backend_pair
from pipeproof.testing.fake_backend import fake_world
from tests.testing.bodies import wait_in_vain

TABLE = backend_table("paddle", "cpu")


def rendered(report: DoctorReport, width: int = 80) -> str:
    stream = io.StringIO()
    render_doctor(report, Console(file=stream, width=width))
    return stream.getvalue()


def children_of(pid: int) -> set[int]:
    """Processes that a process's main thread started and did not reap."""
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_backend_as_its_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "backend_pair", lambda backend: fake_world(TABLE))
    report = run_doctor()
    assert (report.exit_status, report.problems) == (0, [])
    assert [row.key for row in report.not_measured] == ["serial_group_creation", "max_group_size"]
    text = rendered(report)
    assert "paddle-gloo behaves as plans are checked for." in text
    assert text.count("ok ") == len(report.rows) == len(TABLE.values()) - 2


def test_a_row_that_differs_is_named_with_what_it_means_for_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    other = dataclasses.replace(TABLE, queue="pair", tags=True)
    monkeypatch.setattr(doctor, "backend_pair", lambda backend: fake_world(other))
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 0.5)
    report = run_doctor(["queue", "tags", "all_gather"])
    assert report.exit_status == 1
    assert report.problems == [
        (
            "queue: the table says directed_edge, this machine says pair. If edges share a queue, a receive "
            "posted early blocks the send behind it, and plans that passed can hang."
        ),
        "tags: the table says no, this machine says yes. Proofs do not use tags, so they hold either way.",
    ]
    assert rendered(report).count("DIFFERS") == 2


def test_without_paddle_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "paddle", None)
    report = run_doctor()
    assert (report.exit_status, report.rows) == (2, [])
    assert "pip install 'pipeproof[cpu]'" in rendered(report, width=120)


def test_a_backend_that_does_not_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pair(backend: str) -> None:
        raise BackendStartError("rank 1 ended before it was ready: SIGILL")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(doctor, "backend_pair", no_pair)
    report = run_doctor()
    assert report.exit_status == 2
    assert report.problems == [
        "Two processes could not be connected by paddle-gloo: rank 1 ended before it was ready: SIGILL."
    ]


def test_a_worker_that_cannot_import_paddle_is_told_and_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children_of(os.getpid())  # other tests may leave Python's own helper processes
    monkeypatch.setitem(pair.WORKERS, "paddle", "pipeproof.exec.no_such_module")
    with (
        pytest.raises(BackendStartError, match="rank 0 ended before it was imported: exit status 1"),
        backend_pair("paddle"),
    ):
        pytest.fail("came up without a worker")
    assert children_of(os.getpid()) == before


def test_json_holds_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "backend_pair", lambda backend: fake_world(TABLE))
    data = json.loads(json.dumps(doctor_to_json(run_doctor(["longer_message"]))))
    assert list(data) == ["backend", "exit_status", "versions", "rows", "not_measured", "problems"]
    assert data["rows"] == [
        {
            "key": "longer_message",
            "expected": "abort",
            "observed": "abort",
            "ok": True,
            "detail": "rank 1 died: length check",
        }
    ]
    assert set(data["versions"]) == {"pipeproof", "python", "paddle", "torch", "numpy", "platform", "cores"}


@pytest.mark.needs_torch
def test_pytorch_behaves_as_its_table_says() -> None:
    report = run_doctor(backend="torch")
    assert {row.key: row.observed for row in report.rows if not row.ok} == {}
    assert (report.backend, report.exit_status) == ("torch-gloo", 0)


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
        "from pipeproof.exec.pair import backend_pair\n"
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
    deadline = time.monotonic() + 10
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in workers if is_alive(pid)] == []
