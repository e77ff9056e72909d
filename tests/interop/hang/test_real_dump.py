"""Dumps that PyTorch itself wrote of ranks that really hang."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeproof.interop.hang.diagnose_hang import diagnose_dumps

SCRIPT = Path(__file__).with_name("hung_ranks.py")


@pytest.mark.needs_torch
def test_a_real_hang_is_explained(tmp_path):
    for form in ("pickle", "json"):
        (tmp_path / form).mkdir()
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100"}
    ranks = [
        subprocess.Popen([sys.executable, str(SCRIPT), str(rank), str(tmp_path)], env=environment) for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    for form in ("pickle", "json"):
        report = diagnose_dumps(tmp_path / form)
        assert [finding.code for finding in report.findings] == ["PP933"]
        assert report.num_pending == 1
    assert diagnose_dumps(tmp_path / "pickle").findings[0].location.file.endswith("hung_ranks.py")
