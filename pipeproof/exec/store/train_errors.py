"""Errors of the runtime. Their messages name the rank, the stage and the micro-batch, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from pipeproof.diagnostics.finding import Finding


class PipelineError(RuntimeError):
    """A failure of a pipeline, raised on all its ranks.

    ``is_reported`` is True if the other ranks already know the text. ``leaves_usable`` is True if all ranks refused a
    step before anything was posted: the pipeline can run other steps.
    """

    is_reported = False
    leaves_usable = False

    @classmethod
    def reported(cls, text: str) -> PipelineError:
        """The error of a failure that all ranks know or can read."""
        error = cls(text)
        error.is_reported = True
        return error


class PlanRefused(PipelineError):  # noqa: N818 - the name of the public contract
    """A plan that is not valid or not proved, with the ``findings`` that explain it; ``headline`` states which."""

    def __init__(
        self,
        findings: Sequence[Finding],
        headline: str = "the plan is not proved, so nothing is trained by it (unsafe=True overrides)",
    ) -> None:
        super().__init__(f"{headline}:\n{findings_text(findings)}")
        self.findings, self.headline = tuple(findings), headline


def findings_text(findings: Sequence[Finding]) -> str:
    """Findings as indented lines: code, place in the file, message and suggested fix."""
    return "\n".join(
        f"  {'' if f.location is None else f'{f.location}: '}{f.code}: {f.message}"
        + (f"\n    help: {f.help}" if f.help else "")
        for f in findings
    )
