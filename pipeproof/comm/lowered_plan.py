"""A lowered plan: its context and its op graph."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from pipeproof.comm.op_graph import unfold
from pipeproof.comm.plan_context import PlanContext
from pipeproof.schedule.op_table import OpGraph


@dataclass(frozen=True, kw_only=True)
class LoweredPlan(PlanContext):
    """A plan with everything that is derived from it: one object for rules, simulator and executor.

    ``graph`` has all operations. The digest is of ``canonical``: the folded
    graph, even if ``graph`` is unfolded.
    """

    graph: OpGraph
    canonical: OpGraph

    @classmethod
    def of(cls, context: PlanContext, graph: OpGraph) -> LoweredPlan:
        """The plan of a context with its folded graph."""
        values = {field.name: getattr(context, field.name) for field in fields(PlanContext)}
        return cls(**values, graph=graph, canonical=graph)

    @property
    def folded(self) -> bool:
        """True if a rank of ``graph`` represents several ranks of the mesh."""
        return self.graph.num_ranks < self.mesh.num_ranks

    def with_graph(self, graph: OpGraph) -> LoweredPlan:
        """Return the same plan with ``graph`` in place of the lowered one."""
        lowered = self.graph
        if (graph.tensors, graph.groups) == (lowered.tensors, lowered.groups) and graph.columns.equals(lowered.columns):
            return replace(self, graph=graph)
        return replace(self, graph=graph, canonical=graph)

    def unfolded(self) -> LoweredPlan:
        """Return the same plan with a graph in which every rank represents itself."""
        return replace(self, graph=unfold(self, self.graph)) if self.folded else self
