"""Files that appear whole or not at all."""

import signal
import subprocess
import sys
import threading

import pytest

from pipeproof.atomic_write import atomic_write
from tests.default_signals import default_signals

ENDED = """
import signal, sys
from pathlib import Path
from pipeproof.atomic_write import atomic_write

with atomic_write(Path(sys.argv[1])) as new:
    new.write_text("ne")
    signal.raise_signal(int(sys.argv[2]))
"""


def test_a_file_is_replaced_at_the_end_of_the_block(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("old")
    with atomic_write(path) as new:
        new.write_text("new")
        assert path.read_text() == "old"
        assert [*tmp_path.glob("*.json")] == [path]  # by which a job's files are copied
    assert path.read_text() == "new"
    assert [*tmp_path.iterdir()] == [path]


def test_an_error_in_the_block_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file.json"
    path.write_text("old")

    def fail():
        with atomic_write(path) as new:
            new.write_text("ne")
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        fail()
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_in_the_block_leaves_the_old_file_and_nothing_else(tmp_path, signum):
    path = tmp_path / "file.json"
    path.write_text("old")
    command = [sys.executable, "-c", ENDED, str(path), str(int(signum))]
    assert subprocess.run(command, preexec_fn=default_signals, check=False).returncode == -signum
    assert path.read_text() == "old"
    assert [*tmp_path.iterdir()] == [path]


def test_handlers_of_others_stay(tmp_path):
    """A signal that something handles is left alone; one that nothing handles is as before at the end of the block."""
    seen, before = [], signal.signal(signal.SIGTERM, lambda signum, frame: seen.append(signum))
    kept, default = signal.getsignal(signal.SIGTERM), signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    try:
        with atomic_write(tmp_path / "file.json") as new:
            assert signal.getsignal(signal.SIGTERM) is kept
            assert callable(signal.getsignal(signal.SIGQUIT))
            new.write_text("new")
            signal.raise_signal(signal.SIGTERM)
        assert (seen, signal.getsignal(signal.SIGQUIT)) == ([signal.SIGTERM], signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGQUIT, default)
    assert (tmp_path / "file.json").read_text() == "new"


def test_another_thread_writes_too(tmp_path):
    def write():
        with atomic_write(tmp_path / "file.json") as new:
            new.write_text("new")

    thread = threading.Thread(target=write)
    thread.start()
    thread.join()
    assert (tmp_path / "file.json").read_text() == "new"
