"""What can be wrong with a gradient, found on one parameter of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipeproof.verify.gradients.coefficient import Coefficient


class Cause(StrEnum):
    """Why an update is not what it should be; the value is the code that reports it."""

    MISSING = "PP601"
    NEEDLESS = "PP602"
    WRONG_GROUP = "PP603"
    EARLY = "PP604"
    LOST = "PP605"
    MAIN_SCALE = "PP606"
    OTHER_SCALE = "PP607"
    COPIES = "PP608"
    EVALUATION = "PP609"
    UNREADABLE = "PP610"


@dataclass(frozen=True, slots=True)
class Count:
    """How much a token counts where it should count otherwise.

    ``tokens`` says which. ``found`` and ``declared`` are in the tokens' own
    terms; ``declared`` is None where nothing is declared and ``like`` names
    the tokens that count otherwise. ``op`` is the forward that has a scale of
    its own.
    """

    loss: str
    stage: int
    tokens: str
    found: Coefficient
    declared: Coefficient | None
    declared_text: str
    like: str = ""
    op: int | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """One parameter (or, without one, one row) on one rank. ``key`` is equal for problems with one root.

    ``ops`` are the rows to look at; ``fact`` the part of the message that is
    this cause's own; ``mend`` what would help. ``alike`` are other ranks that
    do the same.
    """

    cause: Cause
    key: tuple[str, ...]
    rank: int
    stage: int
    fact: str
    mend: str
    parameter: str = ""
    ops: tuple[int, ...] = ()
    count: Count | None = None
    alike: tuple[int, ...] = ()
