"""Options, markers and skips of the whole suite; goldens: files under ``tests/goldens`` that a test's text must equal.

``make test`` leaves out tests that are marked ``slow``, and draws fewer Hypothesis examples; ``make test-rest`` runs
the tests that were left out, and these property tests with all their examples. ``pytest`` by hand runs everything.

A test that needs an optional package that is not installed is skipped with the reason. In CI a skip is a failure,
unless its reason begins with one of ``ALLOWED_IN_CI``.
"""

import gc
import importlib
import importlib.util
import os
import shutil
from pathlib import Path

import pytest

try:
    import hypothesis
except ModuleNotFoundError:
    hypothesis = None

GOLDENS = Path(__file__).parent / "goldens"

QUICK_EXAMPLES = 10
"""The most examples of a property test in ``make test``: its profile is ``quick``."""

OPTIONAL = {
    "accelerate": "`make test-rest`",
    "dask": "the extra `dev`",
    "distributed": "the extra `dev`",
    "grimp": "the extra `dev`",
    "hatchling": "the extra `dev`",
    "hypothesis": "the extra `testing`",
    "jsonschema": "the extra `dev`",
    "lightning": "`make test-rest`",
    "matplotlib": "the extra `dev`",
    "numba": "the extra `fast`",
    "ortools": "the extra `solve`",
    "paddle": "the extra `cpu`",
    "ray": "the extra `dev`",
    "submitit": "the extra `dev`",
    "torch": "the extra `torch`",
    "torchtitan": "`make test-rest`",
    "transformers": "the extra `transformers`",
    "triton": "PyTorch for GPUs",
}
"""Packages that a test may need, by the name that it imports, and the way to install them."""

BROWSER = ("chromium", "chromedriver")

ALLOWED_IN_CI = ("there is a GPU", "there is no GPU", "this kernel", "triton is not installed")  # it needs a GPU
"""Reasons of skips that no installation can prevent; the beginning of a reason is enough."""

# No deadline: the machine may be busy, and pytest-timeout catches a hang. CI draws the same examples in every run:
# landed tests then stay green. Elsewhere examples are new each time.
if hypothesis is not None:
    for name in ("pipeproof", "quick"):
        hypothesis.settings.register_profile(name, deadline=None, derandomize="CI" in os.environ)
    hypothesis.settings.load_profile("pipeproof")


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")


