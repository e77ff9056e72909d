"""Findings as JSON values, for other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from pipeproof.diagnostics.finding import Finding, Location, Severity


def finding_content(finding: Finding) -> dict[str, Any]:
    """JSON of a finding for other ranks: all but its witness."""
    return asdict(replace(finding, witness=None))


def finding_of(content: Mapping[str, Any]) -> Finding:
    """The finding of ``finding_content``."""
    at = content["location"]
    location = None if at is None else Location(**at)
    return Finding(content["code"], Severity(content["severity"]), content["message"], location, content["help"])
