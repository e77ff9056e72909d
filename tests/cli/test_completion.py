"""What shells are offered, as click hands it to them, and by a real bash."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from click.shell_completion import ShellComplete

from pipeproof.cli.code_registry import all_docs
from pipeproof.cli.main import main
from pipeproof.schedule.kinds import SCHEDULE_KINDS
from tests.cli.commands import REPOSITORY, invoke
from tests.plans import plan_dict


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("plan.yaml", "plain.txt", "planned.JSON", ".hidden.yaml", "plans/a.yml", "plans/notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(plan_dict()))
    return tmp_path


def offered(*words):
    """The values that are offered for the last of the words, and the kinds of those that the shell looks up."""
    *before, last = words
    items = ShellComplete(main, {}, "pipeproof", "_PIPEPROOF_COMPLETE").get_completions(list(before), last)
    return [item.value if item.type == "plain" else f"<{item.type}>" for item in items]


def test_conventions_of_names():
    assert offered("state", "reshard", "states", "--names", "pa") == [
        "paddleformers",
        "paddleformers-unfused",
        "paddlefleet",
    ]


def test_commands_and_options():
    assert offered("ch") == ["check"]
    assert offered("schedule", "s") == ["show", "solve"]
    assert offered("check", "--format", "s") == ["sarif"]


@pytest.mark.parametrize("words", [("check",), ("simulate",), ("run",), ("sweep",), ("schedule", "solve")])
def test_plans_and_the_directories_on_the_way(folder, words):
    assert offered(*words, "") == ["<dir>", "plan.yaml", "planned.JSON"]
    assert offered(*words, "plan") == ["<dir>", "plan.yaml", "planned.JSON"]
    assert offered(*words, "plan.") == ["plan.yaml"]
    assert offered(*words, "plans/") == ["plans/a.yml"]
    assert offered(*words, "./plans/") == ["./plans/a.yml"]
    assert offered(*words, ".h") == [".hidden.yaml"]
    assert offered(*words, "no/where/") == []


def test_files_of_other_tools_and_home_are_left_to_the_shell(folder):
    assert offered("check", "--from", "megatron", "pl") == ["<file>"]
    assert offered("check", "~/") == ["<file>"]


def test_codes_schedules_and_kinds():
    assert offered("--explain", "pp20") == [doc.code for doc in all_docs() if doc.code.startswith("PP20")]
    assert offered("schedule", "show", "zb") == [name for name in SCHEDULE_KINDS if name.startswith("zb")]
    assert "fleet" in offered("check", "--from", "f")
    assert "megatron" in offered("import", "m")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_scripts_ask_us_with_the_variable_that_we_look_for(shell):
    result = invoke("--completion", shell)
    assert result.exit_code == 0
    assert f"_PIPEPROOF_COMPLETE={shell}_complete" in result.stdout


def test_a_shell_that_we_do_not_know():
    result = invoke("--completion", "tcsh")
    assert result.exit_code == 2
    assert "'bash', 'zsh', 'fish'" in result.stderr


ASK = """
eval "$(pipeproof --completion bash)"
COMP_WORDS=({words}) COMP_CWORD={last}
{function} pipeproof 2>/dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash on this machine")
def test_a_real_bash_completes(folder):
    """The script is loaded by bash, and its function fills what bash offers."""
    command = folder / "bin" / "pipeproof"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m pipeproof "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
    script = invoke("--completion", "bash").stdout
    function = script.split("complete -o nosort -F ")[1].split()[0]

    def ask(*words):
        quoted = " ".join(f"'{word}'" for word in words)
        text = ASK.format(words=quoted, last=len(words) - 1, function=function)
        done = subprocess.run(
            ["bash", "--norc", "-c", text], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.split()

    assert ask("pipeproof", "sche") == ["schedule"]
    assert ask("pipeproof", "check", "plan.") == ["plan.yaml"]
    assert ask("pipeproof", "--explain", "PP20") == [doc.code for doc in all_docs() if doc.code.startswith("PP20")]
