"""Pipelines that are not closed keep no process group alive: a thread of gloo at the exit may abort the process."""

import sys

import pytest

from tests.train.launch import run

pytestmark = pytest.mark.needs_torch


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_no_thread_of_gloo_is_left_when_the_script_destroys_its_groups(tmp_path):
    output = run("ended_groups.py", 2, tmp_path).stdout
    assert output.count("has no thread of gloo") == 2
