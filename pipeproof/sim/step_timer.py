"""Step times of one graph under many durations, such as those of slow ranks or of random noise."""

from __future__ import annotations

from fractions import Fraction
from importlib.util import find_spec

import numpy as np

from pipeproof.comm.channel_models import ChannelModel
from pipeproof.schedule.op_table import OpGraph
from pipeproof.sim.fast_engine import NotTimedError, run_fast
from pipeproof.sim.longest_paths import COMPILED_ABOVE
from pipeproof.sim.op_durations import Durations
from pipeproof.sim.outcome import refuse_unfinished
from pipeproof.sim.simpy_model import run_model


class StepTimer:
    """Times one graph again and again: by longest paths, and where these do not apply by the reference model.

    ``num_runs`` is the number of expected calls; many of them are compiled if numba is installed.
    """

    def __init__(self, graph: OpGraph, model: ChannelModel, num_runs: int) -> None:
        self._graph, self._model = graph, model
        # Compiling pays once all runs together are as many operations as make it worth while in one graph.
        self._compiled = num_runs * graph.num_ops > COMPILED_ABOVE and find_spec("numba") is not None

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
            starts = [start for start in outcome.starts if start is not None]
            ends = [end for end in outcome.ends if end is not None]
            return Fraction(max(ends) - min(starts), durations.ticks_per_us)
        return Fraction(int(np.max(times.ends)) - int(np.min(times.starts)), durations.ticks_per_us)
