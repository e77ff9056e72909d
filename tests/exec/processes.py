"""Real ``pipeproof run`` processes for tests, started in a private temporary directory and observed from outside."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from pipeproof.exec.launch.supervisor import remove_left_directories
from tests.default_signals import default_signals

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 300.0
"""Time limit of any run here: twenty times the run on an idle machine."""


@dataclass
class Ended:
    """A run that has come to its end."""

    status: int
    output: str
    report: dict | None


class Run:
    """One started ``pipeproof run``, or another ``verb``, of a plan given as a dict."""

    def __init__(self, tmp_path, plan, *options, command=("-m", "pipeproof"), verb="run"):
        self.temporary = tmp_path / "tmp"
        self.temporary.mkdir(parents=True)
        self.report_file = tmp_path / "report.json"
        plan_file = tmp_path / "plan.json"
        plan_file.write_text(json.dumps(plan))
        self._output_file = tmp_path / "output.txt"
        with self._output_file.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, *command, verb, str(plan_file), "--report", str(self.report_file), *options],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=tmp_path,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(self.temporary), "COLUMNS": "400"},
                start_new_session=True,
                preexec_fn=default_signals,
            )

    @property
    def output(self):
        return self._output_file.read_text()

    def await_output(self, text):
        """Wait until the run has printed ``text``."""
        self._await(lambda: text in self.output or self.process.poll() is not None)
        assert text in self.output, self.output

    def worker(self, rank):
        """The process id of one rank's worker."""
        names = {f"PADDLE_TRAINER_ID={rank}", f"RANK={rank}"}
        pids = [pid for pid in self._workers() if names.intersection(_environment(pid))]
        assert len(pids) == 1
        return pids[0]

    def end(self):
        """Wait for the end; no process, no file and no traceback may be left."""
        try:
            status = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run does not end; it printed\n{self.output}") from None
        finally:
            self._stop()
        self._await(lambda: not self._workers())
        if status == -signal.SIGKILL:  # the next start removes the files of a killed launcher
            with mock.patch.object(tempfile, "tempdir", str(self.temporary)):
                remove_left_directories(self.temporary)
        self._await(lambda: not self.leftovers())
        report = json.loads(self.report_file.read_text()) if self.report_file.exists() else None
        assert "Traceback" not in self.output, self.output
        return Ended(status, self.output, report)

    def leftovers(self):
        """Entries of the run's private directory for temporary files, without Paddle's."""
        return sorted(path.name for path in self.temporary.iterdir() if path.name.startswith("pipeproof"))

    def _stop(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _workers(self):
        """Processes with a job directory of this run on their command line: workers and the reference."""
        return [pid for pid in _pids() if str(self.temporary) in _command_line(pid)]

    def _await(self, condition):
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                left = f"{self._workers()} {self.leftovers()}"
                self._stop()
                raise AssertionError(f"left: {left}; output\n{self.output}")
            time.sleep(0.05)


def bitwise_report(tmp_path, plan):
    """The report of a run that must succeed: logs equal the graph, and each step has the reference's bits."""
    ended = Run(tmp_path, plan).end()
    assert ended.status == 0, ended.output
    assert ended.report["log_matches_graph"]
    assert all(step["bitwise"] for step in ended.report["steps"])
    return ended.report


def _pids():
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _read(pid, name):
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace").replace("\0", "\n")
    except OSError:  # it has ended
        return ""


def _command_line(pid):
    return _read(pid, "cmdline")


def _environment(pid):
    return _read(pid, "environ").splitlines()
