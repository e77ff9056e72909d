"""The table: the operations of ``stages.paddle`` on generic values, with sizes that differ where they can."""

from __future__ import annotations

from tests.stages.adjoints.arithmetic import functions
from tests.stages.adjoints.ends import ends
from tests.stages.adjoints.experts import experts
from tests.stages.adjoints.regions import regions
from tests.stages.adjoints.weights import lanes_and_streams, weights
from tests.stages.adjoints.world import Case


def all_cases() -> list[Case]:
    """Every row."""
    return [*functions(), *regions(), *experts(), *weights(), *lanes_and_streams(), *ends()]
