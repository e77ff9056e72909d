"""Check of public files against sizes that a person read in them: right, undecided, refused, or wrong.

    python validation/importers/check_public_files.py --checkouts DIRECTORY

imports the files of ``public_files.json`` below ``DIRECTORY/OWNER/NAME``, checkouts of the commits there, and prints a
line for each repository, and each wrong file; status 1 if there is one. The data have sizes and names of flags, and no
text of a file. ``right`` needs the degrees, blocks, chunks and cut, and the micro-batches where the file has them;
``undecided`` and ``refused`` the name, or the part of the message, that a reader of the file expects.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.interop import Flags, check_imported, import_files
from pipeproof.verify.certificate import Verdict

FILES: Final = Path(__file__).with_name("public_files.json")
_DEGREES: Final = ("pp", "tp", "cp")


def outcome_of(kind: str, file: Path, expected: Mapping[str, Any]) -> tuple[str, str]:
    """Return the outcome, which is "wrong" where it is not the expected one, and the findings."""
    try:
        imported = import_files(kind, [file], Flags())
    except BadPlanError as error:
        finding = error.findings[0]
        fits = expected["outcome"] == "refused" and expected["names"] in finding.message
        return ("refused" if fits else "wrong"), f"{finding.code} {finding.message}"
    report = check_imported(imported)
    if report.verdict is Verdict.UNDECIDED:
        names = [message.split("`")[1] for message in report.undecided]
        return ("undecided" if expected.get("names") in names else "wrong"), ", ".join(names)
    plan = imported.plan
    found: dict[str, Any] = {axis: plan["topology"].get(axis, 1) for axis in _DEGREES}
    found["num_layers"] = plan["model"]["num_layers"]
    found["num_chunks"] = plan["schedule"].get("num_chunks", 1)
    found["num_micro_batches"] = plan["schedule"]["num_micro_batches"]
    found["blocks"] = [sum(name.startswith("layer.") for name in stage) for stage in plan.get("stages", ())]
    is_right = expected["outcome"] == "right" and not report.errors
    is_right = is_right and all(found[key] == value for key, value in expected.items() if key in found)
    return ("right" if is_right else "wrong"), f"{report.verdict}: {found}"


def main() -> int:
    """Check all files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkouts", type=Path, required=True)
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    for source in json.loads(FILES.read_text(encoding="utf-8")):
        own: Counter[str] = Counter()
        for expected in source["files"]:
            file = options.checkouts / source["repository"] / expected["path"]
            outcome, found = outcome_of(source["kind"], file, expected)
            own[outcome] += 1
            if outcome == "wrong":
                print(f"wrong: {source['repository']} {expected['path']}: {found}", flush=True)
        counts += own
        print(f"{source['repository']}, {source['commit']}: {_text(own)}", flush=True)
    print(f"{counts.total()} files: {_text(counts)}")
    return int(counts["wrong"] > 0)


def _text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{counts[name]} {name}" for name in ("right", "undecided", "refused", "wrong"))


if __name__ == "__main__":
    sys.exit(main())
