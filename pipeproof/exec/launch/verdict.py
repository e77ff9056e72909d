"""Verdict with which all ranks of a job end early: findings and one exit status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeproof.diagnostics.finding import Finding, PipeproofError
from pipeproof.exec.store.store import finding_content, finding_of
from pipeproof.exit_status import ExitStatus

VERDICT = "verdict"
"""Its key in the store of a job."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Findings that explain the end, and the exit status of every rank."""

    findings: tuple[Finding, ...]
    status: ExitStatus = ExitStatus.WORKER_FAILED

    def content(self) -> dict[str, Any]:
        """Return a JSON value."""
        return {"findings": [finding_content(finding) for finding in self.findings], "status": int(self.status)}

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Verdict:
        """Read what ``content`` made.

        Raises:
            ValueError: it is something else.
        """
        try:
            return cls(tuple(finding_of(each) for each in content["findings"]), ExitStatus(content["status"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"the store has no verdict: {error}") from None


class JobEndedError(PipeproofError):
    """A job ended early by its verdict; without findings on ranks that do not print it."""

    def __init__(self, *findings: Finding, status: ExitStatus = ExitStatus.WORKER_FAILED) -> None:
        super().__init__(*findings)
        self.status = status
