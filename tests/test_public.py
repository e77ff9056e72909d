"""The public surface: small, complete, and cheap to import."""

import subprocess
import sys
from pathlib import Path

import pytest

import pipeproof
from tests.plans import plan_dict

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt_pp4.yaml"
FRAMEWORKS = ("paddle", "torch")

LOADED = {
    "the package": (
        "import pipeproof; dir(pipeproof)",
        ("pydantic", "numpy", "networkx", "simpy", "rich", "click", "pandas", "matplotlib", *FRAMEWORKS),
    ),
    "the commands": (
        "import pipeproof.cli.main",
        ("networkx", "simpy", "numpy", "pipeproof.schedule", "pipeproof.cli.schedule_command", *FRAMEWORKS),
    ),
    "the command check": ("import pipeproof.cli.check_command", ("pipeproof.interop",)),
    "loading": (
        "import pipeproof.specs.load_plan, pipeproof.diagnostics.text_output",
        ("rich", "networkx", "numpy", "simpy", *FRAMEWORKS),
    ),
    "the rules": ("import pipeproof.verify.check_plan", ("networkx", "simpy", "matplotlib", *FRAMEWORKS)),
    "a check": (
        f"import pipeproof; assert not pipeproof.check(pipeproof.plan_from_dict({plan_dict()!r})).errors",
        ("networkx", "simpy", *FRAMEWORKS),  # a quarter of a second: witnesses and simulations pay for them
    ),
    "a check by the command": (
        f"from tests.cli.commands import invoke; assert invoke('check', {str(EXAMPLE)!r}).exit_code == 0",
        ("networkx", "simpy", "safetensors", "pipeproof.exec.launch.run_plan", *FRAMEWORKS),
    ),
    "a simulation in a notebook": (
        f"import pipeproof; pipeproof.simulate({plan_dict()!r})._repr_html_()",
        ("pandas", "matplotlib", *FRAMEWORKS),
    ),
    "helpers of tests": ("from pipeproof.testing import *", ("hypothesis", "pytest", *FRAMEWORKS)),
}
"""Statements, and packages and modules that they do not load."""


def test_every_public_name_is_there_and_comes_from_its_home():
    for name in pipeproof.__all__:
        assert getattr(pipeproof, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        pipeproof.nonsense  # noqa: B018 - the access is the test


def test_the_line_of_the_docstring_works():
    report = pipeproof.check(pipeproof.plan_from_dict(plan_dict()))
    assert not report.errors
    assert pipeproof.simulate(report.subject.plan).makespan == 1500


@pytest.mark.parametrize("name", LOADED)
def test_what_is_used_is_loaded_and_no_more(name):
    statement, others = LOADED[name]
    code = f"{statement}\nimport sys\nprint([name for name in {others!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
