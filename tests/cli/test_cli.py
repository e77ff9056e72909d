"""The commands as a person or a script meets them: exit statuses, streams, and never a traceback."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from pipeproof.cli.code_registry import all_docs
from tests.cli.commands import BROKEN, EXAMPLES, invoke, process, python
from tests.plans import plan_dict

pytestmark = pytest.mark.usefixtures("known_notes")

# --- check ---


def test_check_as_json_is_all_of_stdout(refused):
    result = invoke("check", refused, "--format", "json")
    assert result.exit_code == 1
    content = json.loads(result.stdout)
    assert result.stderr == ""
    assert re.fullmatch(r"[0-9a-f]{64}", content["digest"])
    first = content["findings"][0]
    assert first["code"] == "PP201"
    assert first["severity"] == "error"
    assert first["location"]["file"] == str(refused)
    assert first["location"]["line"] == 1
    assert first["witness"]["kind"] == "ranges"


@pytest.mark.parametrize(("strict", "status"), [((), 0), (("--strict",), 1)])
def test_warnings_fail_a_check_only_where_it_is_strict(tmp_path, strict, status):
    program = tmp_path / "program.txt"
    program.write_text(next(doc.wrong for doc in all_docs() if doc.code == "PP413"))
    result = invoke("check", program, *strict)
    assert result.exit_code == status
    assert "warning[PP413]: " in result.stdout


def test_a_clean_plan_takes_two_lines_and_what_holds_elsewhere_one_more(write):
    named = invoke("check", write(run={"backend": "paddle"}), "--strict")
    assert (named.exit_code, named.stderr) == (0, "")
    verdict, following = named.stdout.splitlines()
    assert verdict.startswith("proved: ")
    assert following.startswith("next: `pipeproof simulate ")
    unnamed = invoke("check", write(), "--strict")
    assert unnamed.exit_code == 0
    note, verdict, _ = unnamed.stdout.splitlines()
    assert note.startswith("note[PP411] ")
    assert "; help: no change is needed for paddle-gloo; elsewhere, set `transport.recv_order` to send_order" in note
    assert verdict.endswith(", with 1 note")
    assert "transport: {recv_order: send_order}" in invoke("--explain", "PP411").stdout


# --- --explain, show, schema, simulate ---


@pytest.mark.parametrize("code", [doc.code for doc in all_docs()])
def test_explain_every_code(code):
    for spelling in (code, code.lower()):
        result = invoke("--explain", spelling)
        assert result.exit_code == 0
        assert result.stdout.startswith(code)
        assert "wrong" in result.stdout
        assert "right" in result.stdout


@pytest.mark.needs("jsonschema")
def test_schema():
    import jsonschema

    result = invoke("--schema")
    assert result.exit_code == 0
    schema = json.loads(result.stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(plan_dict(), schema)


def test_simulate_as_json_is_all_of_stdout(good, tmp_path):
    trace = tmp_path / "trace.json"
    result = invoke("simulate", good, "--format", "json", "-o", trace)
    assert result.exit_code == 0
    assert result.stderr == ""
    content = json.loads(result.stdout)
    assert content["makespan"] == 1500
    assert content["unit"] == "us"
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1]
    assert trace.exists()


# --- the process ---


COLOURED = [
    ("check", EXAMPLES / "gpt_pp2_tp2_sp_partial.yaml"),
    ("check", BROKEN[0]),
    ("simulate", EXAMPLES / "gpt_pp4.yaml"),
    ("show", EXAMPLES / "gpt_pp4.yaml"),
    ("--explain", "PP201"),
]


@pytest.mark.slow(but=["check_gpt_pp2_tp2_sp_partial"])
@pytest.mark.parametrize("arguments", COLOURED, ids=lambda a: f"{a[0]}_{Path(a[1]).stem}")
def test_no_escape_codes_where_nobody_looks(arguments):
    result = process(*arguments)
    assert "\x1b" not in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow(only=["simulate_gpt_pp4_--format_json"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", EXAMPLES / "gpt_pp2_tp2_sp_partial.yaml"),
        ("check", EXAMPLES / "gpt_pp2_tp2_sp_partial.yaml", "--format", "json"),
        ("simulate", EXAMPLES / "gpt_pp4.yaml", "--format", "json"),
        ("show", EXAMPLES / "gpt_pp4.yaml", "--rank", "0"),
        ("--schema",),
    ],
    ids=lambda arguments: "_".join(Path(str(a)).stem for a in arguments),
)
def test_a_reader_that_has_gone(arguments):
    """The pipe's reading end is closed before the command writes its first byte."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = python("-m", "pipeproof", *arguments, stdout=write_end, stderr=subprocess.PIPE)
    os.close(write_end)
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr
    assert result.returncode == 141  # neither errors found nor bad input


def test_an_interrupted_command_ends_with_130(good, monkeypatch):
    def interrupt(path, settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeproof.specs.load_plan.load_plan", interrupt)
    result = invoke("check", good)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr
