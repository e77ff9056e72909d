"""``-o`` writes the format of its suffix, and refuses other suffixes before any work."""

import pytest

from pipeproof.cli.timeline_option import FORMS
from tests.cli.commands import invoke

BEGINS = {".html": b"<!DOCTYPE html>", ".json": b'{"traceEvents":[', ".svg": b"<svg"}


@pytest.mark.parametrize("suffix", [*FORMS, ".SVG"])
def test_each_form_is_written_and_said(suffix, good, tmp_path):
    path = tmp_path / f"timeline{suffix}"
    result = invoke("simulate", good, "-o", path)
    assert result.exit_code == 0, result.stderr
    said = result.stdout.splitlines()[-1]
    assert f"written to {path}" in said
    assert ("; open it in a browser" in said) == (suffix == ".html")
    assert path.read_bytes().startswith(BEGINS[suffix.lower()])


@pytest.mark.parametrize("command", ["simulate", "run"])
@pytest.mark.parametrize("name", ["t.gif", "t.png", "t", "csv", "t.perfetto"])
def test_other_endings_are_refused_before_the_work(command, name, good, tmp_path, started):
    result = invoke(command, good, "-o", tmp_path / name)
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    assert "has another ending than .html (a page for a browser), .json (a Chrome trace), .svg" in told
    assert all(suffix in told for suffix in FORMS)
    assert started == []
    assert not (tmp_path / name).exists()
