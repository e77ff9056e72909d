"""Goldens: files under ``tests/goldens`` that a test's text must equal; ``--update-golden`` rewrites them.

Tests that ask PyTorch itself are skipped where it is not installed; ``make test-torch`` installs and runs them.
"""

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import settings

GOLDENS = Path(__file__).parent / "goldens"


# No deadline: the machine may be busy, and pytest-timeout catches a hang. CI draws the same examples in every run, so
# that what landed stays green; elsewhere they are new ones each time.
settings.register_profile("pipeproof", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("pipeproof")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")


def pytest_collection_modifyitems(items):
    if importlib.util.find_spec("torch") is None:
        skip = pytest.mark.skip(reason="PyTorch is not installed; `make test-torch` installs it and runs this")
        for item in items:
            if item.get_closest_marker("needs_torch"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def check_golden(request):
    """A function ``check(name, text)``: ``text`` must be what ``tests/goldens/name`` holds."""

    def check(name: str, text: str) -> None:
        path = GOLDENS / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no golden {name}; write it with --update-golden"
        assert text == path.read_text(encoding="utf-8")

    return check
