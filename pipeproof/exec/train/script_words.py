"""Findings on a plan that was made of a script's arguments, in words of the script, which never saw the plan's keys."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from pipeproof.diagnostics.finding import Finding, PipeproofError
from pipeproof.diagnostics.source import PlanFileError

_Result = TypeVar("_Result")

_WORDS = (
    (r"`schedule\.programs` is missing, which `kind: custom` needs", "`schedule` is 'custom', which is not a schedule"),
    (r"add `programs: .*`", "pass the operations of each rank: schedule=[['0F0', '0B0'], ['1F0', '1B0']]"),
    (r"`schedule\.path` is missing, which `kind: file` needs", "`schedule` is 'file', which is not a schedule"),
    (r"add `path: .*`", "pass the name of the file: schedule='zb.csv'"),
    (
        r"set schedule\.num_chunks to \d+|list the stages of each rank as schedule\.placement",
        "cut the model into as many stages as the schedule has",
    ),
    (
        r"schedule\.placement puts stage (\d+) on rank (\d+), which does not compute it",
        r"rank \2 has stage \1, which its operations do not compute",
    ),
    (r"set schedule\.num_sequence_splits to \d+", "take a schedule of whole sequences"),
    (r"schedule\.num_sequence_splits", "the number of sequence splits"),
    (r"and the plan (\d+) stage", r"and there are \1 stage"),
    (r"set topology\.pp to (\d+)", r"start \1 ranks"),
    (r"topology\.pp is (\d+)", r"the group of the pipeline has \1"),
    (r"schedule\.(kind|path|programs)", "schedule"),
    (r"schedule\.micro_batch_size", "the number of rows of the example"),
    (r"schedule\.(num_micro_batches|overlap)", r"\1"),
    (r"optimal, custom or file", "optimal, a file, or the operations of each rank"),
    (r"kind (interleaved|seq1f1b)", r"schedule='\1'"),
)
"""Texts of findings, and what the script wrote."""


def in_script_words(work: Callable[[], _Result], *, has_plan: bool) -> _Result:
    """Return the result of ``work``. Its findings speak of the script's arguments, unless the script has a plan.

    Raises:
        PlanFileError: ``work`` raised findings.
    """
    try:
        return work()
    except PipeproofError as error:
        if has_plan:
            raise
        raise PlanFileError(*(_translated(finding) for finding in error.findings)) from None


def _translated(finding: Finding) -> Finding:
    return replace(finding, message=_text(finding.message), help=None if finding.help is None else _text(finding.help))


def _text(text: str) -> str:
    for words, arguments in _WORDS:
        text = re.sub(words, arguments, text)
    return text
