"""Noise of operation times: distributions, random streams and seeds.

Factors have mean 1, so that an operation takes its given time on average, and
a *coefficient of variation* (cv, standard deviation over mean):

- ``lognormal``: the exponential of a normal variable of variance
  ln(1 + cv^2) and mean minus half of that;
- ``gamma``: shape 1 / cv^2, scale cv^2, with lighter tails.

Each run has random streams of its own, keyed by (seed, run, what they are
for): a run does not depend on the other runs, and more noise on
messages leaves the draws of computations as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Distribution = Literal["lognormal", "gamma"]
FloatColumn = NDArray[np.float64]

MAX_CV = 10.0
MAX_FACTOR = 1000.0


class Stream(IntEnum):
    """Purposes of the random numbers of a run."""

    COMPUTE = 0
    NETWORK = 1
    STRAGGLERS = 2


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise of the runs of a step.

    Args:
        compute_cv: coefficient of variation of each computation, drawn one by one.
        network_cv: the same of each message and each collective.
        distribution: of both.
        slow: by global rank, the factor by which all its computations take longer, in every run.
        straggler_probability: that a rank is slow in a run, each rank by itself.
        straggler_factor: by which the computations of such a rank take longer.
        seed: of all random numbers.

    Raises:
        ValueError: a figure is out of bounds.
    """

    compute_cv: float = 0.0
    network_cv: float = 0.0
    distribution: Distribution = "lognormal"
    slow: Mapping[int, float] = field(default_factory=dict)
    straggler_probability: float = 0.0
    straggler_factor: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, cv in (("compute_cv", self.compute_cv), ("network_cv", self.network_cv)):
            if not 0 <= cv <= MAX_CV:
                raise ValueError(f"{name} must be from 0 to {MAX_CV:g}, found {cv}")
        for factor in (*self.slow.values(), self.straggler_factor):
            if not 0 < factor <= MAX_FACTOR:
                raise ValueError(f"a rank is slow by a factor above 0 and at most {MAX_FACTOR:g}, found {factor}")
        if not 0 <= self.straggler_probability <= 1:
            raise ValueError(f"straggler_probability must be from 0 to 1, found {self.straggler_probability}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, found {self.seed}")

    def generator(self, run: int, stream: Stream) -> np.random.Generator:
        """The random numbers of a run for one use."""
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.seed, spawn_key=(run, int(stream)))))

    def factors(self, run: int, stream: Stream, cv: float, count: int) -> FloatColumn:
        """``count`` factors of mean 1; all are 1 without variation."""
        if cv == 0:
            return np.ones(count)
        generator = self.generator(run, stream)
        if self.distribution == "gamma":
            return generator.gamma(1 / cv**2, cv**2, count)
        variance = math.log1p(cv**2)
        return np.exp(generator.normal(-variance / 2, math.sqrt(variance), count))

    def stragglers(self, run: int, num_ranks: int, replicas: int) -> NDArray[np.bool_]:
        """Ranks of a graph that are slow in a run: those with a slow rank among their ``replicas``."""
        some = 1 - (1 - self.straggler_probability) ** replicas
        return self.generator(run, Stream.STRAGGLERS).random(num_ranks) < some
