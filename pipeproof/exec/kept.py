"""State in a run: what it goes on from, and when and where each rank leaves what it has."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pipeproof.comm.lowered import LoweredPlan
from pipeproof.exec.codes import NOT_CARRIED_OUT
from pipeproof.exec.framework import Arrays, Tensor, World
from pipeproof.specs.finding import Finding, PipeproofError, Severity
from pipeproof.verify.subject import Subject

if TYPE_CHECKING:  # a job says what is kept
    from pipeproof.exec.jobs import Job
    from pipeproof.state.files import ByteArray

WriteByPaddle: TypeAlias = Callable[[Path, LoweredPlan, int, Mapping[tuple[str, str], Tensor]], None]
"""Writes a rank's part of a state, by weight and slot, into a directory."""


@dataclass(frozen=True, slots=True)
class KeptState:
    """Below which directory states are saved, after each how many steps (None: the last one alone), and where one is.

    ``resume`` is the state to go on from, and ``first_step`` the step that comes next then. With
    ``reference_from_state`` no training from step 0 on leads to that state's bits, and the reference begins with it.
    ``by_paddle``: states are saved as Paddle's own checkpoints.
    """

    root: Path | None = None
    every: int | None = None
    resume: Path | None = None
    first_step: int = 0
    reference_from_state: bool = False
    by_paddle: bool = False

    def is_due(self, step: int, num_steps: int) -> bool:
        """Whether the state after a step is to be saved."""
        if self.root is None:
            return False
        return step + 1 == num_steps or (self.every is not None and (step + 1) % self.every == 0)

    def to_json(self) -> dict[str, Any]:
        """As a job's description has it."""
        root, resume = (None if path is None else str(path) for path in (self.root, self.resume))
        return {
            "root": root,
            "every": self.every,
            "resume": resume,
            "first_step": self.first_step,
            "reference_from_state": self.reference_from_state,
            "by_paddle": self.by_paddle,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> KeptState:
        """Read what ``to_json`` gave."""
        root, resume = (None if content[key] is None else Path(content[key]) for key in ("root", "resume"))
        named = {key: content[key] for key in ("every", "first_step", "reference_from_state", "by_paddle")}
        return cls(root=root, resume=resume, **named)


class HasState(Protocol):
    """What has a rank's state: the adapter."""

    def state(self) -> dict[tuple[str, str], Tensor]:
        """By weight and slot."""
        ...

    def put_state(self, state: Mapping[tuple[str, str], Tensor]) -> None:
        """Go on with it."""
        ...


def prepared(kept: KeptState, subject: Subject, digest: str) -> KeptState:
    """What was asked for, looked at before any process starts: the state to go on from, room for those to save.

    Raises:
        StateError: there is no such state, it is not one that this plan goes on from or not whole, or there is no room.
        PipeproofError: copies of a stage change buffers of own layers.
    """
    if kept.root is None and kept.resume is None:
        return kept
    from pipeproof.state.fits import require_fits
    from pipeproof.state.load import find_state, require_room

    _require_one_of_each(subject)
    _require_paddle(kept, subject)
    num_steps = subject.plan.spec.run.steps
    if kept.resume is not None:
        state = find_state(kept.resume)
        require_fits(state, subject.plan, digest)
        is_other = state.index.digest != digest or not state.index.from_beginning or state.index.is_weights_only
        kept = replace(
            kept, resume=state.directory.resolve(), first_step=state.steps_done, reference_from_state=is_other
        )
    if kept.root is not None:
        require_room(kept.root, kept.first_step + 1, num_steps)
        kept.root.mkdir(parents=True, exist_ok=True)
        kept = replace(kept, root=kept.root.resolve())
    return kept


def _require_one_of_each(subject: Subject) -> None:
    from pipeproof.state.layout import buffer_of_copies, words_of_copies

    buffer = buffer_of_copies(subject.plan)
    if buffer is not None:
        message, mend = words_of_copies(buffer, subject.plan.spec.schedule.kind)
        location = subject.locate("schedule", "kind")
        raise PipeproofError(Finding(NOT_CARRIED_OUT.code, Severity.ERROR, message, location=location, help=mend))


def _require_paddle(kept: KeptState, subject: Subject) -> None:
    backend = subject.plan.spec.run.backend
    if kept.by_paddle and backend != "paddle":
        from pipeproof.state.flex.codes import NOT_AS_FLEX

        raise PipeproofError(
            Finding(
                NOT_AS_FLEX.code,
                Severity.ERROR,
                f"the plan runs on {backend}, and a checkpoint of Paddle's is written by Paddle",
                location=subject.locate("run", "backend"),
                help="save without `--save-format flex`; the state's files are safetensors then, too",
            )
        )


def go_on(rank: HasState, arrays: Arrays, plan: LoweredPlan, number: int, directory: Path) -> None:
    """Give the rank of that number its part of a saved state; all of it is read before any of it is put in place."""
    from pipeproof.state.index import read_index
    from pipeproof.state.load import SavedState
    from pipeproof.state.parts import read_part

    content = read_part(SavedState(directory, read_index(directory)), plan, number)
    tensors = {key: arrays.from_bytes(one.content, one.shape, one.dtype) for key, one in content.items()}
    rank.put_state(tensors)


def leave_state(
    job: Job,
    rank: HasState,
    arrays: Arrays,
    world: World,
    plan: LoweredPlan,
    steps_done: int,
    emit: Callable[..., None],
    write_by_paddle: WriteByPaddle | None,
) -> None:
    """Write this rank's part of the state; the first rank gives it its name when all have written theirs.

    Every rank must call this, at the same step. With ``write_by_paddle`` Paddle writes.
    """
    from pipeproof.state.save import finish_state, part_directory, write_part

    assert job.kept.root is not None, "asked where states are saved alone"
    emit("setup", what=f"saving the state after step {steps_done - 1}")
    name = job.directory.name
    directory = part_directory(job.kept.root, steps_done, name)
    if write_by_paddle is not None:
        write_by_paddle(directory, plan, world.rank, rank.state())
    else:
        write_part(job.kept.root, steps_done, name, plan, world.rank, part_of(rank, arrays, plan, world.rank))
    world.barrier()
    if world.rank == 0:
        if write_by_paddle is not None:
            from pipeproof.state.flex.save import require_all_written

            require_all_written(directory, plan)
        version = str(sys.modules[plan.spec.run.backend].__version__)  # it has been started in this process
        from_beginning = not job.kept.reference_from_state
        finish_state(job.kept.root, steps_done, name, plan, job.digest, version, from_beginning=from_beginning)
    emit("setup", what="running")


def part_of(rank: HasState, arrays: Arrays, plan: LoweredPlan, number: int) -> dict[tuple[str, str], ByteArray]:
    """What the rank of that number has to write, by weight and slot."""
    from pipeproof.state.files import ByteArray
    from pipeproof.state.layout import pieces_of

    state, content = rank.state(), {}
    for piece in pieces_of(plan, number):
        if piece.writer == number:
            tensor = state[piece.weight, piece.slot]
            content[piece.weight, piece.slot] = ByteArray(arrays.dtype(tensor), piece.shape, arrays.to_bytes(tensor))
    return content


def remove_unfinished(kept: KeptState, job: str) -> None:
    """Remove what a run of that name began to save and did not finish; a directory that is empty then, too."""
    if kept.root is None:
        return
    from pipeproof.state.save import remove_parts

    remove_parts(kept.root, job)
    if kept.root.is_dir() and not any(kept.root.iterdir()):
        shutil.rmtree(kept.root, ignore_errors=True)


def kept_lines(kept: KeptState, steps: Sequence[int]) -> list[str]:
    """What a finished run says about state; ``steps`` are those that it ran."""
    lines = []
    if kept.resume is not None:
        where = (
            f"went on from the state after step {steps[0] - 1}" if steps[0] else "began with the weights of the state"
        )
        instead = "; the reference, too: no training of this plan from step 0 on leads to its bits"
        lines.append(where + (instead if kept.reference_from_state else ""))
    if kept.root is not None:
        lines.append(f"saved the state after step {steps[-1]}; to go on: pipeproof run PLAN --resume {kept.root}")
    return lines
