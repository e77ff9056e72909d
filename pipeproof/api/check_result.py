"""``pipeproof.check``: the check of a plan, with its findings as text, records and a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeproof.api.given_plan import GivenPlan, Settings, load_given
from pipeproof.api.result import Records, Result, html_table, html_text
from pipeproof.verify.check_plan import Report
from pipeproof.verify.check_plan import check as check_plan
from pipeproof.verify.registry import ALL_RULES, Selection


class CheckResult(Report, Result):
    """Result of ``check``: a report, with the tables ``findings`` and ``in_flight``."""

    def __repr__(self) -> str:
        """Return the verdict with the numbers of findings."""
        warnings = len(self.findings) - len(self.errors)
        return f"<check: {self.verdict.value}, {len(self.errors)} errors, {warnings} other findings>"

    def _dict(self) -> dict[str, Any]:
        return self.to_json()

    def _tables(self) -> dict[str, Records]:
        content = self.to_json()
        return {
            "findings": [
                {
                    "code": finding["code"],
                    "severity": finding["severity"],
                    "message": finding["message"],
                    "file": None if finding["location"] is None else finding["location"]["file"],
                    "line": None if finding["location"] is None else finding["location"]["line"],
                    "help": finding["help"],
                }
                for finding in content["findings"]
            ],
            "in_flight": content["in_flight"],
        }

    def _parts(self) -> Iterator[str]:
        from pipeproof.diagnostics.text_output import render_text

        yield f"<p><b>{self.verdict.value}</b>, graph {self.digest[:12]}</p>"
        yield html_text(lambda console: render_text(self.findings, self.subject.source, console=console))
        yield html_table(self.to_records("in_flight"), "largest numbers of stored activations")


def check(plan: GivenPlan, selection: Selection = ALL_RULES, *, settings: Settings | None = None) -> CheckResult:
    """Lower a plan and check it by every selected rule.

    Args:
        plan: A path, a dict, a ``PlanSpec`` or a loaded plan.
        selection: Rules that run.
        settings: Values by dotted key, which replace the plan's.

    Raises:
        BadPlanError: it is not a valid plan, or cannot be lowered at all.
    """
    return CheckResult(**vars(check_plan(load_given(plan, settings), selection)))
