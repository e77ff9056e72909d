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
from functools import partial
from pathlib import Path

import yaml

from tests.mutation.mutants import mutants_of
from tests.mutation.runner import Verdict, preload, profile_of, run_in_place, run_mutants
from tests.mutation.session import killer_of

REPOSITORY = Path(__file__).parents[2]
TARGETS = (
    "pipeproof/comm/channel_models.py",
    "pipeproof/comm/entry_order.py",
    "pipeproof/verify",
)
TESTS = ("tests/verify", "tests/zoo", "tests/comm", "tests/specs", "tests/cli", "tests/docs/test_rule_examples.py")
"""The tests that look at verdicts, but for those that start processes of their own."""
RESULTS = "tests/mutation/results.json"
SURVIVORS = "tests/mutation/survivors.yaml"
JOURNAL = "build/mutation.jsonl"
PROFILE = "build/mutation.profile"


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
    profile = profile_of(root, targets, arguments.tests, root / PROFILE)
    _print(f"{len(profile.seconds)} tests in {sum(profile.seconds.values()):.0f} s")
    explained = _explained(root / SURVIVORS)
    files = [_File(root, target, arguments, explained) for target in targets]
    by_file = {file.target: (file.source, file.left) for file in files}
    most_s = arguments.seconds
    run_in_place(root, arguments.tests, by_file, profile, arguments.processes, _report_to(files), most_s)
    for file in files:
        file.journal.read()
        at_import = file.left
        run_mutants(at_import, profile, partial(killer_of, root), arguments.processes, file.journal.report, most_s)
        verdicts = file.verdicts
        if verdicts:
            num_killed = sum(verdict.is_killed for verdict in verdicts)
            _print(f"{file.target}: {num_killed} of {len(verdicts)} killed, {num_killed / len(verdicts):.1%}")
            if arguments.write:  # after each file: a run that is stopped has not been for nothing
                _keep(root / RESULTS, file.target, file.source, verdicts)


class _File:
    """A file with its mutants and the verdicts on them."""

    def __init__(self, root, target, arguments, explained):
        self.target, self.source = target, (root / target).read_text(encoding="utf-8")
        self._mutants = _sample(mutants_of(target, self.source), arguments.sample)
        self.journal = _Journal(root / JOURNAL, target, self.source, is_fresh=arguments.fresh)
        if arguments.again and _is_complete(root, target):
            self.journal.known = _stored_verdicts(root, target, self._mutants)
        self.journal.read()
        if arguments.again:
            known = self.journal.known
            for name in [n for n, outcome in known.items() if outcome in _SURVIVING and (target, n) not in explained]:
                del known[name]

    @property
    def left(self):
        """The mutants without a verdict."""
        return [mutant for mutant in self._mutants if mutant.name not in self.journal.known]

    @property
    def verdicts(self):
        """The verdicts, in the order of the mutants."""
        known = self.journal.known
        return [Verdict(mutant, known[mutant.name]) for mutant in self._mutants if mutant.name in known]


_SURVIVING = {"survives", "unreached"}


def _report_to(files):
    journals = {file.target: file.journal for file in files}
    return lambda verdict: journals[verdict.mutant.file].report(verdict)


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


def _stored_verdicts(root, target, mutants):
    """The outcomes in the stored results, by mutant."""
    survivors = set(json.loads((root / RESULTS).read_text(encoding="utf-8"))[target]["survivors"])
    return {mutant.name: "survives" if mutant.name in survivors else "killed" for mutant in mutants}


def _explained(path):
    """(file, mutant) of the survivors with an explanation."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else []
    return {(entry["file"], name) for entry in entries for name in entry["names"]}


def _arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="sources to change, from the root of the repository")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="tests that should notice")
    parser.add_argument("--sample", type=int, help="at most so many mutants of each file, always the same ones")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="mutants that are run at once")
    parser.add_argument("--seconds", type=float, default=60.0, help="time of the tests that look for one mutant")
    parser.add_argument("--again", action="store_true", help="run the survivors again that have no explanation")
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

    def __init__(self, path, target, source, *, is_fresh):
        self._path = path
        self._key = {"file": target, "source_sha256": hashlib.sha256(source.encode()).hexdigest()}
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            with path.open("a", encoding="utf-8") as stream:
                stream.write("\n")  # after a line that was cut when the run was stopped
        self._num_old = len(self._lines()) if is_fresh else 0
        self.known = {}

    def _lines(self):
        return self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []

    def read(self):
        """Read the verdicts that were added to the file since the last call, the latest of each mutant."""
        lines = self._lines()[self._num_old :]
        self._num_old += len(lines)
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError):  # a cut line
                entry = json.loads(line)
                if self._key.items() <= entry.items():
                    self.known[entry["name"]] = entry["outcome"]

    def report(self, verdict):
        """Note a verdict, and print it if the mutant survives."""
        self.known[verdict.mutant.name] = verdict.outcome
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({**self._key, "name": verdict.mutant.name, "outcome": verdict.outcome}) + "\n")
        if not verdict.is_killed:
            _print(f"  {verdict.outcome}: {verdict.mutant.file}:{verdict.mutant.line}: {verdict.mutant.name}")


if __name__ == "__main__":
    sys.exit(main())
