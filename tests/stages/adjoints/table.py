"""The table: the operations of a framework's stages on generic values, with sizes that differ where they can."""

from __future__ import annotations

from tests.stages.adjoints.arithmetic import functions
from tests.stages.adjoints.ends import ends
from tests.stages.adjoints.experts import experts
from tests.stages.adjoints.regions import regions
from tests.stages.adjoints.weights import lanes_and_streams, weights
from tests.stages.adjoints.world import Backend, Case


def shared_cases(fw: Backend) -> list[Case]:
    """Every row that both frameworks have."""
    return [*functions(fw), *regions(fw), *experts(fw), *weights(fw), *lanes_and_streams(fw), *ends(fw)]
