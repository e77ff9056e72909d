"""Environments of launchers: one row for each launcher that starts a process per rank.

Theory of operation
-------------------
A launcher identifies each process that it starts by variables of its environment. A process inherits the variables of
every launcher above it: under ``torchrun`` in a Slurm job it has both. The outer ones describe the process that started
the inner launcher, so only the innermost launcher describes this process. ``LAUNCHERS`` is ordered from the inside out:

1. torchrun and Paddle's launcher start one process per rank and are started by anything below. They have no order by
nesting, because nobody starts one from the other; a platform may set the variables of either for a whole container. The
launcher of the plan's framework is taken.
2. ``mpirun`` is called in a Slurm job, never the other way round. On hosts other than the first, Slurm's variables
describe Open MPI's daemon.
3. ``srun`` starts the process.

A variable with an empty value counts as missing. Each column of a row lists sources in the order in which they are
taken: a source is one or more variables that must all be set, and a function of their texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.store.run_codes import WORLD_SIZE

_TASKS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_TASK_LIST = re.compile(f"{_TASKS.pattern}(?:,{_TASKS.pattern})*")


def tasks_on_node(text: str, node: str) -> int:
    """Tasks on the node of an index, by a list of tasks per node such as ``2(x3),1``.

    Raises:
        ValueError: this is not such a list, or it has no such node.
    """
    if not _TASK_LIST.fullmatch(text):
        raise ValueError(f"{text!r} is not a list of tasks per node")
    index = int(node)
    for tasks, count in _TASKS.findall(text):
        index -= int(count or 1)
        if index < 0:
            return int(tasks)
    raise ValueError(f"{text!r} has no node {node}")


_T = TypeVar("_T")
_Environment = Mapping[str, str]


@dataclass(frozen=True)
class Source(Generic[_T]):
    """Variables that give one value together; ``read`` raises ValueError for texts that no launcher sets."""

    names: tuple[str, ...]
    read: Callable[..., _T]

    def __str__(self) -> str:
        return " and ".join(self.names)


@dataclass(frozen=True)
class LauncherRow:
    """One row. ``local`` is about the ranks of this process's host."""

    name: str
    command: str
    """Command that starts ``{ranks}`` ranks, without the command of a rank."""
    backend: str | None
    """Framework that this launcher is for, None for any."""
    marks: tuple[tuple[str, ...], ...]
    """Groups of variables; this launcher sets one whole group in every process that it starts."""
    rank: tuple[Source[int], ...]
    world_size: tuple[Source[int], ...]
    local_rank: tuple[Source[int], ...]
    local_world_size: tuple[Source[int], ...]
    """If none is set, the number is unknown."""
    master_host: tuple[Source[str], ...]
    master_port: tuple[Source[int], ...]
    """Port of the host at which rank 0's store listens."""
    run_id: tuple[Source[str], ...]
    attempt: tuple[Source[int], ...]
    """Number of earlier starts of this run; 0 if none is set."""
    starts_one: Callable[[_Environment], bool] = lambda _: False
    """True for an environment that belongs to a single program, which may start the ranks itself."""


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"{text!r} is not a number")
    return int(text)


def _numbers(*names: str) -> tuple[Source[int], ...]:
    return tuple(Source((name,), _count) for name in names)


def _texts(*names: str) -> tuple[Source[str], ...]:
    return tuple(Source((name,), str) for name in names)


def _port(text: str) -> int:
    number = _count(text)
    if not 0 < number < 65_536:
        raise ValueError(f"there is no port {text}")
    return number


def _endpoint(text: str) -> tuple[str, int]:
    """First host and port of a list ``host:port,...``."""
    host, colon, port = text.partition(",")[0].rpartition(":")
    if not colon or not host:
        raise ValueError(f"{text!r} is not host:port")
    return host, _port(port)


_MASTER_HOST, _MASTER_PORT = Source(("MASTER_ADDR",), str), Source(("MASTER_PORT",), _port)
"""PyTorch's pair, which a user may export for every launcher."""

_INTERNAL_STEPS = 0xFFFF_FFF0
"""Step ids from here on are Slurm's own: 0xfffffffa is the shell of an allocation (slurm.h, SLURM_INTERACTIVE_STEP)."""


def _is_alone_in_slurm(environment: _Environment) -> bool:
    """Return True in an allocation's shell, and in a step of one task, as of ``srun --pty bash``."""
    num_tasks = value_of(SLURM.world_size, environment)
    if step := environment.get("SLURM_STEP_ID"):
        return _count(step) >= _INTERNAL_STEPS or num_tasks == 1
    if num_tasks is not None and num_tasks > 1:
        raise ValueError(
            f"SLURM_PROCID is {environment['SLURM_PROCID']} and SLURM_NTASKS is {num_tasks}, but SLURM_STEP_ID is "
            "missing: this is the batch script, which runs once, and not a task of srun"
        )
    return True


# Sources: torch/distributed/elastic/agent/server/local_elastic_agent.py, _start_workers. ft_launcher (NVIDIA Resiliency
# Extension) is derived from it. torchrun sets all of them. Where the variables are set by hand, as by pipeproof itself,
# only RANK to LOCAL_RANK and the address are required.
TORCHRUN = LauncherRow(
    name="torchrun, ft_launcher",
    command="torchrun --nproc-per-node {ranks}",
    backend="torch",
    marks=(("RANK", "WORLD_SIZE"),),  # either alone is too common a name
    rank=_numbers("RANK"),
    world_size=_numbers("WORLD_SIZE"),
    local_rank=_numbers("LOCAL_RANK"),
    local_world_size=_numbers("LOCAL_WORLD_SIZE"),
    master_host=(_MASTER_HOST,),
    master_port=(_MASTER_PORT,),
    run_id=_texts("TORCHELASTIC_RUN_ID"),
    attempt=_numbers("TORCHELASTIC_RESTART_COUNT"),
)

