"""A case of the zoo, and the findings of the rules on it."""

from collections.abc import Callable
from dataclasses import dataclass

from pipeproof.diagnostics.finding import Severity
from pipeproof.state.reshard.meaning_proof import prove_meaning
from pipeproof.state.reshard.reshard_proof import prove
from pipeproof.state.reshard.shard_layout import ShardLayout
from pipeproof.state.tensor_map import StateMap
from pipeproof.verify.registry import RULES
from pipeproof.verify.subject import Subject


@dataclass(frozen=True)
class Moved:
    """A state that is to be made of another by a map; ``right`` is the map that means the same, where that is known."""

    source: ShardLayout
    state_map: StateMap
    target: ShardLayout
    right: StateMap | None = None

    def findings(self):
        """All that the proof has to say."""
        found = prove(self.source, self.state_map, self.target)
        if self.right is None:
            return found
        return (*found, *prove_meaning(self.state_map, self.right, self.target.plan.spec.model, self.target))


@dataclass(frozen=True)
class Case:
    """A bug that was found in the field, as a right subject and a mutant of it.

    ``id`` is its row in ``bugs.csv``, with a letter behind it where one row is
    shown in several forms. ``kills`` are the codes of all error rules that
    find it.
    """

    id: str
    mutation: str
    """The change, in one line."""
    correct: Callable[[], Subject | Moved]
    mutant: Callable[[], Subject | Moved]
    kills: tuple[str, ...]
    ran: str = ""
    """Observed symptom on real processes, if a test runs the mutant."""

    @property
    def row(self):
        """The id of its row in ``bugs.csv``."""
        return self.id.partition(".")[0]


def error_codes(subject):
    """The codes of the error findings of a subject, by every rule that applies; of a moved state, by its proof."""
    if isinstance(subject, Moved):
        return tuple(sorted({found.code for found in subject.findings() if found.severity is Severity.ERROR}))
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
