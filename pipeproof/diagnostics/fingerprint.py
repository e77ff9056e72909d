"""Identity of a finding across checks: its code and its subject, without its location in a file.

Lines and columns change when a file is edited above them, so they are not part
of it. Neither are amounts: a boundary that loses 2048 of 4096 elements, or more
of them with a larger model, is one finding. The subject is a stage, rank,
boundary, operation, tensor or setting.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from pipeproof.diagnostics.finding import Finding

FINGERPRINT_NAME: Final = "finding/v1"
"""Its name in SARIF; the number grows when fingerprints of findings change."""

_UNITS: Final = (
    "of", "elements?", "bytes?", "[KMGT]i?B", "us", "ms", "s", "tokens?", "values?", "times?", "micro-batch(?:es)?",
    "operations?", "messages?", "transfers?", "collectives?", "ranks?", "stages?", "layers?", "channel models?",
    "parameters?", "settings?", "others?", "more", "slots?", "steps?", "rules?", "sends?", "receives?",
)  # fmt: skip
_OWNERS: Final = (
    "rank", "stage", "chunk", "layer", "expert", "micro-batch", "step", "slot", "collective", "element", "position",
    "pp", "dp", "tp", "cp", "ep",
)  # fmt: skip
"""A number after one of these is a name: ``rank 3 of 8`` and ``rank 2 of 8`` are two ranks."""

_NOT_NAMED: Final = "".join(rf"(?<!\b{owner} )" for owner in _OWNERS)
_AMOUNT: Final = re.compile(rf"(?<![\w.>-]){_NOT_NAMED}\d[\d,.]*(?= (?:{'|'.join(_UNITS)})\b)")
_LINE: Final = re.compile(r"\blines? \d+(?:(?:, | and | to )\d+)*")


def fingerprint(finding: Finding) -> str:
    """Return 32 hexadecimal digits, equal for findings of one code and severity about the same subject."""
    about = _LINE.sub("line", _AMOUNT.sub("#", finding.message))
    text = "\n".join((finding.code, str(finding.severity), " ".join(about.split())))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
