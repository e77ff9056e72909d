"""Dumps that PyTorch wrote of a real hang on NCCL."""

from pathlib import Path

from pipeproof.interop.hang.diagnose_hang import diagnose_dumps

DUMPS = Path(__file__).parents[2] / "goldens" / "hang"


def test_a_rank_that_took_another_branch_is_named():
    report = diagnose_dumps(DUMPS / "missing")
    (found,) = report.findings
    assert found.code == "PP933"
    assert "rank 1 never issued its part of all_reduce #2 of group 0 (default_pg)" in found.message
    assert (found.location.file, found.location.line) == ("/home/user/job/hang.py", 45)
    assert report.num_pending == 1
