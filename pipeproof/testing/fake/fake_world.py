"""World of fake ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pipeproof.comm.channel_models import MODELS, ChannelModel
from pipeproof.schedule.op_table import Group
from pipeproof.schedule.ops import AXES
from pipeproof.testing.fake.fake_engine import Engine
from pipeproof.testing.fake.fake_operations import DeadlockError, times_of
from pipeproof.testing.fake.fake_rank import FakeRank
from pipeproof.testing.fake.fake_run import FakeRun, Running

RankProgram = Callable[[FakeRank], Any]
"""Program of one rank, in ordinary blocking calls."""

DEFAULT_MODEL = ChannelModel("pair")
"""One FIFO between two ranks and no buffers: two ranks that both send first deadlock."""


class FakeWorld:
    """Ranks that run in this process, on configurable channels.

    Args:
        num_ranks: number of ranks.
        semantics: which transfers wait for each other, when a send is done,
            whether posts block the host, whether connections open at first
            use: a ``ChannelModel``; the default is ``DEFAULT_MODEL``.
        network: times of messages and collectives, with the keys of a
            plan's ``cost.network``; without it they take no time.
        groups: by axis (``pp``, ``dp``, ``tp``, ``cp``, ``ep``), groups of
            ranks for collectives. Without ``pp``, all ranks are one group of
            that axis.

    Raises:
        ValueError: no ranks, invalid groups, or an invalid network.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        semantics: ChannelModel = DEFAULT_MODEL,
        network: Mapping[str, Any] | None = None,
        groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ) -> None:
        if num_ranks < 1:
            raise ValueError(f"a world has at least one rank, not {num_ranks}")
        self.num_ranks, self.semantics = num_ranks, semantics
        self._times = times_of(network)
        self._groups = _groups(num_ranks, {"pp": [range(num_ranks)], **(groups or {})})

    def run(self, program: RankProgram | Sequence[RankProgram]) -> FakeRun:
        """Run one program on every rank, or one for each, until all have ended.

        Raises:
            DeadlockError: ranks wait for each other; the message is the shortest cycle, with files and lines.
            NeverComesError: a rank waits for an operation that no rank issues.
            UnmatchedError: all programs ended, and a transfer is unmatched.
            MismatchError: matched operations disagree.
            RaceError: an array was written while a send read it.
            ValueError: the number of programs, or a call's arguments.
            Exception: any error of a program, with a note that names the rank.
        """
        return self._run(program, self.semantics)

    def failing_models(self, program: RankProgram | Sequence[RankProgram]) -> tuple[ChannelModel, ...]:
        """Return the channel models of ``pipeproof.comm.channel_models.MODELS`` under which programs deadlock.

        Programs are run again for each model: they must not keep state between runs.
        """
        failing = []
        for model in MODELS:
            try:
                self._run(program, model)
            except DeadlockError:
                failing.append(model)
        return tuple(failing)

    def _run(self, program: RankProgram | Sequence[RankProgram], model: ChannelModel) -> FakeRun:
        programs = [program] * self.num_ranks if callable(program) else list(program)
        if len(programs) != self.num_ranks:
            raise ValueError(f"{len(programs)} programs for {self.num_ranks} ranks")
        engine = Engine(self.num_ranks, model, self._times)
        return Running(engine, self._groups, [partial(self._started, each) for each in programs]).run()

    def _started(self, program: RankProgram, run: Running, rank: int) -> Any:
        return program(FakeRank(rank, self.num_ranks, run))


def _groups(num_ranks: int, by_axis: Mapping[str, Sequence[Sequence[int]]]) -> tuple[Group, ...]:
    groups = []
    for axis, members in by_axis.items():
        if axis not in AXES:
            raise ValueError(f"axis {axis!r} is none of {', '.join(AXES)}")
        ranks = [rank for group in members for rank in group]
        if len(set(ranks)) < len(ranks) or not all(0 <= rank < num_ranks for rank in ranks):
            raise ValueError(f"groups of {axis}: each rank 0..{num_ranks - 1} is in at most one, found {ranks}")
        groups += [Group(axis, tuple(group)) for group in members]
    return tuple(groups)
