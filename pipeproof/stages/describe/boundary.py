"""The tensor that crosses every stage boundary of the plan's model."""

from __future__ import annotations

from dataclasses import dataclass

from pipeproof.specs.layout import INVARIANT, Placement, sharded
from pipeproof.specs.plan import PlanSpec


@dataclass(frozen=True, slots=True)
class Boundary:
    """Global shape of one micro-batch's activation between two layers, and how it lies over TP.

    ``dims`` names the dims in order (``sbh`` or ``bsh``); the gradient has the
    same shape and the dual placement.
    """

    dims: str
    shape: tuple[int, ...]
    tp: Placement
    dtype: str
    num_tp_ranks: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape that one rank holds."""
        return self.tp.local_shape(self.shape, self.num_tp_ranks)

    def grad_placement(self) -> Placement:
        """How the gradient of the boundary tensor lies over TP."""
        return self.tp.dual


def describe_boundary(plan: PlanSpec) -> Boundary:
    """The boundary of a GPT: invariant over TP, or sharded along the sequence with sequence parallelism."""
    dims = plan.model.activation_order
    sizes = {"s": plan.model.seq_length, "b": plan.schedule.micro_batch_size, "h": plan.model.hidden_size}
    sequence_parallel = plan.topology.sequence_parallel and plan.topology.tp > 1
    placement = sharded(dims.index("s")) if sequence_parallel else INVARIANT
    return Boundary(dims, tuple(sizes[d] for d in dims), placement, plan.run.dtype, plan.topology.tp)
