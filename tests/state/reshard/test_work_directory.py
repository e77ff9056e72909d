"""Where a reshard writes: whole or not at all, resumed, and never over anything."""

import contextlib
import fcntl
import functools
import json
import os
import shutil
import signal

import pytest

from pipeproof.cli import reshard_command as reshard_shown
from pipeproof.signals import TerminatedError
from pipeproof.state.reshard import copy_regions as moving
from pipeproof.state.reshard import execute_reshard as work_directory
from tests.state.reshard.plans import DENSE, files_of, keeps_marks, reshard, state_of, write_plan
from tests.state.tiny import files_below


@pytest.fixture
def job(tmp_path):
    """A state, another plan, the files that are to come of it, and where."""
    a, b = write_plan(tmp_path / "a.yaml", "tp2", DENSE), write_plan(tmp_path / "b.yaml", "pp2_sd2", DENSE)
    (tmp_path / "saved").mkdir()
    source, expected = state_of(a, tmp_path / "saved"), state_of(b, tmp_path / "of_b")
    return source, b, files_of(expected), tmp_path / "made"


def fail_at(monkeypatch, number, error):
    """End the reshard by an error when so many files are noted."""
    noted = []
    right = work_directory.WorkDirectory.record

    def note(self, file):
        if len(noted) == number:
            raise error
        noted.append(file.name)
        right(self, file)

    monkeypatch.setattr(work_directory.WorkDirectory, "record", note)
    return noted


@pytest.mark.parametrize("number", range(4))
def test_the_same_command_continues_with_what_is_there(job, monkeypatch, number):
    source, plan, expected, made = job
    before = files_below(source)
    with monkeypatch.context() as patch:
        noted = fail_at(patch, number, OSError(28, "No space left on device"))
        said = reshard(source, plan, "-o", made, "--jobs", 1, status=2)
    assert "cannot be written: No space left on device" in said
    assert "run the same command again to resume" in said
    assert not made.exists()
    again = []
    right = moving._TargetWriter.write
    monkeypatch.setattr(
        moving._TargetWriter, "write", lambda self, name, *rest: again.append(name) or right(self, name, *rest)
    )
    said = reshard(source, plan, "-o", made)
    assert (f"resuming: {number} of 4 files exist" in said) == (number > 0)
    assert sorted(again) == sorted(expected.keys() - set(noted))
    assert files_of(made) == expected
    assert files_below(source) == before
    assert not [*made.parent.glob(".*")]


def test_an_interrupt_ends_with_130_and_can_be_resumed(job, monkeypatch):
    source, plan, expected, made = job
    with monkeypatch.context() as patch:
        fail_at(patch, 2, KeyboardInterrupt())
        said = reshard(source, plan, "-o", made, status=130)
    assert "run the same command again to resume" in said
    assert "interrupted" in said
    assert "resuming: " in reshard(source, plan, "-o", made)
    assert files_of(made) == expected


def test_who_is_reported_to_end_reports_it_and_can_be_resumed(job, monkeypatch):
    source, plan, expected, made = job
    with monkeypatch.context() as patch:
        fail_at(patch, 2, TerminatedError(signal.SIGTERM))
        said = reshard(source, plan, "-o", made, status=143)
    assert "SIGTERM: " in said
    assert "resuming: " in reshard(source, plan, "-o", made)
    assert files_of(made) == expected


def test_what_another_job_left_is_not_resumed(job, monkeypatch, tmp_path):
    source, plan, _, made = job
    with monkeypatch.context() as patch:
        fail_at(patch, 1, OSError(5, "Input/output error"))
        reshard(source, plan, "-o", made, status=2)
    left = files_below(tmp_path / ".made.reshard")
    other = write_plan(tmp_path / "other.yaml", "vpp", DENSE)
    said = reshard(source, other, "-o", made, status=2)
    assert "is the work directory of another reshard: the target differs" in said
    assert files_below(tmp_path / ".made.reshard") == left


def test_half_a_record_is_ignored(job, monkeypatch, tmp_path):
    source, plan, expected, made = job
    with monkeypatch.context() as patch:
        fail_at(patch, 2, OSError(5, "Input/output error"))
        reshard(source, plan, "-o", made, "--jobs", 1, status=2)
    (note, *_) = sorted((tmp_path / ".made.reshard" / "done").iterdir())
    note.write_text(note.read_text()[:40])
    assert "resuming: 1 of 4" in reshard(source, plan, "-o", made)
    assert files_of(made) == expected


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


def test_what_stays_behind_when_nothing_can_be_removed_does_no_harm(job, monkeypatch, tmp_path):
    source, plan, expected, made = job
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", lambda *_, **__: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        reshard(source, plan, "-o", made)
    assert files_of(made) == expected
    assert (tmp_path / ".made.reshard").exists()
    said = reshard(source, plan, "-o", made)
    assert f"{made} already exists and is complete: " in said
    assert f"pipeproof run {plan} --resume {made}" in said
    assert not (tmp_path / ".made.reshard").exists()
    assert files_of(made) == expected


