"""Write the tables of unsupported combinations into ``validation/results/refused.md``, from the refusals themselves.

``python validation/pages/make_refused.py`` writes, ``--check`` exits 1 if a part is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from pages import EVIDENCE, fill, main, table
from refused_plans import REFUSED, WITH_CUSTOM_LAYERS, custom_plan, gpt_plan

from pipeproof.diagnostics.finding import Finding, PipeproofError
from pipeproof.exec.rank.executor_support import require_executable
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.check_plan import check


def refusal(plan: Mapping[str, Any]) -> tuple[str, Finding] | None:
    """Return the command that refuses a plan, ``check`` or ``run``, and its first finding; None if the plan runs."""
    try:
        report = check(plan_from_dict(plan))
    except PipeproofError as error:
        return "check", error.findings[0]
    if report.errors:
        return "check", report.errors[0]
    try:
        require_executable(report.subject)
    except PipeproofError as error:
        return "run", error.findings[0]
    return None


def refused_part() -> str:
    """One row for each combination in a plan of a GPT."""
    rows = [(", ".join(part.name for part in parts), *_refusal_cells(gpt_plan(*parts))) for parts in REFUSED]
    return table(("combination", "refused by", "code", "message"), rows)


def custom_part() -> str:
    """One row for each feature that plans of custom layers do not support."""
    rows = [(part.name, *_refusal_cells(custom_plan(part))) for part in WITH_CUSTOM_LAYERS]
    return table(("with custom layers", "refused by", "code", "message"), rows)


def _refusal_cells(plan: Mapping[str, Any]) -> tuple[str, str, str]:
    refused = refusal(plan)
    assert refused is not None, "the table contains plans that are refused"
    command, finding = refused
    return f"`{command}`", f"[{finding.code}](../../docs/codes.md#{finding.code.lower()})", finding.message


if __name__ == "__main__":
    page = EVIDENCE / "refused.md"
    parts = {"refused": refused_part(), "custom": custom_part()}
    sys.exit(main("validation/pages/make_refused.py", {page: fill(page, parts)}))
