"""Verdicts on a directory of configurations of one kind: passed, with errors, undecided, or refused, with reasons.

``python validation/check_configs.py megatron CASES --glob '**/model_config.yaml' --world-size 8`` prints a line for
each configuration with at least ``--min-pp`` pipeline ranks, then their numbers.
validation/pages/make_configurations.py keeps the verdicts on public repositories.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeproof.diagnostics.finding import BadPlanError, Finding
from pipeproof.interop import Flags, check_imported, import_files
from pipeproof.interop.importers.imported import Imported


@dataclass(frozen=True)
class Verdict:
    """``passed``, ``errors``, ``undecided`` or ``refused``; pipeline ranks (0 if unknown); findings."""

    outcome: str
    pp: int
    findings: tuple[Finding, ...] = ()
    not_shown: tuple[str, ...] = ()


def verdict_on(kind: str, file: Path, flags: Flags) -> Verdict:
    """Import and check one file. Without enough processes for its ranks, the number that it needs is assumed."""
    try:
        imported = import_files(kind, [file], flags)
        return _checked(imported)
    except BadPlanError as error:
        if flags.world_size is not None and "processes do not divide" in error.findings[0].message:
            return verdict_on(kind, file, replace(flags, world_size=None))
        return Verdict("refused", 0, error.findings)


def _checked(imported: Imported) -> Verdict:
    report = check_imported(imported)
    pp = report.subject.plan.spec.topology.pp
    names = tuple(setting.name.split()[0] for setting in imported.ignored if setting.name != "other flags")
    if report.errors:
        return Verdict("errors", pp, tuple(report.errors), names)
    deciding = tuple(finding for finding in report.findings if finding.message in report.undecided)
    return Verdict("undecided" if report.undecided else "passed", pp, deciding, names)


def verdicts(
    kind: str, root: Path, pattern: str, flags: Flags, without: str | None = None
) -> Iterator[tuple[str, Verdict]]:
    """Yield the name of each configuration below ``root``, and the verdict on it."""
    for file in sorted(root.glob(pattern)):
        text = file.read_text(encoding="utf-8")
        if without is not None and re.search(without, text, re.MULTILINE):
            continue
        name = str(file.relative_to(root))
        yield name, verdict_on(kind, file, flags)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("root", type=Path)
    parser.add_argument("--glob", default="**/*.yaml")
    parser.add_argument("--world-size", type=int)
    parser.add_argument("--min-pp", type=int, default=2)
    parser.add_argument("--without", help="pattern of a line in files that are left out")
    options = parser.parse_args(arguments)
    counts, not_shown = Counter[str](), Counter[str]()
    flags = Flags(world_size=options.world_size)
    for name, verdict in verdicts(options.kind, options.root, options.glob, flags, options.without):
        if verdict.outcome != "refused" and verdict.pp < options.min_pp:
            continue
        counts[verdict.outcome] += 1
        not_shown.update(set(verdict.not_shown))
        reason = f": {verdict.findings[0].code} {verdict.findings[0].message}" if verdict.findings else ""
        print(f"{verdict.outcome:8} {name}{reason}", flush=True)
    print(f"{sum(counts.values())} configurations: {', '.join(f'{number} {name}' for name, number in counts.items())}")
    for name, number in not_shown.most_common():
        print(f"{number:5} with a note on {name}")


if __name__ == "__main__":
    main()
