"""A save killed at any operation on files, in the middle of a write, too: the old states, or the new one whole."""

import shutil
from multiprocessing.connection import wait

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.state.write_state import remove_partial_states
from tests.state.kill.after import require_old_or_new
from tests.state.kill.dying import require_all_bytes_counted, require_renamed_after_sync
from tests.state.kill.processes import Victim, barrier
from tests.state.kill.work import PLANS, save_all, save_rank
from tests.state.tiny import files_below

NEW = "step-00000002"


@pytest.fixture(scope="module", params=["sharded", "experts"])
def begun(request, tmp_path_factory):
    """A plan, a directory with its first state, and the content of the second one, with the log of its making."""
    root = tmp_path_factory.mktemp(request.param)
    save_all(request.param, root / "old", 1, "job")
    old = files_below(root / "old")
    shutil.copytree(root / "old", root / "whole")
    log = Victim(save_all, request.param, root / "whole", 2, "job").wait()
    return request.param, root, old, files_below(root / "whole" / NEW), log


def again(root, at):
    """A directory with the old state alone."""
    shutil.rmtree(at, ignore_errors=True)
    shutil.copytree(root / "old", at)
    return at


def test_all_that_a_save_writes_is_counted_and_is_on_the_disk_before_it_is_named(begun):
    _, root, _, new, log = begun
    assert len(log) > 4 * len(new)
    new_files = root / "whole" / NEW
    require_all_bytes_counted(log, new_files)
    require_renamed_after_sync(log)
    assert [one.to for one in log if one.name == "rename"] == [str(new_files)]


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_a_save_that_is_killed_leaves_the_old_state_or_the_new_one_and_can_be_made_again(begun, data):
    name, root, old, new, log = begun
    at = again(root, root / "killed")
    fatal = data.draw(st.integers(0, len(log) - 1), label="operation")
    fraction = data.draw(st.sampled_from([0.0, 0.01, 0.5, 0.99, 1.0]), label="part of its bytes")
    assert Victim(save_all, name, at, 2, "job", at=fatal, fraction=fraction).wait() is None
    is_there = require_old_or_new(at, old, new, NEW)
    assert is_there == any(one.name == "rename" for one in log[:fatal])
    if is_there:
        return
    job = data.draw(st.sampled_from(["job", "another"]), label="the next run's name")
    if data.draw(st.booleans(), label="the launcher lives and tidies up"):
        remove_partial_states(at, "job")
        assert files_below(at) == old
    Victim(save_all, name, at, 2, job).wait()
    assert require_old_or_new(at, old, new, NEW)


@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_a_rank_that_is_killed_while_all_save_leaves_the_old_state_or_the_new_one(begun, data):
    name, root, old, new, log = begun
    num_ranks = PLANS[name].plan.mesh.num_ranks
    at, together = again(root, root / "ranks"), barrier(num_ranks)
    victim = data.draw(st.integers(0, num_ranks - 1), label="rank")
    fatal = data.draw(st.integers(0, len(log) // num_ranks + 8), label="operation")
    ranks = [
        Victim(save_rank, name, at, rank, 2, together, at=fatal if rank == victim else None, fraction=0.5)
        for rank in range(num_ranks)
    ]
    wait([ranks[victim].sentinel])
    if ranks[victim].wait() is None:
        for rank in ranks:
            rank.kill()  # like a launcher
    for rank in ranks[:victim] + ranks[victim + 1 :]:
        rank.wait_for_end()
    require_old_or_new(at, old, new, NEW)
    remove_partial_states(at, "job")
    shutil.rmtree(at / NEW, ignore_errors=True)
    Victim(save_all, name, at, 2, "another").wait()
    assert require_old_or_new(at, old, new, NEW)
