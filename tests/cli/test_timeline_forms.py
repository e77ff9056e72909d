"""``-o`` writes what its suffix says, and refuses before any work what it cannot write."""

import pytest

from pipeproof.cli.timeline_option import FORMS
from tests.cli.commands import invoke

BEGINS = {
    ".html": b"<!DOCTYPE html>", ".json": b'{"traceEvents":[', ".csv": b"rank,queue,op,kind,",
    ".svg": b"<svg",
}  # fmt: skip


@pytest.mark.parametrize("suffix", [*FORMS, ".CSV"])
def test_each_form_is_written_and_said(suffix, good, tmp_path):
    path = tmp_path / f"timeline{suffix}"
    result = invoke("simulate", good, "-o", path)
    assert result.exit_code == 0, result.stderr
    said = result.stdout.splitlines()[-1]
    assert f"written to {path}" in said
    assert ("; open it in a browser" in said) == (suffix == ".html")
    assert path.read_bytes().startswith(BEGINS[suffix.lower()])


def test_a_table_says_how_many_times_are_rounded(tmp_path, write):
    plan = write(cost={"forward_us": "1/3", "backward_us": 1})
    result = invoke("simulate", plan, "-o", tmp_path / "t.csv")
    assert "times of 41 are not finite decimals" in result.stdout.splitlines()[-1]
    whole = invoke("simulate", write(cost={"forward_us": "1/8", "backward_us": 1}), "-o", tmp_path / "t.csv")
    assert "rounded" not in whole.stdout


@pytest.mark.parametrize("command", ["simulate", "run"])
@pytest.mark.parametrize("name", ["t.gif", "t.png", "t", "csv", "t.perfetto"])
def test_other_endings_are_refused_before_the_work(command, name, good, tmp_path, started):
    result = invoke(command, good, "-o", tmp_path / name)
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    assert "has another ending than .html (a page for a browser), .json (a Chrome trace), .csv" in told
    assert all(suffix in told for suffix in FORMS)
    assert started == []
    assert not (tmp_path / name).exists()
