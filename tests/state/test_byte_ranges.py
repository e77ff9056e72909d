"""Regions read of files against numpy's slices: any their strides, however little one read gives or may take."""

import errno
import os
from math import prod
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.state import byte_ranges as ranges
from pipeproof.state.byte_ranges import ByteRange, RangeReader, read_file
from pipeproof.state.regions import Region, whole_region
from pipeproof.state.state_codes import StateError
from tests.state.runs import plan_of
from tests.state.tiny import write_state

START = 3
"""Arrays do not stand where their elements would have to in memory."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("ranges")


@st.composite
def regions(draw):
    """An array's extents, and a region of it."""
    extents = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    starts = [draw(st.integers(0, size - 1)) for size in extents]
    stops = [draw(st.integers(start + 1, size)) for start, size in zip(starts, extents, strict=True)]
    return extents, Region(tuple(starts), tuple(stop - start for start, stop in zip(starts, stops, strict=True)))


class Calls:
    """Sizes of the requests to ``os.preadv``, which returns at most ``gives`` bytes for each."""

    def __init__(self, patch, gives):
        self._real, self._gives, self.sizes = os.preadv, gives, []
        patch.setattr(os, "preadv", self._call)

    def _call(self, handle, buffers, start):
        (buffer,) = buffers
        self.sizes.append(len(buffer))
        return self._real(handle, [buffer[: self._gives]], start)


@settings(deadline=None, max_examples=60)
@given(
    at=regions(), dtype=st.sampled_from(["<u1", "<u4", "<u8"]), scratch_bytes=st.sampled_from([8, 40, 4096]),
    gap=st.sampled_from([0, 8, 64]), gives=st.sampled_from([1, 7, 10**6]), transposed=st.booleans(),
    changed=st.booleans(),
)  # fmt: skip
def test_a_region_is_numpys_slice(root, at, dtype, scratch_bytes, gap, gives, transposed, changed):
    extents, region = at
    array = np.arange(1, prod(extents) + 1).astype(dtype).reshape(extents)
    (root / "file").write_bytes(b"x" * START + array.tobytes())
    out = np.zeros(region.extents[::-1] if transposed else region.extents, np.int64 if changed else dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranges, "_GAP", gap)
        calls = Calls(patch, gives)
        with RangeReader("mend", scratch_bytes) as reader:
            of_file = ByteRange(root / "file", START, whole_region(extents), array.dtype)
            change = (lambda found: -found.astype(np.int64)) if changed else None
            reader.read_region(of_file, region, out.T if transposed else out, change)
    expected = array[region.slices]
    np.testing.assert_array_equal(out.T if transposed else out, -expected.astype(np.int64) if changed else expected)
    if out.size < array.size and gap == 0:
        assert gives < max(calls.sizes) or sum(calls.sizes) == expected.nbytes  # nothing that was not asked for
    if transposed and not out.T.flags.c_contiguous:
        assert max(calls.sizes) <= scratch_bytes


def test_what_lies_between_is_read_along_only_where_it_is_little(root, monkeypatch):
    array = np.arange(2**20, dtype="<u4").reshape(8, 2, 2**16)
    (root / "rows").write_bytes(array.tobytes())
    calls = Calls(monkeypatch, 2**30)
    with RangeReader("mend") as reader:
        for columns, expected in ((2**16 - 8, [2**20] * 4), (16, [64] * 16)):
            calls.sizes.clear()
            out = np.zeros((8, 2, columns), "<u4")
            reader.read_region(
                ByteRange(root / "rows", 0, whole_region(array.shape), array.dtype), Region((0, 0, 8), out.shape), out
            )
            np.testing.assert_array_equal(out, array[:, :, 8 : 8 + columns])
            assert calls.sizes == expected


@settings(deadline=None, max_examples=30)
@given(
    scratch_bytes=st.sampled_from([64, 256, 2**20]),
    num_arrays=st.integers(1, 2),
    width=st.integers(2, 9),
    data=st.data(),
)
def test_regions_that_lie_between_each_other_are_each_their_own(root, scratch_bytes, num_arrays, width, data):
    arrays = [np.arange(6 * width, dtype="<u2").reshape(6, width) + 1000 * number for number in range(num_arrays)]
    (root / "fused").write_bytes(b"x" * START + b"".join(array.tobytes() for array in arrays))
    with RangeReader("mend", scratch_bytes) as reader:
        for _ in range(data.draw(st.integers(2, 8))):
            number, first = data.draw(st.integers(0, num_arrays - 1)), data.draw(st.integers(0, width - 1))
            region = Region((data.draw(st.integers(0, 3)), first), (3, data.draw(st.integers(1, width - first))))
            out = np.zeros(region.extents, "<u2")
            start = START + number * arrays[0].nbytes
            reader.read_region(ByteRange(root / "fused", start, whole_region((6, width)), out.dtype), region, out)
            np.testing.assert_array_equal(out, arrays[number][region.slices])


def test_regions_that_lie_between_each_other_are_read_once(root, monkeypatch):
    array = np.arange(64 * 12, dtype="<u4").reshape(64, 12)
    (root / "fused").write_bytes(array.tobytes())
    calls = Calls(monkeypatch, 2**30)
    with RangeReader("mend") as reader:
        for first in range(0, 12, 2):
            out = np.zeros((64, 2), "<u4")
            reader.read_region(
                ByteRange(root / "fused", 0, whole_region((64, 12)), array.dtype), Region((0, first), (64, 2)), out
            )
            np.testing.assert_array_equal(out, array[:, first : first + 2])
    assert calls.sizes == [array.nbytes]


def num_open():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_as_many_files_as_there_may_be_are_open_and_none_behind_the_end(root, monkeypatch):
    monkeypatch.setattr(ranges, "_MAX_OPEN", 2)
    before, content, opened = num_open(), np.empty(2, np.uint8), []
    with RangeReader("mend") as reader:
        for number in (0, 1, 2, 0, 0, 3, 1):
            file = root / f"file{number}"
            file.write_bytes(bytes([number, 9, number]))
            reader.read(file, 1, content)
            assert content.tolist() == [9, number]
            opened.append(num_open() - before)
    assert opened == [1, 2, 2, 2, 2, 2, 2]
    assert num_open() == before


def test_what_cannot_be_read_is_named(root, monkeypatch):
    (root / "short").write_bytes(b"abc")
    with RangeReader("copy it") as reader:
        with pytest.raises(StateError, match=r"short is cut short: it ends before the byte 6") as caught:
            reader.read(root / "short", 2, np.empty(4, np.uint8))
        assert caught.value.findings[0].help == "copy it"
        with pytest.raises(StateError, match=r"gone cannot be read: No such file or directory"):
            reader.read(root / "gone", 0, np.empty(1, np.uint8))

        def refused(*_):
            raise OSError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "preadv", refused)
        with pytest.raises(StateError, match=r"short cannot be read: Permission denied") as caught:
            reader.read(root / "short", 0, np.empty(1, np.uint8))
        assert caught.value.findings[0].help == "give this user permission to read it"


def test_a_file_that_shrinks_behind_its_header_is_refused(tmp_path, monkeypatch):
    file = write_state(plan_of(), tmp_path) / "rank1.safetensors"
    size = file.stat().st_size

    def preadv(handle, buffers, start, real=os.preadv):
        os.truncate(file, size - 1)
        return real(handle, buffers, start)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(StateError, match=rf"rank1.safetensors is cut short: it ends before the byte {size}"):
        read_file(file)
