"""A reshard killed at any operation: source untouched, output absent or whole, and the same command makes it."""

import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.state.inspect_checkpoints import compare_checkpoints
from pipeproof.state.open_checkpoint import open_checkpoint
from pipeproof.state.read_state import find_state
from pipeproof.state.state_codes import StateError
from pipeproof.state.state_index import provenance_file
from tests.state.kill.dying import require_all_bytes_counted, require_renamed_after_sync
from tests.state.kill.processes import Victim
from tests.state.kill.work import command, save_all, write_target
from tests.state.tiny import files_below

STATE, NEW = "step-00000002", "step-00000003"
OUTPUTS = {
    "a state": (NEW, ("--to", "plan.json")),
    "weights alone": ("step-00000000", ("--to", "plan.json", "--weights-only")),
    "one file": ("model.safetensors", ()),
}
"""The output, under the name of a newest state, and its options."""


def words(root, at, out, options, jobs):
    options = [root / word if word.endswith(".json") else word for word in options]
    return "state", "reshard", at / STATE, *options, "-o", at / out, "--jobs", jobs


@pytest.fixture(scope="module", params=OUTPUTS.values(), ids=OUTPUTS)
def made(request, tmp_path_factory):
    """Output, options, the directory of the source, the output of the undisturbed command, and its log."""
    out, options = request.param
    root = tmp_path_factory.mktemp("made")
    save_all("sharded", root / "old", 2, "job")
    write_target(root / "plan.json")
    shutil.copytree(root / "old", root / "whole")
    log = Victim(command, *words(root, root / "whole", out, options, 1)).wait()
    return out, options, root, content(root / "whole" / out), log


def content(path):
    """Files and their bytes, of a merged file with its provenance."""
    if not path.is_file():
        return files_below(path)
    return {file.name: file.read_bytes() for file in (path, provenance_file(path)) if file.exists()}


def again(root):
    shutil.rmtree(root / "killed", ignore_errors=True)
    shutil.copytree(root / "old", root / "killed")
    return root / "killed"


def require_absent_or_whole(at, old, out, right):
    """True if the output is there; no other directory below is taken for a checkpoint."""
    now = files_below(at)
    assert {name: now.get(name) for name in old} == old
    there = (at / out).exists()
    if there:
        assert content(at / out) == right
    assert {path.name for path in at.iterdir()} <= {STATE, out, f".{out}.reshard", provenance_file(at / out).name}
    assert find_state(at).directory.name == max(STATE, out if there and out.startswith("step") else "")
    for path in (at / f".{out}.reshard").rglob("*"):
        if path.is_dir() or path.suffix == ".safetensors":
            try:
                open_checkpoint(path)
            except StateError:
                continue
            found = content(path)
            is_state = path.is_dir() and not out.endswith(".safetensors")  # a merged file is whole by its length
            whole = right if is_state else {name: right[name] for name in found}
            assert found == whole, path
    return there


def test_all_that_a_reshard_writes_is_counted_and_is_on_the_disk_before_it_is_named(made):
    out, _, root, right, log = made
    assert sum(map(len, right.values())) > 1000
    require_all_bytes_counted(log, root / "whole" / out if (root / "whole" / out).is_dir() else root / "whole" / "none")
    require_renamed_after_sync(log)
    assert [one.to for one in log if one.name == "rename"][-1] == str(root / "whole" / out)


@pytest.mark.slow(but=["one file"])
@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_a_reshard_that_is_killed_is_made_by_the_same_command(made, data):
    out, options, root, right, log = made
    at, old = again(root), files_below(root / "old")
    jobs = data.draw(st.sampled_from([1, 2]), label="jobs")
    typed, there = words(root, at, out, options, jobs), False
    for _ in range(data.draw(st.integers(1, 3), label="times")):
        fatal = data.draw(st.integers(0, len(log) - 1), label="operation")
        fraction = data.draw(st.sampled_from([0.0, 0.01, 0.5, 0.99, 1.0]), label="part of its bytes")
        Victim(command, *typed, at=fatal, fraction=fraction).wait()
        there = require_absent_or_whole(at, old, out, right)
        if there:
            return
    assert Victim(command, *typed).wait() is not None
    assert require_absent_or_whole(at, old, out, right)
    assert not (at / f".{out}.reshard").exists()


def test_what_was_made_is_the_source(made):
    out, options, root, *_ = made
    compared = compare_checkpoints(open_checkpoint(root / "old" / STATE), open_checkpoint(root / "whole" / out))
    assert not compared.differ
    assert not compared.only_second
    assert bool(compared.only_first) == ("--weights-only" in options)
