"""The CI files in docs/checking.md for other teams: read as their CI reads them, and carried out."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeproof.cli.main import main
from pipeproof.exit_status import ExitStatus
from tests.plans import plan_dict

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "checking.md").read_text()
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
PRE_COMMIT, LOCAL = (block for block in BLOCKS if "repos" in block)
(WORKFLOW,) = (block for block in BLOCKS if "jobs" in block)
(GITLAB,) = (block for block in BLOCKS if "plans" in block)
(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
INSTALL, CHECK, UPLOAD = ACTION["runs"]["steps"]

RIGHT = {"topology": {"tp": 2, "sequence_parallel": True}, "schedule": {"kind": "gpipe"}}
WRONG = {**RIGHT, "transport": "partial"}


@pytest.fixture
def project(tmp_path):
    """Another team's project: plans in `plans/`, and a pipeproof that is installed somewhere on the path."""
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / "right.yaml").write_text(json.dumps(plan_dict(**RIGHT)))
    command = tmp_path / "runner" / "pipeproof" / "bin" / "pipeproof"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m pipeproof "$@"\n')
    command.chmod(0o755)
    return tmp_path


def bash(script, project, **environment):
    path = f"{project / 'runner' / 'pipeproof' / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script], cwd=project, capture_output=True, text=True,
        timeout=150, check=False, env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


def add_wrong(project):
    (project / "plans" / "wrong.yaml").write_text(json.dumps(plan_dict(**WRONG)))


# --- pre-commit ---


def test_the_hook_takes_plans_and_leaves_other_files_alone():
    picks = re.compile(HOOK["files"]).search
    assert all(map(picks, ("plan.yaml", "a/plans/big.yml", "plans/x.json", "train/moe_plan.yaml", "moe.plan.json")))
    assert not any(
        map(picks, ("planning.yaml", "plans/README.md", "a/plan.py", "plans/old/x.yaml", "airplanes/a.yaml"))
    )
    assert (HOOK["language"], HOOK["require_serial"]) == ("python", True)


def test_the_configuration_names_the_hook_and_its_arguments_can_be_typed(project):
    (hook,) = PRE_COMMIT["repos"][0]["hooks"]
    assert hook["id"] == HOOK["id"]
    _, name = HOOK["entry"].split()
    main.commands[name].make_context(name, [*hook["args"], "plans/right.yaml"])
    for text in re.findall(r"args: (\[--from.*?\])", PAGE):
        main.commands[name].make_context(name, [*yaml.safe_load(text), "train/pretrain.sh"])


def test_what_the_hook_runs_passes_and_fails(project):
    (hook,) = PRE_COMMIT["repos"][0]["hooks"]
    line = " ".join([HOOK["entry"], *hook["args"], "plans/*.yaml"])
    assert bash(line, project).returncode == 0
    add_wrong(project)
    failed = bash(line, project)
    assert failed.returncode == 1
    assert "error[PP201]" in failed.stdout


# --- GitHub ---


def with_inputs(project, **given):
    """Run the action's step as a runner does, with its inputs where nothing is given."""
    values = {name: str(about.get("default", "")) for name, about in ACTION["inputs"].items()} | given
    environment = {
        variable: values[re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", text).group(1)]
        for variable, text in CHECK["env"].items()
    }
    output = project / "output"
    output.write_text("")
    done = bash(CHECK["run"], project, RUNNER_TEMP=str(project / "runner"), GITHUB_OUTPUT=str(output), **environment)
    return done, dict(line.split("=", 1) for line in output.read_text().splitlines())


def test_the_workflow_gives_inputs_that_there_are():
    (step,) = (step for step in WORKFLOW["jobs"]["check"]["steps"] if "pipeproof" in step.get("uses", ""))
    assert set(step["with"]) <= set(ACTION["inputs"])
    assert WORKFLOW["permissions"]["security-events"] == "write"
    rows = re.findall(r"^\| `(\w+)` +\| (?:`([^`]*)`)? *\|", PAGE, re.MULTILINE)
    assert dict(rows) == {name: about["default"] for name, about in ACTION["inputs"].items()}


@pytest.mark.slow
def test_the_action_of_the_workflow_passes_fails_and_writes_what_is_uploaded(project):
    (step,) = (step for step in WORKFLOW["jobs"]["check"]["steps"] if "pipeproof" in step.get("uses", ""))
    given = {name: str(value).lower() if value is True else value for name, value in step["with"].items()}
    done, outputs = with_inputs(project, **given)
    assert (done.returncode, outputs) == (0, {"status": "0", "sarif": "pipeproof.sarif"})
    add_wrong(project)
    done, outputs = with_inputs(project, **given)
    assert (done.returncode, outputs["status"]) == (1, "1")
    assert "PP201" in done.stdout
    (run,) = json.loads((project / outputs["sarif"]).read_text())["runs"]
    alarms = [result for result in run["results"] if result["level"] != "note"]
    uris = {result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for result in alarms}
    assert uris == {"plans/wrong.yaml"}


def test_what_the_action_is_made_of():
    """No input is pasted into a script, used actions are pinned, and it installs its own commit."""
    for step in (INSTALL, CHECK):
        assert "${{" not in step["run"]
        assert step["shell"] == "bash"
    assert '"$GITHUB_ACTION_PATH"' in INSTALL["run"]
    assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", UPLOAD["uses"])
    assert "always()" in UPLOAD["if"]
    assert "steps.check.outputs.sarif" in UPLOAD["if"]


# --- GitLab ---


@pytest.mark.slow
def test_the_gitlab_job_passes_fails_and_keeps_its_artifact(project):
    install, *lines = GITLAB["plans"]["script"]
    assert install.startswith("pip install ")
    assert bash("\n".join(lines), project).returncode == 0
    add_wrong(project)
    assert bash("\n".join(lines), project).returncode == 1
    for path in GITLAB["plans"]["artifacts"]["paths"]:
        assert json.loads((project / path).read_text())["version"] == "2.1.0"


# --- the page itself ---


def test_the_exit_statuses_that_are_listed_are_those_that_there_are():
    rows = re.findall(r"^\| (\d+)(?:, (\d+))? +\|", PAGE, re.MULTILINE)
    assert {int(number) for row in rows for number in row if number} == {*map(int, ExitStatus), 143}
    help_text = main.get_help(main.make_context("pipeproof", ["check"], resilient_parsing=True))
    assert all(re.search(rf"\b{int(status)}\b", help_text) for status in ExitStatus)
