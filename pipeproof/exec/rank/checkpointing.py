"""Checkpoints of a run: checks before it starts, and how each rank saves and restores its part of a state."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.finding import Finding, PipeproofError
from pipeproof.exec.rank.adapter import RankAdapter
from pipeproof.exec.rank.framework_protocol import Arrays, Tensor, World
from pipeproof.exec.rank.job_files import CheckpointOptions, Job
from pipeproof.system_calls import lock_file
from pipeproof.verify.subject import Subject

if TYPE_CHECKING:
    from pipeproof.state.byte_ranges import ByteArray
    from pipeproof.state.state_index import Shard

PaddleWriter: TypeAlias = Callable[[Path, LoweredPlan, int, Mapping[tuple[str, str], Tensor]], None]
"""Writer of a rank's part of a state, by weight and slot, into a directory."""


def prepare_checkpoint(
    options: CheckpointOptions, subject: Subject, digest: str, on_note: Callable[[Finding], None] = lambda _: None
) -> CheckpointOptions:
    """Check the state to resume from and the directory to save to, before any process starts; resolve their paths.

    ``on_note`` is called with the note if steps get other micro-batches than the state's steps.

    Raises:
        StateError: the state does not exist, is incomplete or does not fit the plan, or there is no room to save.
    """
    if options.root is None and options.resume is None:
        return options
    from pipeproof.state.read_state import find_state, require_free_steps
    from pipeproof.state.resume_check import data_done, data_note, require_resumable

    _require_paddle(options, subject)
    num_steps = subject.plan.spec.run.steps
    if options.resume is not None:
        state = find_state(options.resume)
        index, changed = state.index, require_resumable(state, subject.plan, digest)
        data_before = index.data_before
        if changed is not None:
            data_before = data_done(index)
            on_note(data_note(changed, index))
        options = replace(
            options,
            resume=state.directory.resolve(),
            first_step=state.steps_done,
            reference_from_state=index.digest != digest or not index.from_beginning or index.is_weights_only,
            data_before=None if data_before is None else data_before.model_dump(),
        )
    if options.root is not None:
        require_free_steps(options.root, options.first_step + 1, num_steps)
        options.root.mkdir(parents=True, exist_ok=True)
        options = replace(options, root=options.root.resolve())
    return options


@contextlib.contextmanager
def only_writer(options: CheckpointOptions) -> Iterator[None]:
    """Lock the directory of states until the end of the block: two runs would remove each other's files.

    The kernel removes the lock when the process ends. A file system without directory locks is not locked.

    Raises:
        StateError: another run saves there.
    """
    if options.root is None:
        yield
        return
    from pipeproof.state.state_codes import StateError

    handle = os.open(options.root, os.O_RDONLY)
    try:
        is_free = True
        with contextlib.suppress(OSError):  # NFS refuses locks of directories that are open to be read
            is_free = lock_file(handle)
        if not is_free:
            fix = "wait for its end, or name another directory"
            raise StateError(f"another run saves its states in {options.root}", fix)
        yield
    finally:
        os.close(handle)


def _require_paddle(options: CheckpointOptions, subject: Subject) -> None:
    backend = subject.plan.spec.run.backend
    if options.by_paddle and backend != "paddle":
        from pipeproof.state.state_codes import FLEX_UNSUPPORTED

        raise PipeproofError(
            FLEX_UNSUPPORTED.finding(
                f"the plan runs on {backend}, and only Paddle can write a Paddle checkpoint",
                location=subject.locate("run", "backend"),
                help="save without `--save-format flex`: the state's files are safetensors either way",
            )
        )


def restore_state(adapter: RankAdapter, arrays: Arrays, plan: LoweredPlan, rank: int, directory: Path) -> None:
    """Give a rank its part of a saved state; all parts are read before any value is replaced."""
    from pipeproof.state.read_state import SavedState, read_rank_state
    from pipeproof.state.state_index import read_index

    content = read_rank_state(SavedState(directory, read_index(directory)), plan, rank)
    adapter.restore_state({key: arrays.from_bytes(a.content, a.shape, a.dtype) for key, a in content.items()})


def save_state(
    job: Job,
    adapter: RankAdapter,
    arrays: Arrays,
    world: World,
    plan: LoweredPlan,
    steps_done: int,
    emit: Callable[..., None],
    write_by_paddle: PaddleWriter | None,
) -> None:
    """Write this rank's part of the state; rank 0 gives the state its final name when all ranks have written.

    Every rank must call this at the same step. With ``write_by_paddle`` Paddle writes the files.
    """
    from pipeproof.state.state_index import DataPosition
    from pipeproof.state.write_state import finish_state, partial_directory, write_rank_state

    assert job.checkpoint.root is not None, "states are saved only with --save"
    emit("setup", what=f"saving the state after step {steps_done - 1}")
    name = job.name
    directory = partial_directory(job.checkpoint.root, steps_done, name)
    if write_by_paddle is not None:
        write_by_paddle(directory, plan, world.rank, adapter.state())
    else:
        shards = rank_shards(adapter, arrays, plan, world.rank)
        write_rank_state(job.checkpoint.root, steps_done, name, world.rank, shards)
    world.barrier()
    if world.rank == 0:
        if write_by_paddle is not None:
            from pipeproof.state.flex.flex_output import require_all_written

            require_all_written(directory, plan)
        version = str(sys.modules[plan.spec.run.backend].__version__)  # the framework runs in this process
        before = job.checkpoint.data_before
        finish_state(
            job.checkpoint.root,
            steps_done,
            name,
            plan,
            job.digest,
            version,
            from_beginning=not job.checkpoint.reference_from_state,
            data_before=None if before is None else DataPosition.model_validate(before),
        )
    emit("setup", what="running")


def rank_shards(adapter: RankAdapter, arrays: Arrays, plan: LoweredPlan, rank: int) -> dict[Shard, ByteArray]:
    """Return the shards that a rank writes, with their content."""
    from pipeproof.state.byte_ranges import ByteArray
    from pipeproof.state.state_layout import shards_of_rank

    state, content = adapter.state(), {}
    for own in shards_of_rank(plan, rank):
        if own.writer == rank:
            tensor = state[own.weight, own.slot]
            assert arrays.dtype(tensor) == own.tensor.dtype, (own.shard.tensor, arrays.dtype(tensor))
            content[own.shard] = ByteArray(own.tensor.dtype, own.shape, arrays.to_bytes(tensor))
    return content


def remove_unfinished(options: CheckpointOptions, job: str) -> None:
    """Remove the unfinished states of the run ``job``, and the directory if it is empty then."""
    if options.root is None:
        return
    from pipeproof.state.write_state import remove_partial_states

    remove_partial_states(options.root, job)
    if options.root.is_dir() and not any(options.root.iterdir()):
        shutil.rmtree(options.root, ignore_errors=True)


def checkpoint_lines(options: CheckpointOptions, steps: Sequence[int]) -> list[str]:
    """Lines that a finished run prints about state; ``steps`` are the steps that it ran."""
    lines = []
    if options.resume is not None:
        start = f"resumed from the state after step {steps[0] - 1}" if steps[0] else "began with the state's weights"
        of_reference = "; so did the reference: training this plan from step 0 does not lead to these bits"
        lines.append(start + (of_reference if options.reference_from_state else ""))
    if options.root is not None:
        lines.append(f"saved the state after step {steps[-1]}; to resume: pipeproof run PLAN --resume {options.root}")
    return lines
