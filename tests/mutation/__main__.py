"""``python -m tests.mutation [FILE ...]``: how many small changes of the verifier the tests notice.

Without files, all of ``pipeproof/verify`` and what it shares with the simulator. Prints a line for each mutant that
survives and the score of each file; ``--write`` keeps the results, from which
``validation/pages/make_mutation.py`` makes its part of the page.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

from tests.mutation.mutants import mutants_of
from tests.mutation.runner import preload, profile_of, run_mutants

REPOSITORY = Path(__file__).parents[2]
TARGETS = (
    "pipeproof/comm/channel_models.py",
    "pipeproof/comm/entry_order.py",
    "pipeproof/verify",
)
TESTS = ("tests/verify", "tests/zoo", "tests/comm", "tests/specs", "tests/cli", "tests/docs/test_rule_examples.py")
"""The tests that look at verdicts, but for those that start processes of their own."""
RESULTS = "tests/mutation/results.json"


def main():
    """Parse the command line, run, print."""
    arguments = _arguments()
    root = arguments.root.resolve()
    sys.path.insert(0, str(root))
    targets = arguments.files or [str(path.relative_to(root)) for path in _files(root)]
    preload()
    _print(f"running {' '.join(arguments.tests)} once, with the lines that each test runs")
    profile = profile_of(root, targets, arguments.tests)
    _print(f"{len(profile.seconds)} tests in {sum(profile.seconds.values()):.0f} s")
    for target in targets:
        source = (root / target).read_text(encoding="utf-8")
        mutants = _sample(mutants_of(target, source), arguments.sample)
        verdicts = run_mutants(root, mutants, profile, arguments.processes, _report)
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


def _arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="sources to change, from the root of the repository")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="tests that should notice")
    parser.add_argument("--sample", type=int, help="at most so many mutants of each file, always the same ones")
    parser.add_argument("--processes", type=int, default=2, help="mutants that are run at once")
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


def _report(verdict):
    if not verdict.is_killed:
        _print(f"  {verdict.outcome}: {verdict.mutant.file}:{verdict.mutant.line}: {verdict.mutant.name}")


if __name__ == "__main__":
    sys.exit(main())
