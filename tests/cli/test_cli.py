"""The commands as a person or a script meets them: exit statuses, streams, messages, and never a traceback."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import pipeproof
from pipeproof import cli
from pipeproof.explain import all_docs
from tests.plans import plan_dict

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
BROKEN = sorted((REPOSITORY / "tests" / "specs" / "broken").glob("*.yaml"))
CODE = re.compile(r"^PP\d{3}$")


def invoke(*arguments):
    """Run the commands in this process; anything but an exit fails the test."""
    result = CliRunner().invoke(cli.main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result


def process(*arguments, **environment):
    """Run the commands in a process of their own."""
    return subprocess.run(
        [sys.executable, "-m", "pipeproof", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
    )


@pytest.fixture
def write(tmp_path):
    """Write a plan of the given sections; its path."""

    def write_plan(**sections):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(plan_dict(**sections)))
        return path

    return write_plan


@pytest.fixture
def good(write):
    return write()


@pytest.fixture
def refused(write):
    return write(topology={"pp": 2, "tp": 2, "sequence_parallel": True}, transport="partial")


@pytest.fixture
def started(monkeypatch):
    """What was begun of the real work, in order: simulating and running are replaced and do nothing."""
    import pipeproof.exec.command
    import pipeproof.sim.simulate

    begun = []

    def fake(name):
        def begin(*arguments, **keywords):
            begun.append(name)
            raise AssertionError(f"{name} was begun")

        return begin

    monkeypatch.setattr(pipeproof.sim.simulate, "simulate", fake("simulate"))
    monkeypatch.setattr(pipeproof.exec.command, "run_command", fake("run"))
    return begun


# --- check ---


def test_check_of_a_good_plan(good):
    result = invoke("check", good)
    assert result.exit_code == 0
    assert result.stderr == ""


def test_check_of_a_plan_with_errors(refused):
    result = invoke("check", refused)
    assert result.exit_code == 1
    assert "error[PP201]" in result.stdout
    assert f"--> {refused}:1:" in result.stdout


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_check_of_the_examples(name):
    expected = 1 if name in ("gpt_pp2_tp2_sp_partial.yaml", "gpt_pp2_tp2_sp_backward_partial.yaml") else 0
    assert invoke("check", EXAMPLES / name).exit_code == expected


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


def test_check_as_json_of_a_good_plan(good):
    content = json.loads(invoke("check", good, "--format", "json").stdout)
    assert content["findings"] == []


@pytest.mark.parametrize(("strict", "status"), [((), 0), (("--strict",), 1)])
def test_warnings_fail_a_check_only_where_it_is_strict(good, monkeypatch, strict, status):
    """No plan of this release brings a warning, so one is put in."""
    from dataclasses import replace

    from pipeproof.specs.finding import Finding, Severity
    from pipeproof.verify import check

    real = check.check

    def warn(loaded):
        return replace(real(loaded), findings=(Finding("PP999", Severity.WARNING, "look out"),))

    monkeypatch.setattr(check, "check", warn)
    result = invoke("check", good, *strict)
    assert result.exit_code == status
    assert "warning[PP999]: look out" in result.stdout


def test_notes_do_not_fail_a_strict_check(write):
    plan = write(
        model={"seq_length": 3, "hidden_size": 12, "num_heads": 2},
        topology={"pp": 2, "tp": 2},
        schedule={"micro_batch_size": 1},
        transport="partial",
    )
    assert invoke("check", plan, "--strict").exit_code == 0


# --- plans that cannot be read or make no sense ---


def test_there_are_twenty_broken_plans():
    assert len(BROKEN) >= 20


@pytest.mark.parametrize(
    ("command", "path"),
    [*(("check", path) for path in BROKEN), *((c, path) for c in ("simulate", "show", "run") for path in BROKEN[::6])],
    ids=lambda value: value.stem if isinstance(value, Path) else value,
)
def test_a_broken_plan_is_refused_with_its_place(command, path, started):
    result = invoke(command, path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.search(r"^error\[PP\d{3}\]: ", result.stderr, re.MULTILINE)
    assert re.search(rf"^ *--> {re.escape(str(path))}:\d+:\d+$", result.stderr, re.MULTILINE)
    assert started == []


@pytest.mark.parametrize("options", [("check", "--format", "json"), ("simulate", "--json")])
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


def test_a_plan_that_is_not_there(tmp_path):
    result = invoke("check", tmp_path / "no.yaml")
    assert result.exit_code == 2
    assert "no such file" in result.stderr
    assert "no.yaml" in result.stderr


def test_a_plan_that_is_a_directory(tmp_path):
    result = invoke("check", tmp_path)
    assert result.exit_code == 2
    assert f"cannot read `{tmp_path}`: is a directory" in result.stderr


def test_a_plan_that_is_binary(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_bytes(bytes(range(256)) * 4)
    result = invoke("check", path)
    assert result.exit_code == 2
    assert "error[PP10" in result.stderr


@pytest.mark.parametrize("content", ["", "\n\n", "# nothing\n", "---\n"])
def test_a_plan_that_is_empty(tmp_path, content):
    path = tmp_path / "plan.yaml"
    path.write_text(content)
    result = invoke("check", path)
    assert result.exit_code == 2
    assert "error[PP105]" in result.stderr


def test_layers_that_fit_no_stages_are_bad_input(write):
    result = invoke("check", write(model={"num_layers": 1}, topology={"pp": 8}))
    assert result.exit_code == 2
    assert re.search(r"error\[PP\d{3}\]", result.stderr)


# --- explain, show, schema, simulate ---


@pytest.mark.parametrize("code", [doc.code for doc in all_docs()])
def test_explain_every_code(code):
    for spelling in (code, code.lower()):
        result = invoke("explain", spelling)
        assert result.exit_code == 0
        assert result.stdout.startswith(code)
        assert "wrong" in result.stdout
        assert "right" in result.stdout


@pytest.mark.parametrize("code", ["PP000", "x", ""])
def test_explain_an_unknown_code(code):
    result = invoke("explain", code)
    assert result.exit_code == 2
    assert f"no code {code!r}; known are PP100" in result.stderr


def test_show(write):
    result = invoke("show", write(topology={"pp": 2, "tp": 2}), "--rank", 3)
    assert result.exit_code == 0
    assert "embed" in result.stdout
    assert "1F0/0.ALL_REDUCE:tp" in result.stdout
    assert "program of rank 3" in result.stdout


@pytest.mark.parametrize("rank", ["2", "-1", "x"])
def test_show_a_rank_that_is_not_there(good, rank):
    result = invoke("show", good, "--rank", rank)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "--rank" in result.stderr


def test_schema():
    import jsonschema

    result = invoke("schema")
    assert result.exit_code == 0
    schema = json.loads(result.stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(plan_dict(), schema)


def test_simulate(good, tmp_path):
    trace = tmp_path / "trace.json"
    result = invoke("simulate", good, "-o", trace)
    assert result.exit_code == 0
    assert f"trace written to {trace}" in result.stdout
    assert json.loads(trace.read_text())


def test_simulate_as_json_is_all_of_stdout(good, tmp_path):
    trace = tmp_path / "trace.json"
    result = invoke("simulate", good, "--json", "-o", trace)
    assert result.exit_code == 0
    assert result.stderr == ""
    content = json.loads(result.stdout)
    assert content["makespan"] == 1500
    assert content["unit"] == "us"
    assert [rank["rank"] for rank in content["ranks"]] == [0, 1]
    assert trace.exists()


# --- options that cannot be meant ---


@pytest.mark.parametrize(
    ("command", "option"), [("simulate", "-o"), ("run", "--report"), ("run", "-o"), ("run", "--trace")]
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(command, option, good, tmp_path, started):
    for output in (tmp_path / "no" / "such" / "file.json", tmp_path, good / "file.json"):
        result = invoke(command, good, option, output)
        assert result.exit_code == 2
        assert str(output) in result.stderr
        assert "Error: " in result.stderr
        assert result.stdout == ""
    assert started == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json"]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_an_output_in_a_directory_without_permission(good, tmp_path, started):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    result = invoke("run", good, "--report", closed / "report.json")
    assert result.exit_code == 2
    assert "is not writable" in result.stderr
    assert started == []


def test_an_output_that_fails_at_last_is_an_error_without_traceback(good):
    """No look at the path beforehand can tell that nothing can be made below /proc."""
    result = invoke("simulate", good, "-o", "/proc/trace.json")
    assert result.exit_code == 2
    assert "/proc/trace.json" in result.stderr


def test_logs_below_a_file_are_refused_before_the_work(good, started):
    result = invoke("run", good, "--logs", good / "logs")
    assert result.exit_code == 2
    assert str(good / "logs") in result.stderr
    assert started == []


@pytest.mark.parametrize("timeout", ["0", "-1", "0.5", "nan", "soon", "1e400x"])
def test_a_timeout_that_cannot_be_meant(timeout, good, started):
    result = invoke("run", good, f"--timeout={timeout}")
    assert result.exit_code == 2
    assert "--timeout" in result.stderr
    assert started == []


@pytest.mark.parametrize("fault", ["", ":", "1", "1:0F2", "x:0F2:die", "1:0F2:melt", "1::die", "-1:0F2:die", "die"])
def test_a_malformed_fault(fault, good, started):
    result = invoke("run", good, f"--inject={fault}")
    assert result.exit_code == 2
    assert "is not RANK:OP:ACTION" in result.stderr
    assert started == []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("7:0F0:die", "rank 7 of 2 never runs 0F0"),
        ("1:0F0:die", "rank 1 of 2 never runs 0F0"),
        ("0:0F9:die", "rank 0 of 2 never runs 0F9"),
        ("0:nonsense:die", "rank 0 of 2 never runs nonsense"),
        ("0:0SEND_F0:die", "rank 0 of 2 never runs 0SEND_F0 (it only posts it; name the WAIT for it)"),
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
    monkeypatch.setitem(sys.modules, "paddle", None)  # what Python makes of it: no such module
    result = invoke("run", good)
    assert result.exit_code == 2
    assert "error[PP906]" in result.output
    assert "pip install 'pipeproof[cpu]'" in result.output
    assert "processes" not in result.output


def test_the_backend_is_missing_in_a_process_of_its_own(good, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['paddle'] = None\n")
    result = process("run", good, PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert result.returncode == 2
    assert "error[PP906]" in result.stdout
    assert "pip install 'pipeproof[cpu]'" in result.stdout
    assert "Traceback" not in result.stderr


def test_a_refused_plan_is_refused_before_the_backend_is_looked_for(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "paddle", None)
    result = invoke("run", refused)
    assert result.exit_code == 1
    assert "error[PP201]" in result.output
    assert "--unsafe" in result.output
    assert invoke("run", refused, "--unsafe").exit_code == 2


# --- the process ---


def test_version():
    result = process("--version")
    assert result.returncode == 0
    assert result.stdout == f"pipeproof, version {pipeproof.__version__}\n"


@pytest.mark.parametrize("arguments", [("-h",), ("check", "-h"), ("run", "--help")])
def test_help(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("check",), ("check", "a", "b"), ("check", "--format", "xml", "a")]
)
def test_usage_errors(arguments):
    assert invoke(*arguments).exit_code == 2


COLOURED = [
    ("check", EXAMPLES / "gpt_pp2_tp2_sp_partial.yaml"),
    ("check", BROKEN[0]),
    ("simulate", EXAMPLES / "gpt_pp4.yaml"),
    ("show", EXAMPLES / "gpt_pp4.yaml"),
    ("explain", "PP201"),
]


@pytest.mark.parametrize("arguments", COLOURED, ids=lambda a: f"{a[0]}_{Path(a[1]).stem}")
def test_no_escape_codes_where_nobody_looks(arguments):
    result = process(*arguments)
    assert "\x1b" not in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_colours_where_they_are_wanted_and_not_where_they_are_refused():
    arguments = ("check", EXAMPLES / "gpt_pp2_tp2_sp_partial.yaml")
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7]")
    assert colour.search(process(*arguments, FORCE_COLOR="1", TERM="xterm").stdout)
    assert not colour.search(process(*arguments, FORCE_COLOR="1", NO_COLOR="1", TERM="xterm").stdout)


@pytest.mark.parametrize("arguments", COLOURED, ids=lambda a: f"{a[0]}_{Path(a[1]).stem}")
def test_a_terminal_that_knows_ascii_only(arguments):
    result = process(*arguments, PYTHONIOENCODING="ascii")
    assert "Traceback" not in result.stderr
    assert result.returncode in (0, 1, 2)
    assert result.stdout + result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", EXAMPLES / "gpt_pp2_tp2_sp_partial.yaml"),
        ("check", EXAMPLES / "gpt_pp2_tp2_sp_partial.yaml", "--format", "json"),
        ("simulate", EXAMPLES / "gpt_pp4.yaml", "--json"),
        ("show", EXAMPLES / "gpt_pp4.yaml", "--rank", "0"),
        ("schema",),
    ],
    ids=lambda arguments: "_".join(Path(str(a)).stem for a in arguments),
)
def test_a_reader_that_has_gone(arguments):
    """The pipe's reading end is closed before the command writes its first byte."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run(
        [sys.executable, "-m", "pipeproof", *map(str, arguments)],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    os.close(write_end)
    assert "Traceback" not in result.stderr
    assert "BrokenPipe" not in result.stderr


def test_an_interrupted_command_ends_with_130(good, monkeypatch):
    def interrupt(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load", interrupt)
    result = invoke("check", good)
    assert result.exit_code == 130
    assert "interrupted" in result.stderr


def test_check_imports_no_framework_and_nothing_heavy():
    script = (
        "import sys\nfrom click.testing import CliRunner\nfrom pipeproof.cli import main\n"
        f"result = CliRunner().invoke(main, ['check', {str(EXAMPLES / 'gpt_pp4.yaml')!r}])\n"
        "assert result.exit_code == 0, result.output\n"
        "heavy = ('paddle', 'torch', 'simpy', 'networkx', 'pipeproof.exec.run')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert result.stdout == "[]\n"
