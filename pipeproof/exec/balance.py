"""What the routers of a rank's stages have to do at the borders of a step: sum visits, move biases, show both."""

from __future__ import annotations

from collections.abc import Mapping

from pipeproof.comm.expert_loads import load_sums
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.exec.children import ChildCollectives
from pipeproof.exec.framework import Array, Routers, Tensor
from pipeproof.schedule.ops import Op
from pipeproof.stages.describe.balance import bias_name


class RankBalance:
    """The routers of all stages of one rank; ``children`` issues collectives below the operation that runs."""

    def __init__(self, plan: LoweredPlan, routers: Mapping[int, Routers], children: ChildCollectives) -> None:
        self._plan, self._routers, self._children = plan, routers, children

    def begin(self) -> None:
        """Forget the step before."""
        for routers in self._routers.values():
            routers.begin()

    def sum_loads(self, reduce: Op) -> None:
        """What a ``REDUCE_GRAD`` has to sum beside gradients."""
        axis = str(reduce.axis)
        if not load_sums(self._plan, reduce.stage, axis):
            return
        routers = self._routers[reduce.stage]
        for experts in routers.biased():
            total = self._children.reduce_over(axis, routers.load(experts), "sum", bias_name(experts))
            routers.set_load(experts, total)

    def end_step(self, stage: int) -> None:
        """Move the biases of a stage."""
        if stage in self._routers:
            self._routers[stage].move_biases()

    def state(self) -> dict[tuple[str, str], Tensor]:
        """Each bias, by its router and the slot ``bias``."""
        return {(one, "bias"): routers.bias(one) for routers in self._routers.values() for one in routers.biased()}

    def put_state(self, state: Mapping[tuple[str, str], Tensor]) -> None:
        """Go on with what ``state`` gave."""
        for routers in self._routers.values():
            for one in routers.biased():
                routers.put_bias(one, state[one, "bias"])

    def shown(self) -> dict[str, Array]:
        """What there is to compare of the rank's routers after a step, by name."""
        return {name: array for routers in self._routers.values() for name, array in routers.shown().items()}
