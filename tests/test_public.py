"""The public surface: small, complete, and cheap to import."""

import subprocess
import sys

import pytest

import pipeproof
from tests.plans import plan_dict


def test_every_public_name_is_there_and_comes_from_its_home():
    for name in pipeproof.__all__:
        assert getattr(pipeproof, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        pipeproof.nonsense  # noqa: B018 - the access is the test


def test_the_line_of_the_docstring_works():
    report = pipeproof.check(pipeproof.plan_from_dict(plan_dict()))
    assert not report.errors
    assert pipeproof.simulate(report.subject.plan).makespan == 1500


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import pipeproof", ["pydantic", "numpy", "networkx", "simpy", "rich", "click", "paddle"]),
        ("import pipeproof.cli.main", ["networkx", "simpy", "paddle", "numpy"]),
        ("import pipeproof.verify.check_plan", ["networkx", "simpy", "paddle", "torch", "matplotlib"]),
    ],
)
def test_imports_only_what_it_uses(statement, forbidden):
    code = f"{statement}\nimport sys\nprint([m for m in {forbidden!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_checking_a_right_plan_loads_neither_networkx_nor_simpy():
    """They cost a quarter of a second: witnesses and simulations pay for them, a clean check does not."""
    code = (
        "import sys, pipeproof\n"
        f"assert not pipeproof.check(pipeproof.plan_from_dict({plan_dict()!r})).errors\n"
        "print([m for m in ('networkx', 'simpy', 'paddle') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
