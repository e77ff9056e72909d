"""What a finding is known by, from one check to the next: its code and what it is about, and no place in a file.

Lines and columns move when a file is edited above them, so they are no part
of it. Neither are amounts: the same boundary loses 2048 of 4096 elements
today, and more of them with a larger model, and is one finding. Which stage,
rank, boundary, operation, tensor or setting is meant is what it is about.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from pipeproof.specs.finding import Finding

FINGERPRINT_NAME: Final = "finding/v1"
"""What it is called in SARIF; the number grows when a finding's fingerprint would be another one."""

_UNITS: Final = (
    "of", "elements?", "bytes?", "[KMGT]i?B", "us", "ms", "s", "tokens?", "values?", "times?", "micro-batch(?:es)?",
    "operations?", "messages?", "transfers?", "collectives?", "ranks?", "stages?", "layers?", "channel models?",
    "parameters?", "settings?", "others?", "more", "slots?", "steps?", "rules?", "sends?", "receives?",
)  # fmt: skip
_OWNERS: Final = (
    "rank", "stage", "chunk", "layer", "expert", "micro-batch", "step", "slot", "collective", "element", "position",
    "pp", "dp", "tp", "cp", "ep",
)  # fmt: skip
"""A number behind one of these is a name: ``rank 3 of 8`` and ``rank 2 of 8`` are two ranks."""

_NOT_NAMED: Final = "".join(rf"(?<!\b{owner} )" for owner in _OWNERS)
_AMOUNT: Final = re.compile(rf"(?<![\w.>-]){_NOT_NAMED}\d[\d,.]*(?= (?:{'|'.join(_UNITS)})\b)")
_LINE: Final = re.compile(r"\blines? \d+(?:(?:, | and | to )\d+)*")


def fingerprint(finding: Finding) -> str:
    """32 hexadecimal digits, equal for findings of one code and severity about the same thing."""
    about = _LINE.sub("line", _AMOUNT.sub("#", finding.message))
    text = "\n".join((finding.code, str(finding.severity), " ".join(about.split())))
    return hashlib.sha256(text.encode()).hexdigest()[:32]
