"""``python -m tests.mutation [FILE ...]``: how many small changes of the verifier the tests notice.

Without files, all of ``pipeproof/verify`` and what it shares with the simulator. Prints a line for each mutant that
survives and the score of each file; ``--write`` keeps the results, from which
``validation/pages/make_mutation.py`` makes its part of the page. Each verdict is noted in a journal as it is known: the
same command resumes after the last mutant of a run that was stopped, as long as the changed file stays as it is.
"""

import argparse
import contextlib
import hashlib
import json
import os
import sys
from pathlib import Path

from tests.mutation.mutants import mutants_of
from tests.mutation.runner import Verdict, preload, profile_of, run_mutants

REPOSITORY = Path(__file__).parents[2]
TARGETS = (
    "pipeproof/comm/channel_models.py",
    "pipeproof/comm/entry_order.py",
    "pipeproof/verify",
)
TESTS = ("tests/verify", "tests/zoo", "tests/comm", "tests/specs", "tests/cli", "tests/docs/test_rule_examples.py")
"""The tests that look at verdicts, but for those that start processes of their own."""
RESULTS = "tests/mutation/results.json"
JOURNAL = "build/mutation.jsonl"


def main():
    """Parse the command line, run, print."""
    arguments = _arguments()
    root = arguments.root.resolve()
    sys.path.insert(0, str(root))
    targets = arguments.files or [str(path.relative_to(root)) for path in _files(root)]
    if arguments.resume:
        targets = [target for target in targets if not _is_complete(root, target)]
    preload()
    _print(f"running {' '.join(arguments.tests)} once, with the lines that each test runs")
    profile = profile_of(root, targets, arguments.tests)
    _print(f"{len(profile.seconds)} tests in {sum(profile.seconds.values()):.0f} s")
    for target in targets:
        source = (root / target).read_text(encoding="utf-8")
        mutants = _sample(mutants_of(target, source), arguments.sample)
        journal = _Journal(root / JOURNAL, target, source)
        if arguments.fresh:
            journal.known.clear()
        left = [mutant for mutant in mutants if mutant.name not in journal.known]
        verdicts = [Verdict(mutant, journal.known[mutant.name]) for mutant in mutants if mutant.name in journal.known]
        verdicts += run_mutants(root, left, profile, arguments.processes, journal.report)
        if verdicts:
            num_killed = sum(verdict.is_killed for verdict in verdicts)
            _print(f"{target}: {num_killed} of {len(verdicts)} killed, {num_killed / len(verdicts):.1%}")
            if arguments.write:  # after each file: a run that is stopped has not been for nothing
                _keep(root / RESULTS, target, source, verdicts)


def _files(root):
    for target in TARGETS:
        path = root / target
        yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def _keep(path, target, source, verdicts):
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results[target] = {
        "source_sha256": hashlib.sha256(source.encode()).hexdigest(),
        "num_mutants": len(verdicts),
        "survivors": [verdict.mutant.name for verdict in verdicts if not verdict.is_killed],
    }
    path.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", encoding="utf-8")


def _is_complete(root, target):
    """Return True if the stored results have all mutants of a file as it is."""
    source, path = (root / target).read_text(encoding="utf-8"), root / RESULTS
    stored = json.loads(path.read_text(encoding="utf-8")).get(target, {}) if path.exists() else {}
    is_of_source = stored.get("source_sha256") == hashlib.sha256(source.encode()).hexdigest()
    return is_of_source and stored["num_mutants"] == len(mutants_of(target, source))


def _arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="sources to change, from the root of the repository")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="tests that should notice")
    parser.add_argument("--sample", type=int, help="at most so many mutants of each file, always the same ones")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="mutants that are run at once")
    parser.add_argument("--fresh", action="store_true", help="run mutants again whose verdicts are in the journal")
    parser.add_argument("--resume", action="store_true", help="leave out files of which the results have all mutants")
    parser.add_argument("--write", action="store_true", help=f"keep the results in {RESULTS}")
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="the repository, if it is another")
    return parser.parse_args()


def _sample(mutants, most):
    """A sample that depends on the mutants' names alone, in the order of the file."""
    if most is None or len(mutants) <= most:
        return mutants
    chosen = sorted(mutants, key=lambda mutant: hashlib.sha256(mutant.name.encode()).digest())[:most]
    return [mutant for mutant in mutants if mutant in chosen]


def _print(line):
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class _Journal:
    """Verdicts of one state of one file, a line each: ``known`` are the outcomes by mutant."""

    def __init__(self, path, target, source):
        self._path = path
        self._key = {"file": target, "source_sha256": hashlib.sha256(source.encode()).hexdigest()}
        self.known = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):  # a line that was cut when the run was stopped
                entry = json.loads(line)
                if self._key.items() <= entry.items():
                    self.known[entry["name"]] = entry["outcome"]

    def report(self, verdict):
        """Note a verdict, and print it if the mutant survives."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({**self._key, "name": verdict.mutant.name, "outcome": verdict.outcome}) + "\n")
        if not verdict.is_killed:
            _print(f"  {verdict.outcome}: {verdict.mutant.file}:{verdict.mutant.line}: {verdict.mutant.name}")


if __name__ == "__main__":
    sys.exit(main())
