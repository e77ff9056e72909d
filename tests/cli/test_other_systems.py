"""Windows and macOS, by taking away what they lack: all but the commands that start ranks works as on Linux."""

import json
import re

import pytest

from tests.cli.commands import REPOSITORY, python
from tests.cli.other_system import COMMANDS, LAUNCHED
from tests.cli.test_help import COMMANDS as ALL_COMMANDS


def test_every_command_is_tried():
    assert {" ".join(words) for words in ALL_COMMANDS} == COMMANDS.keys()


@pytest.mark.needs_paddle
@pytest.mark.slow
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_commands_work_as_on_linux_and_those_that_start_ranks_refuse(system, tmp_path):
    words = ("-m", "tests.cli.other_system", system, tmp_path)
    done = python(*words, cwd=REPOSITORY, timeout=300, environment={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["unimportable"] == {}
    here, there = found["here"], found["there"]
    assert {words: without_times(there[words]) for words in here} == {
        words: without_times(here[words]) for words in here
    }
    assert {words for words in here if here[words][0] not in (0, 1)} <= {"import profile"}
    for words in LAUNCHED:
        status, output = there[words]
        assert status == 2, output
        assert f"on Linux, and this system is {system}" in output


def without_times(outcome):
    """A status and an output without seconds and the name of the directory."""
    status, output = outcome
    return status, re.sub(r"\d+\.\d+ s\b|before|after", "", output)
