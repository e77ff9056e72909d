"""The key ``model.hyper_connections``: several residual streams in place of one."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class HyperConnectionsSpec(BaseModel):
    """Manifold-constrained hyper-connections (arXiv:2512.24880, after arXiv:2409.19606).

    Blocks pass on several residual streams in place of one. Attention and MLP
    read a mix of them, and what they make is added to each; meanwhile a doubly
    stochastic matrix of each token's own mixes the streams.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    streams: int = Field(
        ge=2,
        le=64,
        description="Number of residual streams: what crosses between two blocks is as many times as wide.",
    )
    sinkhorn_iterations: int = Field(
        default=20,
        ge=1,
        le=1000,
        description="How often columns, and then rows, of the matrix that mixes streams are divided by their sums.",
    )

    @property
    def num_gates(self) -> int:
        """Numbers of each token that say how its streams are read, written and mixed."""
        return self.streams * (self.streams + 2)
