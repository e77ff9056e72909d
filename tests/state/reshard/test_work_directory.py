"""Output of a reshard: whole or not at all, and never over anything."""

import fcntl
import json
import shutil
import signal

import pytest

from pipeproof.cli import progress
from pipeproof.signals import TerminatedError
from pipeproof.state.reshard import copy_regions as moving
from tests.state.reshard.plans import DENSE, files_of, reshard, state_of, write_plan
from tests.state.tiny import files_below


@pytest.fixture
def job(tmp_path):
    """A state, another plan, the files that are to come of it, and where."""
    a, b = write_plan(tmp_path / "a.yaml", "tp2", DENSE), write_plan(tmp_path / "b.yaml", "pp2_sd2", DENSE)
    (tmp_path / "saved").mkdir()
    source, expected = state_of(a, tmp_path / "saved"), state_of(b, tmp_path / "of_b")
    return source, b, files_of(expected), tmp_path / "made"


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (OSError(28, "No space left on device"), 2, "cannot be written: No space left on device"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (TerminatedError(signal.SIGTERM), 143, "SIGTERM: nothing was written"),
    ],
)
def test_a_reshard_that_ends_early_leaves_nothing_and_the_same_command_makes_it(job, monkeypatch, error, status, words):
    source, plan, expected, made = job
    before, written = files_below(source), []
    right = moving._TargetWriter.write

    def write(self, name):
        if len(written) == 2:
            raise error
        written.append(name)
        return right(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(moving._TargetWriter, "write", write)
        assert words in reshard(source, plan, "-o", made, "--jobs", 1, status=status)
    assert not made.exists()
    assert not [*made.parent.glob(".*")]
    reshard(source, plan, "-o", made)
    assert files_of(made) == expected
    assert files_below(source) == before


def test_what_a_killed_call_has_left_is_removed(job, tmp_path):
    source, plan, expected, made = job
    for name in (".made.reshard", ".one.safetensors.reshard"):
        (tmp_path / name / "new").mkdir(parents=True)
        (tmp_path / name / "new" / "rank0.safetensors").write_bytes(b"half")
    (tmp_path / "one.safetensors.provenance.json").write_text("{}")  # it gets its name before the file does
    reshard(source, plan, "-o", made)
    reshard(source, "-o", tmp_path / "one.safetensors")
    assert files_of(made) == expected
    assert not [*tmp_path.glob(".*")]


def test_two_at_once_are_refused(job, tmp_path):
    source, plan, _, made = job
    (tmp_path / ".made.reshard").mkdir()
    with (tmp_path / ".made.reshard" / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "another process is writing made" in reshard(source, plan, "-o", made, status=2)
    reshard(source, plan, "-o", made)


def test_nothing_is_written_over_nor_into_the_source(job, tmp_path):
    source, plan, _, made = job
    before = files_below(source)
    made.mkdir()
    assert "made exists already" in reshard(source, plan, "-o", made, status=2)
    made.rmdir()
    made.symlink_to("nowhere")
    assert "made exists already" in reshard(source, plan, "-o", made, status=2)
    assert f"lies in {source}" in reshard(source, plan, "-o", source / "there", status=2)
    assert "there is no directory" in reshard(source, plan, "-o", tmp_path / "a" / "b", status=2)
    assert "exists already" in reshard(source, plan, "-o", tmp_path / "saved", status=2)
    assert files_below(source) == before
    (tmp_path / "one.safetensors").write_bytes(b"mine")
    assert "one.safetensors exists already" in reshard(source, "-o", tmp_path / "one.safetensors", status=2)
    assert (tmp_path / "one.safetensors").read_bytes() == b"mine"


def test_a_disk_without_room_is_refused_before_anything_is_written(job, monkeypatch):
    source, plan, _, made = job
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 100))
    said = reshard(source, plan, "-o", made, status=2)
    assert "PP923" in said
    assert "has 100 B free" in said
    assert not [*made.parent.glob("*made*")]


def test_a_changed_source_ends_it_without_output(job):
    source, plan, _, made = job
    file = source / "rank1.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    assert "rank1.safetensors was changed" in reshard(source, plan, "-o", made, status=2)
    assert not made.exists()


def test_progress_is_a_line_now_and_then_without_a_terminal(job, monkeypatch):
    source, plan, _, made = job
    monkeypatch.setattr(progress, "PLAIN_S", 0.0)
    assert " KiB of " in reshard(source, plan, "-o", made)


def test_the_result_as_json(job):
    source, plan, expected, made = job
    content = json.loads(reshard(source, plan, "-o", made, "--format", "json"))
    output = content["output"]
    assert output["num_files"] == 4
    assert output["size_bytes"] == sum(map(len, expected.values()))
    assert content["findings"] == []
