"""Invariants of a directory of states after any failure of a writer."""

from pipeproof.state.open_checkpoint import file_findings, open_checkpoint
from pipeproof.state.read_state import find_state
from pipeproof.state.state_codes import StateError
from tests.state.tiny import files_below


def require_old_or_new(root, old, new, name):
    """The old states as they were; the new one, called ``name``, absent or whole; whether it is there.

    ``old`` and ``new`` are files and bytes: below ``root`` before, and as an undisturbed process makes them.
    """
    now = files_below(root)
    assert {path: now.get(path) for path in old} == old
    there = (root / name).exists()
    if there:
        assert files_below(root / name) == new
        assert not file_findings(root / name)
    finished = {path.split("/")[0] for path in old} | ({name} if there else set())
    for path in root.iterdir():
        if path.name not in finished:
            assert path.name.startswith("."), path
            require_not_taken(path, new)
    assert find_state(root).directory.name == max(finished)
    return there


def require_not_taken(unfinished, new):
    """Nobody opens it, even by its hidden name, but where nothing is missing any more but the last name."""
    try:
        open_checkpoint(unfinished)
    except StateError:
        return
    now = files_below(unfinished)
    assert {path: now.get(path) for path in new} == new
