"""Many runs of one step, each with durations of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from importlib.util import find_spec
from typing import Literal

import numpy as np

from pipeproof.analysis.jitter.disturbed_durations import Disturbance
from pipeproof.analysis.jitter.noise import Noise
from pipeproof.analysis.jitter.quantiles import Estimate, mean, quantile
from pipeproof.comm.backend_rows import BackendTable
from pipeproof.comm.channel_models import ChannelModel
from pipeproof.comm.lowered_plan import LoweredPlan
from pipeproof.schedule.op_table import OpGraph
from pipeproof.sim.contention import require_own_links
from pipeproof.sim.fast_engine import NotTimedError, run_fast
from pipeproof.sim.longest_paths import COMPILED_ABOVE
from pipeproof.sim.op_durations import Durations, durations_of
from pipeproof.sim.outcome import refuse_unfinished
from pipeproof.sim.simpy_model import run_model
from pipeproof.sim.simulate import channel_model_of

QUANTILES = (Fraction(5, 100), Fraction(50, 100), Fraction(95, 100), Fraction(99, 100))

MOST_UNFOLDED = 300_000
"""Operations up to which replicas that a graph has once are drawn one by one."""

EngineName = Literal["fast", "simpy"]


@dataclass(frozen=True)
class JitterRuns:
    """The makespans of all runs, in exact microseconds.

    ``undisturbed`` is the makespan without noise. ``engines`` are what timed
    the runs. ``replicas`` is how many ranks each rank of the graph represents;
    they are disturbed alike.
    """

    noise: Noise
    undisturbed: Fraction
    makespans: tuple[Fraction, ...]
    engines: frozenset[EngineName]
    replicas: int

    @cached_property
    def ordered(self) -> tuple[Fraction, ...]:
        """The makespans from the shortest to the longest."""
        return tuple(sorted(self.makespans))

    @cached_property
    def mean(self) -> Estimate:
        """The mean makespan."""
        return mean(self.makespans)

    @cached_property
    def quantiles(self) -> Mapping[Fraction, Estimate]:
        """The makespans that ``QUANTILES`` of the runs do not exceed."""
        return {share: quantile(self.ordered, share) for share in QUANTILES}

    @property
    def longest(self) -> Fraction:
        """The makespan of the worst run."""
        return self.ordered[-1]


def run_jitter(lowered: LoweredPlan, noise: Noise, num_runs: int, *, backend: BackendTable | None = None) -> JitterRuns:
    """Time ``num_runs`` steps with noise, runs 0 to ``num_runs - 1``. Linear in runs times operations.

    Replicas that a large plan has once are unfolded up to ``MOST_UNFOLDED``
    operations, so that each draws for itself.

    Raises:
        SimulationError: the program cannot finish.
        BadPlanAtError: PP106, messages and collectives share links.
        ValueError: there is to be no run, or a rank of ``noise.slow`` is not one of the plan's.
    """
    require_own_links(lowered)
    if num_runs < 1:
        raise ValueError(f"{num_runs} runs: there must be at least one")
    for rank in noise.slow:
        if not 0 <= rank < lowered.mesh.num_ranks:
            raise ValueError(f"rank {rank} is to be slow: the plan has ranks 0..{lowered.mesh.num_ranks - 1}")
    if lowered.folded and lowered.graph.num_ops * _replicas(lowered) <= MOST_UNFOLDED:
        lowered = lowered.unfolded()
    graph = lowered.graph
    disturbance = Disturbance(
        graph,
        durations_of(lowered),
        noise,
        slow=_slow_in_graph(lowered, noise.slow),
        replicas=_replicas(lowered),
    )
    timer = StepTimer(graph, channel_model_of(lowered, backend), num_runs + 1)
    undisturbed = timer.makespan(disturbance.undisturbed)
    makespans = tuple(timer.makespan(disturbance.of_run(run)) for run in range(num_runs))
    return JitterRuns(noise, undisturbed, makespans, frozenset(timer.engines), _replicas(lowered))


class StepTimer:
    """Times one graph again and again: by longest paths, and where these do not apply by the reference model."""

    def __init__(self, graph: OpGraph, model: ChannelModel, num_runs: int) -> None:
        self._graph, self._model = graph, model
        # Compiling pays once all runs together are as many operations as make it worth while in one graph.
        self._compiled = num_runs * graph.num_ops > COMPILED_ABOVE and find_spec("numba") is not None
        self.engines: set[EngineName] = set()

    def makespan(self, durations: Durations) -> Fraction:
        """From the first start to the last end, in microseconds.

        Raises:
            SimulationError: the program cannot finish.
        """
        try:
            times = run_fast(self._graph, durations, self._model, compiled=self._compiled)
        except NotTimedError:
            outcome = run_model(self._graph, durations, self._model)
            refuse_unfinished(self._graph, outcome)
            self.engines.add("simpy")
            starts = [start for start in outcome.starts if start is not None]
            ends = [end for end in outcome.ends if end is not None]
            return Fraction(max(ends) - min(starts), durations.ticks_per_us)
        self.engines.add("fast")
        return Fraction(int(np.max(times.ends)) - int(np.min(times.starts)), durations.ticks_per_us)


def folded(lowered: LoweredPlan) -> LoweredPlan:
    """The plan with replicas once."""
    return replace(lowered, graph=lowered.canonical)


def _replicas(lowered: LoweredPlan) -> int:
    return lowered.mesh.num_ranks // lowered.graph.num_ranks


def _slow_in_graph(lowered: LoweredPlan, slow: Mapping[int, float]) -> dict[int, float]:
    """Slow ranks by their index in the graph; the slowest of the replicas that one rank represents."""
    mesh, graph = lowered.mesh, lowered.graph
    index_of = {rank: index for index, rank in enumerate(graph.global_rank)}
    coords = [mesh.coords(rank) for rank in graph.global_rank]
    distinct = {axis for axis in mesh.axes if len({point[axis] for point in coords}) > 1}
    result: dict[int, float] = {}
    for rank, factor in slow.items():
        folded = mesh.rank({axis: i if axis in distinct else 0 for axis, i in mesh.coords(rank).items()})
        index = index_of[folded]
        result[index] = max(factor, result.get(index, factor))
    return result
