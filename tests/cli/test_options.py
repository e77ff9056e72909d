"""Options that cannot be meant, and backends that are not there: refused before any work is done."""

import sys

import pytest

from tests.cli.commands import invoke


@pytest.mark.parametrize(
    ("command", "option"), [("simulate", "-o"), ("run", "--report"), ("run", "-o"), ("run", "--output")]
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(command, option, good, tmp_path, started):
    for output in (tmp_path / "no" / "such" / "file.json", tmp_path, good / "file.json"):
        result = invoke(command, good, option, output)
        assert result.exit_code == 2
        assert str(output) in result.stderr
        assert "error: " in result.stderr
        assert result.stdout == ""
    assert started == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"]


def test_an_output_that_fails_at_last_is_an_error_without_traceback(good):
    """No look at the path beforehand can tell that nothing can be made below /proc."""
    result = invoke("simulate", good, "-o", "/proc/trace.json")
    assert result.exit_code == 2
    assert "/proc/trace.json" in result.stderr


@pytest.mark.parametrize("who", ["run", "reference"])
def test_a_record_is_never_written_over(who, tmp_path, good, started):
    (tmp_path / "out" / who).mkdir(parents=True)
    (tmp_path / "out" / who / "record.jsonl").write_text("old")
    result = invoke("run", good, "--record", tmp_path / "out")
    assert result.exit_code == 2
    assert "holds a record already: name another directory, or remove it" in " ".join(result.stderr.split())
    assert started == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("7:0F0:die", "rank 7 of 2 never runs 0F0"),
        ("1:0F0:die", "rank 1 of 2 never runs 0F0"),
        ("0:0F9:die", "rank 0 of 2 never runs 0F9"),
        ("0:nonsense:die", "rank 0 of 2 never runs nonsense"),
        ("0:0SEND_F0:die", "rank 0 of 2 never runs 0SEND_F0"),
    ],
)
def test_a_fault_that_would_never_strike(fault, message, good, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # as if every backend were installed
    result = invoke("run", good, "--inject", fault)
    assert result.exit_code == 2
    assert message in result.output
    assert "0:0F0:die" in result.output
    assert "processes" not in result.output


def test_the_backend_is_missing(good, monkeypatch):
    monkeypatch.setitem(sys.modules, "paddle", None)  # for Python: no such module
    result = invoke("run", good)
    assert result.exit_code == 2
    assert "error[PP906]" in result.output
    assert "pip install 'pipeproof[cpu]'" in result.output
    assert "processes" not in result.output
