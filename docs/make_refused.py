"""Writes the tables of what does not go together into ``docs/running.md``, from the refusals themselves.

``python docs/make_refused.py`` writes, ``--check`` exits 1 if a part is stale.
"""  # noqa: INP001 - a directory of scripts, not a package

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from pages import DOCS, fill, main, table
from refused_plans import BESIDE_OWN_LAYERS, REFUSED, gpt_plan, own_plan

from pipeproof.exec.carried_out import require_carried_out
from pipeproof.specs.finding import Finding, PipeproofError
from pipeproof.specs.load import plan_from_dict
from pipeproof.verify.check import check


def refusal(plan: Mapping[str, Any]) -> tuple[str, Finding] | None:
    """The command that refuses a plan, ``check`` or ``run``, and the first of its findings; None where it runs."""
    try:
        report = check(plan_from_dict(plan))
    except PipeproofError as error:
        return "check", error.findings[0]
    if report.errors:
        return "check", report.errors[0]
    try:
        require_carried_out(report.subject)
    except PipeproofError as error:
        return "run", error.findings[0]
    return None


def refused_part() -> str:
    """A row for each combination of a GPT's plan."""
    rows = [(", ".join(part.name for part in parts), *_said(gpt_plan(*parts))) for parts in REFUSED]
    return table(("together", "by", "", "for"), rows)


def own_part() -> str:
    """A row for each thing that own layers cannot have."""
    rows = [(part.name, *_said(own_plan(part))) for part in BESIDE_OWN_LAYERS]
    return table(("beside own layers", "by", "", "for"), rows)


def _said(plan: Mapping[str, Any]) -> tuple[str, str, str]:
    refused = refusal(plan)
    assert refused is not None, "the table is of plans that are refused"
    command, finding = refused
    return f"`{command}`", f"[{finding.code}](rules/{finding.code}.md)", finding.message


if __name__ == "__main__":
    page = DOCS / "running.md"
    parts = {"refused": refused_part(), "own": own_part()}
    sys.exit(main("docs/make_refused.py", {page: fill(page, parts)}))
