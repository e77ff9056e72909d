"""What the routers of a rank's stages have to do at the borders of a step: sum visits, move biases, show both."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import paddle

from pipeproof.comm.expert_loads import load_sums
from pipeproof.comm.lowered import LoweredPlan
from pipeproof.exec.paddle_children import ChildCollectives
from pipeproof.exec.paddle_stages import GptStage, RankStage
from pipeproof.schedule.ops import Op
from pipeproof.stages.describe.balance import bias_name


class RankBalance:
    """The routers of all stages of one rank; ``children`` issues collectives below the operation that runs."""

    def __init__(self, plan: LoweredPlan, stages: Mapping[int, RankStage], children: ChildCollectives) -> None:
        self._plan, self._children = plan, children
        self._balances = {number: stage.balance for number, stage in stages.items() if isinstance(stage, GptStage)}

    def begin(self) -> None:
        """Forget the step before."""
        for balance in self._balances.values():
            balance.begin()

    def sum_loads(self, reduce: Op) -> None:
        """What a ``REDUCE_GRAD`` has to sum beside gradients."""
        axis = str(reduce.axis)
        if not load_sums(self._plan, reduce.stage, axis):
            return
        balance = self._balances[reduce.stage]
        for experts in balance.biases:
            own = paddle.to_tensor(balance.load(experts))
            total = self._children.reduce_over(axis, own, "sum", bias_name(experts))
            balance.set_load(experts, total.numpy())

    def end_step(self, stage: int) -> dict[str, np.ndarray]:
        """Move the biases of a stage; what there is to compare of its routers, by name."""
        if stage not in self._balances:
            return {}
        self._balances[stage].move_biases()
        return self._balances[stage].shown()