# Sources: paddle/distributed/launch/controllers/collective.py, _build_pod_with_args and _build_pod_with_master, for the
# rank, the sizes and the addresses; paddle/distributed/parallel.py, init_parallel_env, for the order of the addresses.
# The launcher counts no restarts. paddle/distributed/launch/context/args_envs.py reads PADDLE_JOB_ID, which processes
# inherit. paddle.distributed.spawn, for one host, sets no local rank: it is the rank.
PADDLE = LauncherRow(
    name="paddle.distributed.launch",
    command="python -m paddle.distributed.launch --nproc_per_node {ranks}",
    backend="paddle",
    marks=(("PADDLE_TRAINER_ID",),),
    rank=_numbers("PADDLE_TRAINER_ID"),
    world_size=_numbers("PADDLE_TRAINERS_NUM"),
    local_rank=_numbers("PADDLE_LOCAL_RANK", "PADDLE_RANK_IN_NODE", "PADDLE_TRAINER_ID"),
    local_world_size=_numbers("PADDLE_LOCAL_SIZE"),
    master_host=(
        Source(("MASTER_ADDR", "MASTER_PORT"), lambda host, _: host),  # init_parallel_env takes both or none
        *(Source((name,), lambda text: _endpoint(text)[0]) for name in ("PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS")),
    ),
    master_port=(
        Source(("MASTER_ADDR", "MASTER_PORT"), lambda _, port: _port(port)),
        *(Source((name,), lambda text: _endpoint(text)[1]) for name in ("PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS")),
    ),
    run_id=_texts("PADDLE_JOB_ID"),
    attempt=(),
)

# Sources: docs.open-mpi.org, "Environment variables set for MPI applications". They name no address:
# OMPI_MCA_orte_hnp_uri is mpirun's address, whose host need not have rank 0. PMIX_NAMESPACE is the job's name in PMIx
# (pmix_client.c).
OPEN_MPI = LauncherRow(
    name="Open MPI",
    command="mpirun -n {ranks} -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500",
    backend=None,
    marks=(("OMPI_COMM_WORLD_RANK",),),
    rank=_numbers("OMPI_COMM_WORLD_RANK"),
    world_size=_numbers("OMPI_COMM_WORLD_SIZE"),
    local_rank=_numbers("OMPI_COMM_WORLD_LOCAL_RANK"),
    local_world_size=_numbers("OMPI_COMM_WORLD_LOCAL_SIZE"),
    master_host=(_MASTER_HOST,),
    master_port=(_MASTER_PORT,),
    run_id=_texts("PMIX_NAMESPACE"),
    attempt=(),
)

# Sources: man srun, "OUTPUT ENVIRONMENT VARIABLES". The STEP variables are of the step; SLURM_NTASKS may be the
# allocation's, which can be larger. sbatch sets
# SLURM_PROCID and SLURM_NTASKS for its script, too, but no SLURM_STEP_ID; salloc sets no SLURM_PROCID.
# SLURM_RESTART_COUNT is set only in a job that was requeued.
SLURM = LauncherRow(
    name="Slurm (srun)",
    command="srun --ntasks {ranks} --export=ALL,MASTER_ADDR=HOST_OF_RANK_0,MASTER_PORT=29500",
    backend=None,
    marks=(("SLURM_PROCID",),),
    rank=_numbers("SLURM_PROCID"),
    world_size=_numbers("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_rank=_numbers("SLURM_LOCALID"),
    local_world_size=(Source(("SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"), tasks_on_node),),
    master_host=(_MASTER_HOST,),
    master_port=(_MASTER_PORT,),
    run_id=(Source(("SLURM_JOB_ID", "SLURM_STEP_ID"), "{}.{}".format),),
    attempt=_numbers("SLURM_RESTART_COUNT"),
    starts_one=_is_alone_in_slurm,
)

LAUNCHERS = (TORCHRUN, PADDLE, OPEN_MPI, SLURM)
"""From the inside out. The plan's framework decides between the first two."""

OF_BACKEND = {"torch": TORCHRUN, "paddle": PADDLE}
"""LauncherRow of each framework."""


def value_of(sources: tuple[Source[_T], ...], environment: _Environment) -> _T | None:
    """Value of the first source that is set, or None.

    Raises:
        ValueError: the text of a variable is wrong; the message names it.
    """
    for source in sources:
        texts = [environment.get(name, "") for name in source.names]
        if all(texts):
            try:
                return source.read(*texts)
            except ValueError as error:
                assignments = " and ".join(f"{name}={text}" for name, text in zip(source.names, texts, strict=True))
                raise ValueError(f"{assignments}: {error}") from error
    return None


# --- Identity of this process among those that a launcher started, by the table ---


@dataclass(frozen=True)
class LaunchedRank:
    """Identity of this process among a launcher's processes; see ``LauncherRow`` for the fields."""

    launcher: LauncherRow
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
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
        ValueError: Slurm's variables belong to a batch script that was meant to be a task.
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
    local_rank = required(row.local_rank, "the rank on this host")
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
            assignments = " and ".join(f"{name}={environment[name]}" for name in names)
            raise ValueError(f"{assignments} contradict each other: {value} is not {relation} {limit}")
    return LaunchedRank(
        row,
        rank,
        world_size,
        local_rank,
        local_world_size,
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
