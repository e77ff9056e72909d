"""Check configurations of public repositories; keep verdicts in results/configurations.json, and write the table.

    python validation/pages/make_configurations.py --checkouts DIRECTORY

checks the files below ``DIRECTORY/OWNER/NAME``, which are checkouts of the commits in ``SOURCES`` and no part of this
project; ``--only NAME`` checks one repository, and keeps the other verdicts. Without arguments the table is written
from the verdicts, and ``--check`` exits 1 if the page is stale.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1]))

from check_configs import Verdict, verdicts
from pages import EVIDENCE, fill, table
from pages import main as write

from pipeproof.atomic_write import write_json
from pipeproof.interop import Flags

PAGE: Final = EVIDENCE / "configurations.md"
RESULTS: Final = EVIDENCE / "configurations.json"
_SCRIPT: Final = "validation/pages/make_configurations.py"


@dataclass(frozen=True)
class Source:
    """Files of one repository at one commit, and how they are checked."""

    repository: str
    commit: str
    licence: str
    title: str
    kind: str
    folder: str
    pattern: str
    world_size: int | None = None
    without: str | None = None


SOURCES: Final = (
    Source("NVIDIA/Megatron-LM", "d98e8a6", "Apache 2.0 and BSD 3-Clause", "functional tests of training", "megatron",
           "tests/functional_tests/test_cases", "*/*/model_config.yaml", 8, "^MODE: (inference|rl)"),
    Source("volcengine/verl", "b178a3c", "Apache 2.0", "examples with the Megatron backend", "verl",
           "examples", "**/*.sh"),
)  # fmt: skip
"""The places of the configurations; configurations with fewer than two pipeline ranks are left out."""

_OF_ANOTHER_KIND: Final = (
    "which has the degrees of parallelism, is not in the file", "the policy trains without a pipeline",
    "which has the pipeline, is not in the file", "no command here", "`MODEL_ARGS` must be a mapping",
    "--data.global-batch-size", "is known, is not here", "configures no pipeline",
)  # fmt: skip
"""Parts of the messages on files that do not configure such a training at all; one has arguments of NeMo."""
_ONE_RANK: Final = frozenset(
    {"gpt/gpt3_mcore_reruns_resume_check_grads/model_config.yaml",
     *(f"nemo_gym/nemotron-3-ultra/{name}.yaml" for name in ("mopd", "reasoning_teacher", "student_rlvr1",
                                                             "student_rlvr2"))}
)  # fmt: skip
"""Files with one pipeline rank that are refused: the first of five trainings has too small a batch for 8 processes; the
others have numbers of nodes that their launch script overrides."""
_UNKNOWN_DEPTH: Final = "the number of blocks "
OUTCOMES: Final = ("proved", "undecided", "refused", "blocks unknown", "not imported")
_OF_VERDICT: Final = {"passed": "proved", "undecided": "undecided", "errors": "refused"}


def outcome(verdict: Verdict) -> str | None:
    """Return the outcome of a configuration with a pipeline; None for files of another kind."""
    if verdict.outcome != "refused":
        return _OF_VERDICT[verdict.outcome] if verdict.pp > 1 else None
    finding = verdict.findings[0]
    if finding.code == "PP177":
        return "undecided"
    if finding.code != "PP170":
        return "refused"
    if any(part in finding.message for part in _OF_ANOTHER_KIND):
        return None
    return "blocks unknown" if finding.message.startswith(_UNKNOWN_DEPTH) else "not imported"


def verdicts_on(source: Source, checkouts: Path) -> list[dict[str, str]]:
    """Return name, outcome and reason of each configuration of a repository."""
    root = checkouts / source.repository / source.folder
    found = []
    for name, verdict in verdicts(source.kind, root, source.pattern, Flags(world_size=source.world_size),
                                  source.without):  # fmt: skip
        kept = outcome(verdict)
        if kept is None or name in _ONE_RANK:
            continue
        row = {"name": name, "outcome": kept}
        if verdict.findings:
            row |= {"code": verdict.findings[0].code, "reason": verdict.findings[0].message}
        found.append(row)
        print(f"{kept:14} {name} {row.get('reason', '')}", flush=True)
    return found


def counts(rows: Sequence[Mapping[str, str]]) -> Counter[str]:
    """Return the number of configurations of each outcome."""
    return Counter(row["outcome"] for row in rows)


def verdicts_part(results: Mapping[str, Sequence[Mapping[str, str]]]) -> str:
    """Return the table with a row for each repository."""
    rows = []
    for source in SOURCES:
        found = counts(results[source.repository])
        name = f"`{source.repository}`, {source.commit}, {source.licence}: {source.title}"
        rows.append((name, str(found.total()), *(str(found[one]) for one in OUTCOMES)))
    return table(("repository, commit, licence", "configurations", *OUTCOMES), rows)


def pages() -> dict[Path, str]:
    """Return the page with its current tables."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    return {PAGE: fill(PAGE, {"verdicts": verdicts_part(results)})}


def check_checkouts(arguments: Sequence[str]) -> None:
    """Check the repositories, and keep their verdicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkouts", type=Path, required=True)
    parser.add_argument("--only", help="owner/name of a repository")
    options = parser.parse_args(arguments)
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for source in SOURCES:
        if options.only in (None, source.repository):
            results[source.repository] = verdicts_on(source, options.checkouts)
            write_json(RESULTS, results)


if __name__ == "__main__":
    if "--checkouts" in sys.argv[1:]:
        check_checkouts(sys.argv[1:])
        sys.argv[1:] = []
    sys.exit(write(_SCRIPT, pages()))
