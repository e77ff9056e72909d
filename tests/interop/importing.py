"""Helpers of the tests of importers: a text in a file, imported and checked."""

import json
from pathlib import Path

import pytest

from pipeproof.diagnostics.source import PlanFileError
from pipeproof.interop import Flags, check_imported, import_files
from pipeproof.specs.schedule import ScheduleFileError

REAL = Path(__file__).parents[1] / "goldens" / "real_configs"


def imported(kind, path, text, *, name="job.yaml", **flags):
    file = path / name
    file.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    return import_files(kind, [file], Flags(**flags))


def judged(kind, path, text, **flags):
    return check_imported(imported(kind, path, text, **flags))


def codes(report):
    """The codes found, without notes about assumed values."""
    return sorted({finding.code for finding in report.findings} - {"PP172"})


def errors(made):
    return [finding.code for finding in check_imported(made).errors]


def only(report, code):
    (finding,) = [finding for finding in report.findings if finding.code == code]
    return finding


def refusal(reader, *arguments, **options):
    """The only finding with which a reader refuses its files."""
    with pytest.raises((PlanFileError, ScheduleFileError)) as caught:
        reader(*arguments, **options)
    (finding,) = caught.value.findings
    return finding
