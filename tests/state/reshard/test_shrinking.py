"""A source that somebody cuts short, or whose disk fails, while it is read: it is named, and nothing is made of it."""

import errno
import os
from pathlib import Path

import pytest

from pipeproof.state.reshard import execute_reshard as carry
from pipeproof.state.state_index import provenance_file
from tests.state.reshard.plans import DENSE, reshard, state_of, write_plan
from tests.state.tiny import files_below

SOURCES = ("states", "merged.safetensors", "theirs.safetensors")
"""With an index, with a provenance file, with no SHA-256 at all."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A state, the merged file of that, its weights as others write them; and a plan of another topology."""
    root = tmp_path_factory.mktemp("made")
    state_of(write_plan(root / "plan.yaml", "tp2_pp2", DENSE), root / "states")
    write_plan(root / "other.yaml", "tp2", DENSE)
    reshard(root / "states", "-o", root / "merged.safetensors")
    reshard(root / "states", "-o", root / "theirs.safetensors", "--names", "huggingface")
    provenance_file(root / "theirs.safetensors").unlink()
    return root


@pytest.fixture
def there(made, tmp_path, monkeypatch):
    """A directory with a copy of them, and the names of a source's files."""
    for name, content in files_below(made).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ended(source):
    """Return the message for a changed source; there is no output."""
    names = ("--names", "huggingface") if source == "theirs.safetensors" else ()
    said = " ".join(reshard(source, "--to", "other.yaml", "-o", "made", "--jobs", "1", *names, status=2).split())
    assert "error[PP920]" in said
    assert "help:" in said
    assert not Path("made").exists()
    return said


@pytest.mark.parametrize("source", SOURCES)
def test_between_the_headers_and_the_bytes(there, monkeypatch, source):
    file = max((path for path in there.rglob("*.safetensors") if source in str(path)), key=lambda p: p.stat().st_size)
    begin = carry.write_target

    def cut_first(*arguments):
        os.truncate(file, file.stat().st_size // 2)
        return begin(*arguments)

    monkeypatch.setattr(carry, "write_target", cut_first)
    assert file.name in ended(source)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("fails", ["cut", "disk"])
def test_in_the_middle_of_a_file(there, monkeypatch, source, fails):
    read, num_read = os.preadv, 0

    def failing(handle, buffers, start):
        nonlocal num_read
        num_read += 1
        if num_read == 9 and fails == "disk":
            raise OSError(errno.EIO, "Input/output error")
        if num_read == 9:
            os.truncate(f"/proc/self/fd/{handle}", start)
        return read(handle, buffers, start)

    monkeypatch.setattr(os, "preadv", failing)
    said = ended(source)
    assert num_read >= 9
    assert ("is cut short: it ends before the byte" if fails == "cut" else "Input/output error") in said
    monkeypatch.setattr(os, "preadv", read)
    if fails == "disk":  # and where the disk reads again, the same command makes it
        names = ("--names", "huggingface") if source == "theirs.safetensors" else ()
        reshard(source, "--to", "other.yaml", "-o", "made", *names)


def test_a_file_that_is_gone_when_work_begins(there, monkeypatch):
    gone = next(there.glob("states/*/rank1.safetensors"))
    begin = carry.require_output_path

    def removed(*arguments, **options):
        gone.unlink(missing_ok=True)
        return begin(*arguments, **options)

    monkeypatch.setattr(carry, "require_output_path", removed)
    assert f"{gone.relative_to(there)} cannot be read: No such file or directory" in ended("states")
