"""What a case of the zoo is, and what the rules say of it."""

from collections.abc import Callable
from dataclasses import dataclass

from pipeproof.specs.finding import Severity
from pipeproof.verify.registry import RULES
from pipeproof.verify.subject import Subject


@dataclass(frozen=True)
class Case:
    """A bug that was found in the field, as a right subject and a mutant of it.

    ``id`` is its row in ``bugs.csv``, with a letter behind it where one row is
    shown in several forms. ``kills`` are the codes of all error rules that
    find it.
    """

    id: str
    mutation: str
    """What was changed, in one line."""
    correct: Callable[[], Subject]
    mutant: Callable[[], Subject]
    kills: tuple[str, ...]
    ran: str = ""
    """What real processes did, where a test runs the mutant."""

    @property
    def row(self):
        """The id of its row in ``bugs.csv``."""
        return self.id.partition(".")[0]


def error_codes(subject):
    """The codes of the error findings of a subject, by every rule that can judge it."""
    return tuple(
        sorted(
            {
                finding.code
                for rule in RULES
                if subject.lowered is not None or not rule.needs_plan
                for finding in rule.check(subject)
                if finding.severity is Severity.ERROR
            }
        )
    )
