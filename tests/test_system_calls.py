"""Calls that differ between systems; calls of Windows as far as Linux can make them."""

import os
import sys

import pytest

from pipeproof import system_calls


@pytest.fixture(params=["linux", "win32"])
def system(request, monkeypatch):
    monkeypatch.setattr(sys, "platform", request.param)
    monkeypatch.setattr(os, "O_BINARY", 0, raising=False)


def test_reading_at_a_position(system, tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(100)))
    handle = system_calls.open_to_read(tmp_path / "file")
    content = bytearray(10)
    assert system_calls.read_at(handle, memoryview(content), 30) == 10
    assert content == bytes(range(30, 40))
    assert system_calls.read_at(handle, memoryview(content), 96) == 4
    assert content == bytes([*range(96, 100), *range(34, 40)])
    assert system_calls.read_at(handle, memoryview(content), 100) == 0
    os.close(handle)


def test_a_lock_is_for_one_handle_until_it_is_closed(tmp_path):
    path = tmp_path / "file"
    with path.open("ab") as first, path.open("ab") as second:
        assert system_calls.lock_file(first.fileno())
        assert not system_calls.lock_file(second.fileno())
        first.close()
        assert system_calls.lock_file(second.fileno())


def test_a_file_and_a_directory_are_synchronized(system, tmp_path, monkeypatch):
    synchronized = []
    monkeypatch.setattr(os, "fsync", lambda handle: synchronized.append(os.fstat(handle).st_ino))
    (tmp_path / "file").touch()
    system_calls.sync(tmp_path / "file")
    assert synchronized == [(tmp_path / "file").stat().st_ino]
    system_calls.sync(tmp_path)
    assert len(synchronized) == (1 if sys.platform == "win32" else 2)
