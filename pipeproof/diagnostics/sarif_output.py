"""Findings as SARIF 2.1.0, which code hosts and editors read.

Source: OASIS, Static Analysis Results Interchange Format (SARIF) Version
2.1.0. A rule's page is in its ``properties``: ``helpUri`` must be an absolute
URI, and the pages are part of a checkout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeproof.diagnostics.finding import CycleWitness, Finding, Location, OpsWitness, RuleDoc, shown_path
from pipeproof.diagnostics.text_output import finding_to_json, witness_lines

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ROOT = "%SRCROOT%"
"""Name of the working directory; the reader of the log defines it."""

_MOST_RELATED = 100
"""Most related locations of one result; ``properties.witness`` has the whole witness."""


@dataclass(frozen=True, slots=True)
class SarifResult:
    """A finding, with the reason and the location of its suppression if there is one.

    ``file`` is the checked file, if one log covers several.
    """

    finding: Finding
    suppressed_because: str | None = None
    suppressed_at: Location | None = None
    file: str | None = None


def sarif_log(
    results: Iterable[SarifResult],
    docs: Sequence[RuleDoc],
    *,
    version: str,
    file: str,
    exit_status: int,
    digest: str | None = None,
    certified: bool = False,
    not_run: Sequence[str] = (),
    plans: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """One run of ``pipeproof check`` as a SARIF log.

    Args:
        results: the findings, including suppressed ones.
        docs: all codes that may be reported; a finding of another code is a bug of pipeproof.
        version: version of pipeproof.
        file: the checked plan or program, for findings without a location.
        exit_status: exit status of the process.
        digest: digest of the verified graph, None if nothing was verified.
        certified: whether every rule ran and none found an error.
        not_run: codes of rules that were left out.
        plans: file, digest and ``certified`` of each plan, if several were checked; ``digest`` is None then.
    """
    index_of_rule = {doc.code: index for index, doc in enumerate(docs)}
    invocation: dict[str, Any] = {"executionSuccessful": True, "exitCode": int(exit_status)}
    if not_run:
        invocation["ruleConfigurationOverrides"] = [
            {"descriptor": {"id": code, "index": index_of_rule[code]}, "configuration": {"enabled": False}}
            for code in not_run
        ]
    run = {
        "tool": {
            "driver": {
                "name": "pipeproof",
                "version": version,
                "semanticVersion": version,
                "rules": [_rule(doc) for doc in docs],
            }
        },
        "invocations": [invocation],
        "columnKind": "unicodeCodePoints",
        "results": [_result(result, index_of_rule[result.finding.code], file) for result in results],
        "properties": {"digest": digest, "certified": certified, **({"plans": list(plans)} if plans else {})},
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(doc: RuleDoc) -> dict[str, Any]:
    text = f"{doc.explanation}\n\nWrong:\n{doc.wrong}\n\nRight:\n{doc.right}"
    markdown = f"{doc.explanation}\n\nWrong:\n\n```\n{doc.wrong}\n```\n\nRight:\n\n```\n{doc.right}\n```\n"
    return {
        "id": doc.code,
        "shortDescription": {"text": doc.title},
        "fullDescription": {"text": doc.explanation},
        "help": {"text": text, "markdown": markdown},
        "defaultConfiguration": {"level": doc.severity},  # SARIF uses the same words
        "properties": {"page": f"docs/codes.md#{doc.code.lower()}"},
    }


def _result(result: SarifResult, rule_index: int, file: str) -> dict[str, Any]:
    finding, file = result.finding, result.file or file
    fix = "" if finding.help is None else f"\nhelp: {finding.help}"
    as_json = finding_to_json(finding)
    content: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": rule_index,
        "level": str(finding.severity),
        "message": {"text": f"{finding.message}{fix}"},
        "locations": [{"physicalLocation": _physical(finding.location, file)}],
        "properties": {name: as_json[name] for name in ("help", "witness", "cause") if name in as_json},
    }
    related = _related(finding)
    if related:
        content["relatedLocations"] = related
    if result.suppressed_because is not None:
        content["suppressions"] = [
            {
                "kind": "inSource",
                "justification": result.suppressed_because,
                "location": {"physicalLocation": _physical(result.suppressed_at, file)},
            }
        ]
    return content


def _physical(location: Location | None, file: str) -> dict[str, Any]:
    """A physical location; a finding without one is about the whole file."""
    if location is None:
        return {"artifactLocation": _artifact(file)}
    region = {"startLine": location.line, "startColumn": location.column}
    if location.end_column is not None:
        region["endColumn"] = location.end_column + 1  # SARIF counts to the column after the last
    return {"artifactLocation": _artifact(location.file), "region": region}


def _artifact(file: str) -> dict[str, str]:
    path = Path(shown_path(file))
    if path.is_absolute():
        return {"uri": path.as_uri()}
    return {"uri": quote(path.as_posix()), "uriBaseId": _ROOT}


def _related(finding: Finding) -> list[dict[str, Any]]:
    """The witness, one sentence for each part; an operation has its issuing rank as logical location."""
    witness = finding.witness
    if witness is None:
        return []
    sentences = list(witness_lines(witness))[:_MOST_RELATED]
    names: list[str | None] = [None] * len(sentences)
    if isinstance(witness, CycleWitness | OpsWitness):
        names = [f"rank {op.rank}: {op.op}" for op in witness.ops[:_MOST_RELATED]]
    return [
        {
            "id": number,
            "message": {"text": " ".join(sentence.split())},
            **({} if name is None else {"logicalLocations": [{"fullyQualifiedName": name}]}),
        }
        for number, (sentence, name) in enumerate(zip(sentences, names, strict=True))
    ]
