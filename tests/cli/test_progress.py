"""Progress of commands: a line at a terminal once a command takes long, and nothing anywhere else."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import threading

import pytest

from pipeproof.cli import progress
from pipeproof.cli.progress import showing_progress
from tests.cli.commands import EXAMPLES, REPOSITORY, invoke

PLAN = EXAMPLES / "gpt_pp4.yaml"
AT_ONCE = """
import functools, sys, threading
from rich.progress import Progress
from pipeproof.cli.main import main

Progress.update = functools.partialmethod(Progress.update, refresh=True)

class Now(threading.Timer):
    def start(self):
        self.function()

threading.Timer = Now
sys.exit(main(sys.argv[1:]))
"""
"""The command with the delay over as soon as it begins, in its own thread; every update is drawn."""

COMMANDS = {
    "check": (("check", PLAN), "checking PP"),
    "check --from": (("check", "--from", "megatron", EXAMPLES / "importing" / "megatron.sh", "--world-size", "8"),
                     "checking PP"),
    "simulate": (("simulate", PLAN), "simulating"),
    "show": (("show", PLAN), "lowering"),
    "compare": (("compare", PLAN, PLAN), "comparing"),
    "schedule show": (("schedule", "show", "1f1b", "-p", "2", "-m", "4"), "checking 1f1b"),
    "job hang": (("job", "hang", EXAMPLES / "importing" / "dumps"), "reading the dumps"),
    "state reshard": (("state", "reshard", PLAN, PLAN, "--check"), "proving the map"),
    "state align": (("state", "align", "{log}", "{log}"), "comparing"),
    "state aoa": (("state", "aoa", "{aoa}", "--source", PLAN), "applying statements"),
    "tune": (("tune", PLAN), "checking rows"),
}  # fmt: skip
"""Words of commands, and a text that their line has."""


def read_to_end(terminal):
    """The text written to the other end, which is closed: the kernel delivers it in parts."""
    parts = []
    with contextlib.suppress(OSError):  # how Linux ends a terminal
        while part := os.read(terminal, 65536):
            parts.append(part)
    os.close(terminal)
    return b"".join(parts).decode()


def at_terminal(program, words):
    """Run a command whose standard error is a terminal and whose output is a pipe: status, output and error."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TERM": "xterm", "COLUMNS": "120"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-c", program, *map(str, words)], stdout=subprocess.PIPE, stderr=theirs, env=environment
    )
    os.close(theirs)
    seen = []
    reader = threading.Thread(target=lambda: seen.append(read_to_end(ours)))
    reader.start()
    output, _ = process.communicate(timeout=120)
    reader.join()
    return process.returncode, output.decode(), re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen[0])


@pytest.fixture
def given(tmp_path):
    (tmp_path / "log").write_text("".join(f"step {n}: loss: 2.5 md5: {n:032x}\n" for n in range(3)))
    (tmp_path / "aoa").write_text("embed.weight -> embed.weight\n")
    return lambda words: [str(word).format(log=tmp_path / "log", aoa=tmp_path / "aoa") for word in words]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_line_shows_the_task_at_a_terminal_and_leaves_the_output_as_it_is(name, given, monkeypatch):
    words, text = COMMANDS[name]
    status, output, shown = at_terminal(AT_ONCE, given(words))
    monkeypatch.setenv("COLUMNS", "120")
    bare = invoke(*given(words))
    assert text in shown
    assert (status, output) == (bare.exit_code, bare.stdout)
    assert text not in bare.stderr


class Timers:
    def __init__(self, monkeypatch):
        self.waiting = []
        monkeypatch.setattr(threading, "Timer", self.make)
        self.daemon = False

    def make(self, delay_s, function):
        self.delay_s, self.function = delay_s, function
        return self

    def start(self):
        self.waiting.append(self.function)

    def cancel(self):
        self.waiting.clear()


def test_the_line_begins_after_the_delay_with_the_latest_task_and_is_removed(monkeypatch):
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    timers = Timers(monkeypatch)
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with showing_progress("first") as on_progress:
            on_progress("second", 3, 1000)
            (show,) = timers.waiting
            assert timers.delay_s == progress.DELAY_S
            show()
            on_progress("third", 0, 0)
            on_progress("fourth", 1500, 2000)
        assert timers.waiting == []
        show()  # the timer's thread may come late: nothing is shown then
    shown = read_to_end(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "second: 3 of 1,000" in text
    assert "first" not in text
    assert "fourth: 1,500 of 2,000" in text
    assert shown.endswith("\x1b[2K")  # the line is erased


def test_a_pipe_gets_no_line_and_starts_no_thread(monkeypatch, capsys):
    timers = Timers(monkeypatch)
    with showing_progress("first") as on_progress:
        on_progress("second", 1, 2)
        assert timers.waiting == []
    assert capsys.readouterr() == ("", "")
