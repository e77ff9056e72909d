"""Checks and clean-up of the launcher, without starting a worker."""

import contextlib
import errno
import json
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipeproof.exec.launch import supervisor as launch
from pipeproof.exec.launch.supervisor import Launcher, WorkerFailedError, job_directory
from pipeproof.exec.launch.watchdog import JobState
from pipeproof.exec.rank.job_files import EventSink, Job, dump_plan, save_json
from pipeproof.signals import TerminatedError, terminate_raises
from pipeproof.verify.certificate import Verdict, certificate_of, graph_digest
from tests.plans import subject

NOW_S = 10_000.0


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    """A launcher of two ranks with a timeout of 5 s that has started nothing; it is ``NOW_S``."""
    one = subject()
    job = Job(tmp_path, dump_plan(one.loaded), certificate_of(one, graph_digest(one), Verdict.PROVED))
    monkeypatch.setattr(launch.time, "monotonic", lambda: NOW_S)
    return Launcher(job, JobState(one), 5.0)


def hear(launcher, ago_s, *, ready=True, finished=False):
    for rank in range(2):
        if ready:
            launcher._state.handle(rank, {"kind": "ready", "threads": 1}, NOW_S - ago_s)
        if finished:
            launcher._state.handle(rank, {"kind": "finished"}, NOW_S - ago_s)
        launcher._state.ranks[rank].heard_s = NOW_S - ago_s


@pytest.mark.parametrize(
    ("ago_s", "ready", "hangs"), [(4.9, True, False), (5.1, True, True), (59.0, False, False), (61.0, False, True)]
)
def test_patience_is_the_timeout_and_longer_during_set_up(launcher, ago_s, ready, hangs):
    hear(launcher, ago_s, ready=ready)
    launcher._reference_heard_s = NOW_S
    if hangs:
        with pytest.raises(WorkerFailedError, match="PP903: rank 0"):
            launcher._raise_if_hung()
    else:
        launcher._raise_if_hung()


def test_a_reference_that_was_done_long_before_the_ranks_does_not_hang(launcher):
    hear(launcher, 0.1, finished=True)
    launcher._reference_heard_s = NOW_S - 3600.0
    launcher._raise_if_hung()


def test_ranks_that_wait_for_a_slow_reference_do_not_hang(launcher):
    hear(launcher, 3600.0, finished=True)
    launcher._reference_heard_s = NOW_S - 4.0
    launcher._raise_if_hung()


def test_a_reference_that_hangs_is_named(launcher):
    hear(launcher, 3600.0, finished=True)
    launcher._reference_heard_s = NOW_S - 6.0
    with pytest.raises(WorkerFailedError, match="PP903: the reference process has finished no step for 5 s"):
        launcher._raise_if_hung()


def test_a_silent_reference_is_no_hang_while_the_ranks_move(launcher):
    hear(launcher, 1.0)
    launcher._reference_heard_s = NOW_S - 3600.0
    launcher._raise_if_hung()


def test_a_reference_that_never_ceases_to_report_hides_no_hang(launcher, tmp_path):
    """Its steps may come faster than the launcher looks; only messages of ranks count as progress."""
    hear(launcher, 6.0)
    read_end, write_end = os.pipe()
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    reference = launch._Worker("reference", None, sleeping, read_end, tmp_path / "reference.out")
    launcher._workers.append(reference)
    launcher._selector.register(read_end, selectors.EVENT_READ, reference)
    reports = iter(range(100))

    def report():
        os.write(write_end, b'{"kind":"step","step":%d}\n' % next(reports))

    try:
        report()
        with pytest.raises(WorkerFailedError, match="PP903: rank 0"):
            launcher._watch(report)
    finally:
        sleeping.kill()
        sleeping.wait()
        os.close(read_end)
        os.close(write_end)


# --- the job's directory ---


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_directory_is_removed_and_logs_are_kept(temporary):
    logs = temporary / "a" / "logs"

    def fail():
        with job_directory(logs) as directory:
            (directory / "rank0.out").write_text("hello")
            (directory / "rank0.step0.npz").write_text("large")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [path.name for path in temporary.iterdir()] == ["a"]
    assert [(path.name, path.read_text()) for path in logs.iterdir()] == [("rank0.out", "hello")]


def test_the_directory_is_removed_though_logs_cannot_be_kept(temporary):
    (temporary / "file").touch()
    with pytest.raises(NotADirectoryError), job_directory(temporary / "file" / "logs") as directory:
        assert directory.is_dir()
    assert not directory.exists()


def test_the_directory_is_private(temporary):
    with job_directory(None) as directory:
        assert directory.stat().st_mode & 0o077 == 0


# --- signals ---


def receive(signum):
    """Get a signal while signals are exceptions."""
    with terminate_raises():
        signal.raise_signal(signum)


@contextlib.contextmanager
def handled_by(signum, handler):
    """Whatever handled the signal when the tests were started."""
    before = signal.signal(signum, handler)
    try:
        yield
    finally:
        signal.signal(signum, before)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_signals_become_exceptions_and_handlers_come_back(signum):
    with handled_by(signum, signal.SIG_DFL):
        with pytest.raises(TerminatedError, match=signum.name) as caught:
            receive(signum)
        assert caught.value.signum == signum
        assert signal.getsignal(signum) is signal.SIG_DFL


def test_sigint_is_heard_though_a_shell_had_it_ignored():
    with handled_by(signal.SIGINT, signal.SIG_IGN):
        with pytest.raises(KeyboardInterrupt):
            receive(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_sighup_stays_ignored_under_nohup():
    with handled_by(signal.SIGHUP, signal.SIG_IGN):
        receive(signal.SIGHUP)


def test_a_process_whose_output_nobody_reads_ends_with_its_status_and_message():
    code = "from pipeproof.exec.rank.job_files import end_process; print('lost'); end_process(7, 'the message')"
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # the output fails at the end
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (7, "the message")


def test_a_file_that_another_rank_waits_for_appears_whole(tmp_path, monkeypatch):
    def fill_the_disk(path, content):
        path.write_text(content[:1].decode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", fill_the_disk)
    with pytest.raises(OSError, match="space"):
        save_json(tmp_path / "rank0.log.json", [1, 2], list[int])
    assert not (tmp_path / "rank0.log.json").exists()


def test_events_are_lines_of_json():
    reader, writer = os.pipe()
    sink = EventSink(writer)
    sink.send("at", step=3, op=17)
    sink.send("setup", what='a "word"')
    os.close(writer)
    with os.fdopen(reader) as lines:
        assert [json.loads(line) for line in lines] == [
            {"kind": "at", "step": 3, "op": 17}, {"kind": "setup", "what": 'a "word"'},
        ]  # fmt: skip
