"""A load that ends at any point, by an error of the disk or by its end: all of a rank's values come, or none is set."""

import errno
import io
import os
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.exec.rank.checkpointing import restore_state
from pipeproof.state.read_state import find_state, read_whole
from pipeproof.state.state_codes import StateError
from tests.state.kill.work import PLANS, save_all
from tests.state.runs import plan_of
from tests.state.tiny import files_below, part_of_rank, values

OTHER = plan_of(
    steps=9,
    topology={"tp": 2},
    schedule={"num_micro_batches": 8},
    model={"num_layers": 2, "vocab_size": 8, "tied_embedding": True},
)
"""A plan of another topology that can resume a state of `sharded`."""
PLANS_THAT_LOAD = {"the plan that saved it": PLANS["sharded"].plan, "another topology": OTHER.plan}


class Rank:
    """Holds the values put into it, like an adapter."""

    def __init__(self):
        self.held = None

    def restore_state(self, state):
        self.held = dict(state)


class Arrays:
    def from_bytes(self, content, shape, dtype):
        return dtype, shape, content.tobytes()


class BadDisk:
    """The k-th read of a file gives an error, or as if the file had ended there."""

    def __init__(self, at, ends):
        self.at, self.ends, self.num_reads = at, ends, 0

    def read(self, real, nothing):
        def reading(*arguments):
            self.num_reads += 1
            if self.num_reads - 1 != self.at:
                return real(*arguments)
            if self.ends:
                return nothing
            raise OSError(errno.EIO, "Input/output error")

        return reading

    def install(self, patch):
        for name, nothing in (("read", b""), ("pread", b""), ("readv", 0), ("preadv", 0)):
            patch.setattr(os, name, self.read(getattr(os, name), nothing))
        patch.setattr(os, "open", self.read(os.open, os.open("/dev/null", os.O_RDONLY)))
        real, disk = io.open, self

        def opened(file, mode="r", *more, **options):
            return _Reading(disk.read(real, io.BytesIO())(file, mode, *more, **options), disk)

        patch.setattr(io, "open", opened)


class _Reading:
    def __init__(self, stream, disk):
        self._stream = stream
        self.read = disk.read(stream.read, b"")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._stream.close()

    def __getattr__(self, name):
        return getattr(self._stream, name)


def refusal_of(work, *arguments):
    try:
        work(*arguments)
    except StateError as error:
        return str(error)
    return None


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved")
    save_all("sharded", root, 2, "job")
    return find_state(root)


@pytest.mark.parametrize("plan", PLANS_THAT_LOAD.values(), ids=PLANS_THAT_LOAD)
def test_a_load_that_fails_anywhere_sets_nothing_and_says_the_file(saved, plan):
    before = files_below(saved.directory)
    num_failed = 0
    for rank in (0, plan.mesh.num_ranks - 1):
        right = {
            key: (one.dtype, one.shape, one.content.tobytes())
            for key, one in part_of_rank(plan, rank, values(plan, 2)).items()
        }
        for ends in (False, True):
            at, came = 0, False
            while not came:
                held, disk = Rank(), BadDisk(at, ends)
                with pytest.MonkeyPatch.context() as patch:
                    disk.install(patch)
                    refusal = refusal_of(restore_state, held, Arrays(), plan, rank, saved.directory)
                came = refusal is None
                assert came == (disk.num_reads <= at)
                assert held.held == (right if came else None)
                assert came or str(saved.directory) in refusal
                num_failed += not came
                at += 1
    assert num_failed > 20
    assert files_below(saved.directory) == before


@settings(deadline=None, max_examples=20)
@given(at=st.integers(0, 12), ends=st.booleans())
def test_whole_tensors_come_all_or_none(saved, at, ends):
    disk, whole = BadDisk(at, ends), {}
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch)
        refusal = refusal_of(lambda: whole.update(read_whole(saved)))
    assert (refusal is not None) == (disk.num_reads > at)
    assert refusal is None or str(saved.directory) in refusal
    right = {} if refusal else {name: array.tobytes() for name, array in values(PLANS["sharded"].plan, 2).items()}
    assert {name: one.content.tobytes() for name, one in whole.items()} == right


@pytest.mark.parametrize("gone", ["one file", "the directory", "the index"])
def test_a_state_that_is_removed_while_ranks_begin_is_not_loaded_in_shard(saved, tmp_path, gone):
    at = tmp_path / "step-00000002"
    shutil.copytree(saved.directory, at)
    match gone:
        case "one file":
            (at / "rank1.safetensors").unlink()
        case "the directory":
            shutil.rmtree(at)
        case "the index":
            (at / "index.json").unlink()
    plan, failed = PLANS["sharded"].plan, 0
    for number in range(plan.mesh.num_ranks):
        rank = Rank()
        refusal = refusal_of(restore_state, rank, Arrays(), plan, number, at)
        failed += refusal is not None
        assert (rank.held is None) == (refusal is not None)
    assert failed >= 1