# --- tests that make test leaves out ---


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Remove ``slow(only=[...])`` and ``slow(but=[...])`` from the items that they exclude, by ids of parameters."""
    made = yield
    for mark in getattr(obj, "pytestmark", ()) if isinstance(made, list) else ():
        if mark.name == "slow" and mark.kwargs:
            _unmark_quick(made, mark, f"{collector.nodeid}::{name}")
    return made


def _unmark_quick(items, mark, where):
    ((how, ids),) = mark.kwargs.items()
    assert how in {"only", "but"}, f"{where}: slow({how}=...)"
    unknown = set(ids) - {item.callspec.id for item in items}
    if unknown:
        raise pytest.Collector.CollectError(f"{where}: slow({how}=...) names ids that do not exist: {sorted(unknown)}")
    for item in items:
        if (item.callspec.id in ids) != (how == "only"):
            item.own_markers.remove(mark)


def pytest_itemcollected(item):
    """Mark property tests with more examples than ``make test`` draws; draw no more than that in its profile."""
    test = getattr(item, "function", None)
    own = getattr(test, "_hypothesis_internal_use_settings", None)  # where Hypothesis keeps ``@settings``
    if own is None and getattr(test, "is_hypothesis_test", False):
        own = hypothesis.settings()
    if own is None or own.max_examples <= QUICK_EXAMPLES:
        return
    item.add_marker("many_examples")
    if item.config.getoption("--hypothesis-profile") == "quick":
        test._hypothesis_internal_use_settings = hypothesis.settings(own, max_examples=QUICK_EXAMPLES)


# --- missing packages ---


class _Module(pytest.Module):
    """A test file; one skipped test where it imports an optional package that is not installed."""

    def collect(self):
        try:
            return super().collect()
        except self.CollectError as error:
            package = _missing_package(error.__cause__)
            if package is None:
                raise
        return [_NotImported.from_parent(self, name="import", package=package)]


class _NotImported(pytest.Item):
    def __init__(self, *, package, **keywords):
        super().__init__(**keywords)
        self.add_marker(f"needs_{package}" if package in {"paddle", "torch"} else pytest.mark.needs(package))

    def reportinfo(self):
        return self.path, 0, self.name

    def runtest(self):
        raise AssertionError("a test that is always skipped")


def pytest_pycollect_makemodule(module_path, parent):
    return _Module.from_parent(parent, path=module_path)


def _missing_package(error):
    name = (getattr(error, "name", None) or "").partition(".")[0]
    return name if isinstance(error, ModuleNotFoundError) and name in OPTIONAL and not _is_there(name) else None


def _is_there(package):
    return importlib.util.find_spec(package) is not None


def _not_installed(package):
    return f"{package} is not installed: {OPTIONAL[package]} has it"


def pytest_collection_modifyitems(items):
    reasons = {package: _not_installed(package) for package in OPTIONAL if not _is_there(package)}
    browser = [program for program in BROWSER if shutil.which(program) is None]
    browser += ["selenium"] * (not _is_there("selenium"))
    for item in items:
        needed = {mark.name.removeprefix("needs_") for mark in item.iter_markers() if mark.name.startswith("needs_")}
        needed.update(package for mark in item.iter_markers("needs") for package in mark.args)
        for package in sorted(needed & reasons.keys()):
            item.add_marker(pytest.mark.skip(reason=reasons[package]))
        if "browser" in needed and browser:
            reason = f"{' and '.join(browser)} not installed: `make test-browser` installs them"
            item.add_marker(pytest.mark.skip(reason=reason))


# --- in CI a skip is a failure ---


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    return _failed_if_skipped((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    return _failed_if_skipped((yield))


def _failed_if_skipped(report):
    if report.skipped and "CI" in os.environ and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(ALLOWED_IN_CI):
            report.outcome, report.longrepr = "failed", f"skipped, which CI does not allow: {reason}"
    return report


# --- counting live objects ---


@pytest.fixture
def few_objects():
    """Let ``gc.collect()`` look through the test's own objects alone; late in a run there are millions of others."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def without_a_width(monkeypatch):
    """Let commands print as into a pipe: pytest-xdist and terminals may set ``COLUMNS``, at which prose is wrapped."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def without_lines_of_progress(monkeypatch):
    """Let slow machines print the same as fast ones: no line of progress after ten seconds."""
    monkeypatch.setattr("pipeproof.cli.progress.PLAIN_S", float("inf"))


# --- goldens ---


@pytest.fixture(scope="session")
def check_golden(request):
    """A function ``check(name, text)``: ``text`` must equal the file ``tests/goldens/name``."""

    def check(name: str, text: str) -> None:
        path = GOLDENS / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"no golden {name}; write it with --update-golden"
        assert text == path.read_text(encoding="utf-8")

    return check


# --- scripts of validation/ ---


@pytest.fixture(scope="module")
def validation_script():
    """Imports a script of ``validation/`` or ``validation/pages`` by name, as it is imported when it runs."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in ("validation", "validation/pages"):
            patch.syspath_prepend(str(Path(__file__).parents[1] / folder))
        yield importlib.import_module


# --- rules of notes ---

KNOWN_NOTES = ("PP202", "PP411")
"""Rules of notes in the tests that use ``known_notes``."""


@pytest.fixture(scope="module")
def paddle_started():
    """Start Paddle in this process as a worker does: quiet, on the CPU, on one thread."""
    from pipeproof.stages.paddle.runtime import start_paddle

    start_paddle()


@pytest.fixture(scope="module")
def known_notes():
    """Leave out rules of other notes: a rule that is added later changes nothing that a module with this asserts."""
    from pipeproof.verify import check_plan

    kept = tuple(rule for rule in check_plan.RULES if rule.doc.severity != "note" or rule.doc.code in KNOWN_NOTES)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(check_plan, "RULES", kept)
        yield
