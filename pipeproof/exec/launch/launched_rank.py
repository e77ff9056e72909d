"""Identity of this process among those that a launcher started, by the table of launchers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.store.launcher_table import LAUNCHERS, SLURM, LauncherRow, Source, value_of
from pipeproof.exec.store.run_codes import WORLD_SIZE

_T = TypeVar("_T")
_Environment = Mapping[str, str]


@dataclass(frozen=True)
class LaunchedRank:
    """Identity of this process among those that a launcher started; see ``LauncherRow`` for the fields."""

    launcher: LauncherRow
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    host: int | None
    master: tuple[str, int]
    """Host and port at which rank 0's store listens."""
    run_id: str
    attempt: int

    @property
    def is_on_several_hosts(self) -> bool:
        """True if the launcher states that other hosts have ranks."""
        return self.local_world_size not in (None, self.world_size)


def launcher_of(environment: _Environment, backend: str) -> LauncherRow | None:
    """Innermost launcher that started this process as one of several, or None.

    Raises:
        ValueError: Slurm's variables are those of a batch script that was to be a task.
    """
    for row in sorted(LAUNCHERS, key=lambda row: row.backend != backend if row.backend else 2):
        if any(all(environment.get(name) for name in group) for group in row.marks):
            return None if row.starts_one(environment) else row
    return None


def launched_rank(environment: _Environment, backend: str) -> LaunchedRank | None:
    """Rank of this process if a launcher started it as one of several, else None.

    ``backend`` is the framework of the plan.

    Raises:
        PipeproofError: PP907, the variables are incomplete or contradict each other.
    """
    row: LauncherRow | None = SLURM  # the only row that may refuse before it is chosen
    try:
        row = launcher_of(environment, backend)
        return None if row is None else _read(row, environment)
    except ValueError as error:
        assert row is not None
        raise _refusal(row, str(error)) from error


def _read(row: LauncherRow, environment: _Environment) -> LaunchedRank:
    def required(sources: tuple[Source[_T], ...], about: str) -> _T:
        value = value_of(sources, environment)
        if value is None:
            missing = " or ".join(
                " and ".join(name for name in source.names if not environment.get(name)) for source in sources
            )
            raise ValueError(f"the variables of {row.name} are set, but {missing} is missing: {about}")
        return value

    rank = required(row.rank, "the rank")
    world_size = required(row.world_size, "the number of ranks")
    local_rank = required(row.local_rank, "the rank among those of this host")
    local_world_size = value_of(row.local_world_size, environment)
    master = required(row.master_host, "the host of rank 0"), required(row.master_port, "the port of rank 0")
    limits = [(row.rank, rank, "below", row.world_size, world_size)]
    if local_world_size is not None:
        limits += [
            (row.local_rank, local_rank, "below", row.local_world_size, local_world_size),
            (row.local_world_size, local_world_size, "at most", row.world_size, world_size),
        ]
    for sources, value, relation, limiting, limit in limits:
        if value > limit or (value == limit and relation == "below"):
            names = (*_names(sources, environment), *_names(limiting, environment))
            given = " and ".join(f"{name}={environment[name]}" for name in names)
            raise ValueError(f"{given} contradict each other: {value} is not {relation} {limit}")
    host = value_of(row.host, environment)
    return LaunchedRank(
        row,
        rank,
        world_size,
        local_rank,
        local_world_size,
        0 if host is None and local_world_size == world_size else host,
        master,
        run_id=value_of(row.run_id, environment) or "",
        attempt=value_of(row.attempt, environment) or 0,
    )


def _names(sources: tuple[Source[int], ...], environment: _Environment) -> tuple[str, ...]:
    """Variables of the first source that is set."""
    return next(source.names for source in sources if all(environment.get(name) for name in source.names))


def _refusal(row: LauncherRow, fact: str) -> PipeproofError:
    variables = " ".join(f"-u {name}" for name in dict.fromkeys(name for group in row.marks for name in group))
    fix = (
        f"start it with `{row.command.format(ranks='RANKS')} ...`, which sets these variables; or without a launcher, "
        f"on this host: `env {variables} pipeproof ...`"
    )
    return PipeproofError(WORLD_SIZE.finding(fact, help=fix))
