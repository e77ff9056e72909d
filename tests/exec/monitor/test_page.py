"""The page "My job hangs", followed while a job hangs: every command for rings as it is written."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from pipeproof.exec.monitor.follow import Follower, follow
from tests.cli.commands import invoke
from tests.exec.monitor.hang_jobs import ROOT, running

PAGE = (ROOT / "docs" / "my-job-hangs.md").read_text(encoding="utf-8").partition("\n## Hangs: ")[0]


def console_commands():
    blocks = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.needs_torch
@pytest.mark.slow
def test_the_commands_are_typed_while_a_job_hangs(tmp_path):
    hook = tmp_path / "page-me.sh"
    hook.write_text('#!/bin/sh\necho "$PIPEPROOF_KIND of rank $PIPEPROOF_CAUSES" > paged\n')
    hook.chmod(0o755)
    commands = console_commands()
    assert len(commands) == 2
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with running("data_loader_stuck", tmp_path / "pipeproof-rings"):
        assert follow(Follower(tmp_path / "pipeproof-rings").look, report=lambda *_: None, timeout_s=300) is not None
        for command in commands:
            done = subprocess.run(
                [sys.executable, "-m", *shlex.split(command)], cwd=tmp_path, env=environment, capture_output=True,
                text=True, timeout=120, check=False,
            )  # fmt: skip
            assert done.returncode == 1, done.stderr
            assert "\ncause: rank 1\n" in done.stdout
            assert "error[PP933]: rank 1 never issued its part of" in done.stdout
            assert re.search(
                r"rank 1 has been outside of communication for [\d.]+ s, in .*:\d+ next_batch", done.stdout
            )
    assert (tmp_path / "paged").read_text() == "absent of rank 1\n"


def test_the_options_of_the_page_exist():
    """`tests/docs/test_pages.py` types whole commands; options also come alone."""
    helps = {name: invoke(*name.split(), "--help").stdout for name in ("job hang", "run")}
    named = set(re.findall(r"`(--[a-z-]+)", PAGE))
    assert {"--stacks", "--watch"} <= named
    for option in named:
        assert f" {option} " in helps["run" if option == "--watch" else "job hang"], option
