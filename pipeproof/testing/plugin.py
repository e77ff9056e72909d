"""Pytest plugin: plan files as tests, and fixtures. Pytest loads it wherever pipeproof is installed.

It imports pipeproof only when a test uses it, so other projects in the same
environment have no cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pipeproof.specs.load_plan import LoadedPlan
    from pipeproof.verify.check_plan import Report

_PLANS = pytest.StashKey[frozenset[Path]]()

_MARKER = "pipeproof_plan"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("pipeproof", "pipeproof: plans as tests")
    group.addoption(
        "--pipeproof-plans",
        metavar="GLOB",
        action="append",
        default=[],
        help="plan files, relative to the root directory: each is a test that passes if `pipeproof check` proves it",
    )
    group.addoption(
        "--pipeproof-strict", action="store_true", help="warnings about these plans fail, too, as with `check --strict`"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and add the requested plans to the collection."""
    config.addinivalue_line(
        "markers", f"{_MARKER}(plan): the plan of the fixture {_MARKER}: a path from the test's file, or a mapping"
    )
    globs: list[str] = config.getoption("--pipeproof-plans")
    plans: set[Path] = set()
    for glob in globs:
        found = sorted(path for path in _matches(config.rootpath, glob) if path.is_file())
        if not found:
            raise pytest.UsageError(f"--pipeproof-plans: no file matches {glob!r} in {config.rootpath}")
        plans.update(found)
    config.stash[_PLANS] = frozenset(plans)
    there = {Path(config.invocation_params.dir, argument).absolute() for argument in config.args}
    config.args += [str(path) for path in sorted(plans) if path not in there]


def _matches(root: Path, glob: str) -> Iterator[Path]:
    pattern = Path(glob)
    if pattern.is_absolute():
        root, pattern = Path(pattern.anchor), pattern.relative_to(pattern.anchor)
    return root.glob(str(pattern))


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """A requested plan file."""
    if file_path not in parent.config.stash[_PLANS]:
        return None
    return PlanFile.from_parent(parent, path=file_path)


class PlanFile(pytest.File):
    """A plan file with its one test."""

    def collect(self) -> Iterator[pytest.Item]:
        """The test."""
        yield PlanItem.from_parent(self, name="plan")


class PlanItem(pytest.Item):
    """Test that passes if the plan is proved."""

    def runtest(self) -> None:
        """Check it."""
        from pipeproof.testing.assertions import assert_plan_sound

        assert_plan_sound(self.path, strict=self.config.getoption("--pipeproof-strict"))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return only the diagnostics; a traceback through the plugin does not help."""
        if isinstance(excinfo.value, AssertionError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return file, line and name of the test."""
        return self.path, None, f"plan {self.path.name}"


@pytest.fixture
def plan_check() -> Callable[..., Report]:
    """``pipeproof.testing.assert_plan_sound``."""
    from pipeproof.testing.assertions import assert_plan_sound

    return assert_plan_sound


@pytest.fixture
def pipeproof_plan(request: pytest.FixtureRequest) -> LoadedPlan:
    """The loaded plan of ``@pytest.mark.pipeproof_plan("../plans/mine.yaml")``, a path from the test's own file."""
    from pipeproof.diagnostics.source import PlanFileError
    from pipeproof.testing.assertions import findings_text, loaded

    marker = request.node.get_closest_marker(_MARKER)
    if marker is None or len(marker.args) != 1 or marker.kwargs:
        pytest.fail(
            f'the fixture {_MARKER} needs one plan: write @pytest.mark.{_MARKER}("PATH") above the test', pytrace=False
        )
    plan = marker.args[0]
    try:
        return loaded(plan if isinstance(plan, Mapping) else request.path.parent / plan)
    except PlanFileError as error:
        pytest.fail(findings_text(error.findings, error.source), pytrace=False)
