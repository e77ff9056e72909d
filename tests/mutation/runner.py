"""Runs the tests against every mutant, each in a process forked from one that has everything loaded.

A run by mutant costs what its tests cost: no interpreter starts, nothing is imported, and only tests that run the
changed line are run. A mutant of code that runs at import has a process that imports our own package and the tests.
"""

import contextlib
import ctypes
import gc
import hashlib
import importlib
import os
import pickle
import resource
import signal
import time
from collections import Counter
from dataclasses import dataclass

from tests.mutation import session
from tests.mutation.replaced_code import loaded_functions, replaced_code

HEAVY = (
    "hypothesis",
    "networkx",
    "numpy",
    "pydantic",
    "pytest",
    "rich.console",
    "simpy",
    "yaml",
)
"""Import the modules that every process needs."""

LEAST_SECONDS = 20.0
FACTOR = 10.0
"""A mutant that takes this many times as long as its tests do without it, and at least so long, hangs: it is killed."""

MOST_MEMORY = 8 * 2**30
"""Bytes of address space of one process: a mutant that allocates without end fails, and takes nothing with it."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of one mutant."""

    mutant: object
    outcome: str
    """``killed``, ``hangs`` (killed, too), ``survives`` or ``unreached`` (no test runs its line)."""

    @property
    def is_killed(self):
        """True if the tests detect the mutant."""
        return self.outcome in {"killed", "hangs"}


def preload():
    """Import the libraries, so that forked processes have them."""
    for name in HEAVY:
        with contextlib.suppress(ImportError):  # an optional one; the tests skip or do without it
            importlib.import_module(name)


def profile_of(root, targets, tests, kept):
    """Profile of the tests: the lines of the targets that they run, recorded in a separate process.

    It is kept in the file ``kept``, and used again for the same or fewer targets as long as no Python file below
    ``root`` has changed.

    Raises:
        RuntimeError: the tests do not pass as they are.
    """
    files = [path for path in root.rglob("*.py") if not path.relative_to(root).parts[0].startswith((".", "build"))]
    digest = hashlib.sha256(repr(tests).encode())
    for path in sorted(files):
        digest.update(path.read_bytes())
    with contextlib.suppress(OSError, ValueError):
        key, recorded, profile = pickle.loads(kept.read_bytes())
        if key == digest.hexdigest() and recorded.issuperset(targets):
            return profile
    profile = _recorded(root, targets, tests)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(pickle.dumps((digest.hexdigest(), set(targets), profile)))
    return profile


def _recorded(root, targets, tests):
    reader, writer = os.pipe()
    pid = _fork(lambda: _write(writer, session.record(root, targets, tests)))
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        data = stream.read()
    os.waitpid(pid, 0)
    profile = pickle.loads(data) if data else session.Profile()
    if profile.status != 0:
        raise RuntimeError(f"without any change the tests do not pass: {' '.join(profile.failed) or 'none was run'}")
    return profile


_MOST_KILLERS = 20


def run_in_place(root, tests, by_file, profile, num_processes, report, most_seconds):
    """Run the mutants of code that is loaded; the others are left out.

    ``by_file`` has the text of each file and its mutants. ``report`` gets each verdict as it is known. All happens in
    one forked process, which has all ``tests`` (paths) loaded.

    Raises:
        RuntimeError: a mutant's process failed otherwise than by its tests, or the tests cannot be collected.
    """

    def run_files(collected):
        functions = loaded_functions([root / file for file in by_file])
        gc.freeze()  # the collector of a forked process would write to all that it shares
        for file, (source, mutants) in by_file.items():
            path = root / file
            replaced = {mutant.name: replaced_code(path, source, mutant, functions[path]) for mutant in mutants}
            run_mutants(
                [mutant for mutant in mutants if replaced[mutant.name]],
                profile,
                lambda mutant, chosen, replaced=replaced: collected.killer_of(replaced[mutant.name], chosen),
                num_processes,
                report,
                most_seconds,
            )

    _, status = os.waitpid(_fork(lambda: session.with_collected(root, tests, run_files), is_mutant=False), 0)
    if status:
        raise RuntimeError("the mutants of loaded code could not be run")


def run_mutants(mutants, profile, killer_of, num_processes, report, most_seconds):
    """Run every mutant of one file; verdicts in the order of the mutants. ``report`` gets each as it is known.

    ``killer_of(mutant, tests)`` runs in a forked process, and returns the test that fails, or nothing. Tests that
    killed most mutants so far go first, then the quickest, all together ``most_seconds`` by the profile: a line of a
    function that everything calls is run by thousands of tests. So the score is a lower bound.

    Raises:
        RuntimeError: a mutant's process failed otherwise than by its tests.
    """
    verdicts = {}
    running = {}
    waiting = list(reversed(mutants))
    killers = Counter()

    def settle(mutant, outcome):
        verdicts[mutant.name] = Verdict(mutant, outcome)
        report(verdicts[mutant.name])

    while waiting or running:
        while waiting and len(running) < num_processes:
            mutant = waiting.pop()
            tests = _chosen(profile.tests_of(mutant), profile, killers, most_seconds)
            if not tests:
                settle(mutant, "unreached")
                continue
            limit = max(LEAST_SECONDS, FACTOR * sum(profile.seconds[test] for test in tests))
            reader, writer = os.pipe()
            pid = _fork(lambda mutant=mutant, tests=tests, writer=writer: _answer(writer, killer_of(mutant, tests)))
            os.close(writer)
            running[pid] = mutant, time.monotonic() + limit, reader
        for pid, (mutant, deadline, reader) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            hangs = not ended and time.monotonic() > deadline
            if hangs:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            if ended or hangs:
                del running[pid]
                with os.fdopen(reader) as stream:
                    killers.update(filter(None, [stream.read()]))
                settle(mutant, "hangs" if hangs else _outcome(mutant, status))
        time.sleep(0.005)
    return [verdicts[mutant.name] for mutant in mutants]


def _chosen(tests, profile, killers, most_seconds):
    first = [test for test, _ in killers.most_common(_MOST_KILLERS) if test in tests]
    left, chosen = most_seconds, []
    for test in dict.fromkeys((*first, *tests)):
        left -= profile.seconds[test]
        if left < 0 and chosen:
            break
        chosen.append(test)
    return chosen


def _answer(descriptor, killer):
    """Write the test that failed; return True if there is one."""
    os.write(descriptor, killer.encode())
    return killer != ""


def _outcome(mutant, status):
    """Outcome for the exit status of the mutant's process."""
    match os.waitstatus_to_exitcode(status):
        case 0:
            return "survives"
        case 1:
            return "killed"
        case code if code < 0:  # it crashed the interpreter
            return "killed"
        case code:
            raise RuntimeError(f"{mutant.file}, {mutant.name}: its process ended with {code}")


def _fork(work, *, is_mutant=True):
    """A process group of its own that does ``work`` and ends with its answer as a status, or 2 if it raises."""
    pid = os.fork()
    if pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)
        return pid
    status = 2
    try:
        os.setpgid(0, 0)
        _end_with_parent()
        if is_mutant:
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            session.silence()
        status = int(bool(work()))
    finally:
        os._exit(status)


def _end_with_parent():
    """Have the kernel kill this process when the one that forked it is gone, however that ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1
"""From ``linux/prctl.h``."""


def _write(descriptor, value):
    with os.fdopen(descriptor, "wb") as stream:
        pickle.dump(value, stream)
