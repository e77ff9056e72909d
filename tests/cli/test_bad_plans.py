"""Plans that cannot be read or make no sense: every command refuses them with their place, status 2."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.commands import BROKEN, REPOSITORY, invoke

CODE = re.compile(r"^PP\d{3}$")


def test_there_are_twenty_broken_plans():
    assert len(BROKEN) >= 20


@pytest.mark.parametrize(
    ("command", "path"),
    [*(("check", path) for path in BROKEN), *((c, path) for c in ("simulate", "show", "run") for path in BROKEN[::6])],
    ids=lambda value: value.stem if isinstance(value, Path) else value,
)
def test_a_broken_plan_is_refused_with_its_place(command, path, started, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    result = invoke(command, path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.search(r"^error\[PP\d{3}\]: ", result.stderr, re.MULTILINE)
    shown = re.escape(str(path.relative_to(REPOSITORY)))  # from where one stands, however it was given
    assert re.search(rf"^ *--> {shown}:\d+:\d+$", result.stderr, re.MULTILINE)
    assert started == []


@pytest.mark.parametrize("options", [("check", "--format", "json"), ("simulate", "--format", "json")])
@pytest.mark.parametrize("path", BROKEN[::5], ids=lambda path: path.stem)
def test_a_broken_plan_as_json(options, path):
    command, *rest = options
    result = invoke(command, path, *rest)
    assert result.exit_code == 2
    assert result.stderr == ""
    content = json.loads(result.stdout)
    assert content["digest"] is None
    assert content["findings"]
    for finding in content["findings"]:
        assert CODE.match(finding["code"])
        assert finding["location"]["line"] >= 1


@pytest.mark.parametrize(
    ("content", "code"),
    [(bytes(range(256)) * 4, "PP10"), *((text, "PP105") for text in (b"", b"\n\n", b"# nothing\n", b"---\n"))],
)
def test_a_plan_that_is_binary_or_empty(tmp_path, content, code):
    path = tmp_path / "plan.yaml"
    path.write_bytes(content)
    result = invoke("check", path)
    assert result.exit_code == 2
    assert f"error[{code}" in result.stderr