def test_killed_after_the_cleanup_the_same_command_succeeds(job, tmp_path):
    source, plan, _, made = job
    reshard(source, plan, "-o", made)
    if keeps_marks(tmp_path):
        assert f"{made} already exists and is complete: " in reshard(source, plan, "-o", made)
    else:
        assert f"{made} exists already" in reshard(source, plan, "-o", made, status=2)
    assert f"{made} exists already" in reshard(source, plan, "-o", made, "--weights-only", status=2)
    (file, *_) = sorted(made.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert f"{made} exists already" in reshard(source, plan, "-o", made, status=2)


OUTPUTS = {
    "a state": ("made", ("--to", "PLAN")),
    "flex": ("made", ("--to", "PLAN", "--save-format", "flex")),
    "one file": ("made.safetensors", ()),
    "a directory of one file": ("made", ("--names", "huggingface", "--weights-only")),
}


@pytest.fixture
def published(job, monkeypatch, request):
    """The command that was killed before it cleaned up, what it made, and the directory that is left."""
    source, plan, _, _ = job
    name, options = OUTPUTS[request.param]
    out = plan.parent / name
    words = [source, *(plan if word == "PLAN" else word for word in options), "-o", out]
    with monkeypatch.context() as patch:
        patch.setattr(work_directory, "_remove", lambda directory: None)
        reshard(*words)
    left = out.with_name(f".{name}.reshard")
    assert left.exists()
    return words, out, left


def content_of(out):
    return files_below(out) if out.is_dir() else {out.name: out.read_bytes()}


@pytest.mark.parametrize("published", OUTPUTS, indirect=True)
def test_a_reshard_that_was_killed_before_it_cleaned_up_is_finished_by_the_same_command(published):
    words, out, left = published
    before = content_of(out)
    content = json.loads(reshard(*words, "--format", "json"))
    assert content["output"]["num_files_from_before"] == content["output"]["num_files"]
    assert content_of(out) == before
    assert not left.exists()


@pytest.mark.parametrize("published", OUTPUTS, indirect=True)
def test_an_output_that_was_changed_since_is_not_accepted(published):
    words, out, left = published
    for path in [out] if out.is_file() else sorted(out.iterdir()):
        good = path.read_bytes()
        for bad in (good[:-5] + bytes([good[-5] ^ 1]) + good[-4:], good[:-3]):
            path.write_bytes(bad)
            assert "from making it, can be removed" in reshard(*words, status=2)
            assert left.exists()
        path.write_bytes(good)
    assert "already exists and is complete" in reshard(*words)


@pytest.mark.parametrize("published", ["a state"], indirect=True)
def test_an_output_of_another_job_is_not_accepted(published, job):
    words, _, left = published
    source, plan, _, made = job
    assert "can be removed" in reshard(source, plan, "-o", made, "--weights-only", status=2)
    (left / "job.json").write_text("[")
    assert "can be removed" in reshard(*words, status=2)


@pytest.mark.parametrize("published", ["a state"], indirect=True)
def test_cleanup_may_end_anywhere(published, monkeypatch, tmp_path):
    words, out, left = published
    shutil.copytree(left, tmp_path / "kept")
    expected, number = content_of(out), 0
    while True:
        with monkeypatch.context() as patch:
            end_at(patch, number)
            with contextlib.suppress(KeyboardInterrupt):
                work_directory._remove(left)
        if not left.exists():
            break
        had_job = (left / "job.json").exists()
        is_known = had_job or keeps_marks(tmp_path)
        said = reshard(*words, status=0 if is_known else 2)
        assert ("already exists and is complete" if is_known else f"{out} exists already\n") in said
        assert not left.exists()
        assert content_of(out) == expected
        shutil.copytree(tmp_path / "kept", left)
        number += 1
    assert number > 6


def end_at(monkeypatch, number):
    """End the process, as it were, at a removal."""
    done = []

    def ending(real, *arguments, **options):
        if len(done) == number:
            raise KeyboardInterrupt
        done.append(arguments)
        return real(*arguments, **options)

    for name in ("unlink", "rmdir"):
        monkeypatch.setattr(os, name, functools.partial(ending, getattr(os, name)))


def test_progress_is_a_line_now_and_then_without_a_terminal(job, monkeypatch):
    source, plan, _, made = job
    monkeypatch.setattr(reshard_shown, "_LINE_EVERY_S", 0.0)
    assert " KiB of " in reshard(source, plan, "-o", made)


def test_the_result_as_json(job):
    source, plan, expected, made = job
    content = json.loads(reshard(source, plan, "-o", made, "--format", "json"))
    output = content["output"]
    assert (output["num_files"], output["num_files_from_before"]) == (4, 0)
    assert output["size_bytes"] == sum(map(len, expected.values()))
    assert content["findings"] == []
