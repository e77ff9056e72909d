"""The examples load and match their first line; the demo notices when its facts do not hold."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeproof.diagnostics.finding import Severity
from pipeproof.specs.load_plan import load_plan
from pipeproof.verify.check_plan import check
from tests.default_signals import default_signals

pytestmark = pytest.mark.usefixtures("known_notes")

ROOT = Path(__file__).parents[2]
PLANS = [path for path in sorted((ROOT / "examples").rglob("*.yaml")) if "pipeproof: 1" in path.read_text()]
REFUSED = {
    "gpt_pp2_tp2_sp_partial", "gpt_pp2_tp2_sp_backward_partial", "norm_after_partial", "norm_before_partial",
}  # fmt: skip
OVER_DEVICE = {"deepseek_v3", "llama3_405b"}
"""Published trainings that by the prediction need more memory than their devices have; results/published.md explains
it."""


@pytest.mark.parametrize("example", PLANS, ids=lambda path: path.stem)
def test_examples_are_judged_as_meant(example):
    assert example.read_text().startswith("# ")
    report = check(load_plan(example))
    found = {(finding.code, finding.severity) for finding in report.findings}
    expected = {("PP201", "error")} if example.stem in REFUSED else set()
    expected |= {("PP703", "warning")} if example.stem in OVER_DEVICE else set()
    assert found - {("PP411", "note")} == expected, "only that 1F1B needs more than one queue is noted"
    assert (report.certificate is None) == (example.stem in REFUSED)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("tutorial.md"))], ids=str)
def test_plans_of_the_first_pages_pass_a_strict_check_unless_the_page_shows_what_is_wrong(page, tmp_path):
    blocks = re.findall(r"```yaml.*?\n(.*?)```", page.read_text(), re.DOTALL)
    wrong = []
    for index, block in enumerate(blocks):
        plan = tmp_path / f"{index}.yaml"
        plan.write_text(block)
        findings = check(load_plan(plan)).findings
        assert all(finding.severity is not Severity.WARNING for finding in findings)
        wrong += [(index, {finding.code for finding in findings if finding.severity is Severity.ERROR})]
    shown = {0: {"PP401"}, 2: {"PP201"}}  # the plan that hangs, and the plan whose slices lose elements
    assert wrong == [(index, shown.get(index, set())) for index in range(len(blocks))]


def test_every_example_is_in_the_demo(demo):
    shown = {argument for scene in demo.scenes(Path("out")) for argument in scene.arguments}
    assert {f"examples/{path.name}" for path in PLANS if path.parent.name == "examples"} <= shown


@pytest.fixture
def demo():
    """``examples/demo.py`` as a module."""
    spec = importlib.util.spec_from_file_location("pipeproof_demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.needs_paddle
def test_ctrl_c_ends_the_demo_without_a_traceback(tmp_path):
    """As a terminal does it: the signal goes to the whole foreground group."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        start_new_session=True,
        preexec_fn=default_signals,
    )
    while "$ pipeproof" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output.rstrip().endswith("interrupted")
    assert not list(tmp_path.iterdir())
