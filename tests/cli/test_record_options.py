"""What ``run --record`` refuses before anything runs."""

import pytest

from tests.cli.commands import invoke


@pytest.mark.parametrize("who", ["run", "reference"])
def test_a_record_is_never_written_over(who, tmp_path, good, started):
    (tmp_path / "out" / who).mkdir(parents=True)
    (tmp_path / "out" / who / "record.jsonl").write_text("old")
    result = invoke("run", good, "--record", tmp_path / "out")
    assert result.exit_code == 2
    assert "holds a record already: name another directory, or remove it" in " ".join(result.stderr.split())
    assert started == []


def test_a_directory_that_cannot_be_made(tmp_path, good, started):
    (tmp_path / "file").write_text("")
    result = invoke("run", good, "--record", tmp_path / "file" / "out")
    assert result.exit_code == 2
    assert started == []


@pytest.mark.parametrize("option", ["--record-layers", "--record-values"])
def test_options_that_need_a_directory(option, good, started):
    result = invoke("run", good, option)
    assert result.exit_code == 2
    assert "need --record DIR" in result.stderr
    assert started == []
