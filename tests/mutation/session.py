"""pytest within a forked process: noting the lines that each test runs, or running tests against one mutant."""

import importlib.abc
import importlib.util
import os
import sys
import time
from dataclasses import dataclass, field

import hypothesis
import pytest

OPTIONS = (
    "-q", "-p", "no:cacheprovider", "--no-header", "--no-summary", "-m", "not needs_paddle and not needs_torch",
    "--assert=plain",  # pytest's own importer for assertions reads the package's files, and so no mutant
)  # fmt: skip


@dataclass
class Profile:
    """Profile of one run of all tests: duration of each test, and the lines of each target that it runs."""

    status: int = -1
    failed: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[str, set[int]]] = field(default_factory=dict)

    def tests_of(self, mutant):
        """The tests that run a line of the mutant, the quickest first; of a change at import, all in that file."""
        span = range(mutant.line, mutant.last_line + 1)
        found = [
            test
            for test, files in self.lines.items()
            if mutant.file in files and (mutant.at_import or not files[mutant.file].isdisjoint(span))
        ]
        return sorted(found, key=lambda test: (self.seconds[test], test))


MOST_EXAMPLES = 30
"""Examples of one Hypothesis test: a mutant that survives runs all its tests, and this decides how long that takes."""


class _Repeatable:
    """Hypothesis draws the same few examples in every run, and does not shrink what fails."""

    def pytest_collection_modifyitems(self, items):
        for item in items:
            test = getattr(item, "function", None)
            own = getattr(test, "_hypothesis_internal_use_settings", None)  # where ``@settings`` puts them
            if own is not None:
                test._hypothesis_internal_use_settings = hypothesis.settings(
                    own,
                    derandomize=True,
                    database=None,
                    deadline=None,
                    phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
                    max_examples=min(own.max_examples, MOST_EXAMPLES),
                )


class _Recorder(_Repeatable):
    """Notes the time of each test and the lines of the targets that it runs."""

    def __init__(self, root, targets):
        self.profile = Profile()
        self._targets = {str(root / target): target for target in targets}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        lines = self.profile.lines.setdefault(item.nodeid, {})
        seen = {}

        def on_call(frame, event, argument):
            target = self._targets.get(frame.f_code.co_filename)
            if target is None:
                return None
            if frame.f_code not in seen:
                seen[frame.f_code] = _Seen(frame.f_code, lines.setdefault(target, set()))
            return seen[frame.f_code].trace(frame, event, argument)

        start = time.perf_counter()
        sys.settrace(on_call)
        yield
        sys.settrace(None)
        self.profile.seconds[item.nodeid] = time.perf_counter() - start

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.profile.failed.append(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self.profile.failed.append(report.nodeid)


MOST_EVENTS = 2_000
"""Lines of one function that are followed in one test; of one that runs longer, all lines count as run."""


class _Seen:
    """The lines of one function that a test has run so far; follows it until it has seen all or enough."""

    def __init__(self, code, lines):
        self._lines = lines
        self._missing = {line for _, _, line in code.co_lines() if line is not None}
        self._num_events = 0

    def trace(self, frame, event, argument):
        if not self._missing:
            return None
        self._num_events += 1
        seen = self._missing if self._num_events > MOST_EVENTS else {frame.f_lineno}
        self._lines |= seen
        self._missing = self._missing - seen
        return self.trace


class _Failures:
    """Notes the last test or file that failed."""

    failed = ""

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed = report.nodeid


class _Chosen(_Repeatable, _Failures):
    """Runs only the chosen tests, in the order given; notes the one that fails."""

    def __init__(self, tests):
        self._order = {test: place for place, test in enumerate(tests)}

    def pytest_collection_modifyitems(self, items):
        super().pytest_collection_modifyitems(items)
        items[:] = sorted((i for i in items if i.nodeid in self._order), key=lambda i: self._order[i.nodeid])


class _Collected(_Repeatable):
    """Collects all tests, and does other work in place of running them."""

    def __init__(self, work):
        self._work = work

    def pytest_runtestloop(self, session):
        self._work(CollectedTests(session))
        return True


class CollectedTests:
    """Tests that are imported and collected, for processes that are forked from this one."""

    def __init__(self, session):
        self._config = session.config
        self._items = {item.nodeid: item for item in session.items}
        self._config.pluginmanager.unregister(name="terminalreporter")  # which prints a dot for each test

    def killer_of(self, replaced, tests):
        """The test that fails once the functions have the code of a mutant; empty if none does.

        ``replaced`` is as ``replaced_code`` returns it; ``tests`` are node ids, in the order in which they are run.
        """
        for function, code in replaced:
            function.__code__ = code
        failures = _Failures()
        self._config.pluginmanager.register(failures)
        chosen = [self._items[test] for test in tests]
        for item, following in zip(chosen, [*chosen[1:], None], strict=True):
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if failures.failed:
                return failures.failed
        return ""


def with_collected(root, tests, work):
    """Call ``work`` with the ``CollectedTests`` of ``tests`` (paths).

    Raises:
        RuntimeError: pytest could not collect them.
    """
    status = _pytest(root, tests, _Collected(work))
    if status != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest ended with {status!r}")


def record(root, targets, tests):
    """Run ``tests`` (paths) and return the lines that they run of the ``targets`` (paths from ``root``)."""
    recorder = _Recorder(root, targets)
    recorder.profile.status = int(_pytest(root, tests, recorder))
    return recorder.profile


def killer_of(root, mutant, tests):
    """A test that fails in a session of its own with the mutant, or whose import fails; empty if none does.

    ``tests`` are node ids; those of the first one's file are imported and run before all others.

    Raises:
        RuntimeError: pytest could not run them.
    """
    _replace(root, mutant)
    first = file_of(tests[0])
    rounds = [t for t in tests if file_of(t) == first], [t for t in tests if file_of(t) != first]
    for chosen in filter(None, rounds):
        plugin = _Chosen(chosen)
        status = _pytest(root, sorted({file_of(test) for test in chosen}), plugin, "-x")
        if status in {pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED}:
            return plugin.failed if plugin.failed in tests else chosen[0]
        if status != pytest.ExitCode.OK:
            raise RuntimeError(f"pytest ended with {status!r}")
    return ""


def file_of(test):
    """The file of a node id."""
    return test.partition("::")[0]


def _pytest(root, paths, plugin, *options):
    arguments = [*OPTIONS, *options, f"--rootdir={root}", *(str(root / path) for path in paths)]
    return pytest.main(arguments, plugins=[plugin])


def _replace(root, mutant):
    """From now on an import of the mutant's module finds the mutant; the whole package is imported anew."""
    name = mutant.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    package = name.partition(".")[0]
    if name in sys.modules:
        for loaded in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
            del sys.modules[loaded]
    sys.meta_path.insert(0, _Finder(name, root / mutant.file, mutant.source))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds one module, with the source that it was given."""

    def __init__(self, name, path, source):
        self._name, self._path, self._source = name, path, source

    def find_spec(self, fullname, path, target=None):
        if fullname != self._name:
            return None
        places = [str(self._path.parent)] if self._path.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(
            fullname, self._path, loader=self, submodule_search_locations=places
        )

    def get_source(self, fullname):
        return self._source

    def is_package(self, fullname):
        return self._path.name == "__init__.py"


def silence():
    """Send what this process prints nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
