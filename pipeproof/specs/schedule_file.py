"""Codes of schedules from files or from programs in the plan, PP130 to PP139, and reading such a file."""

from __future__ import annotations

from pathlib import Path

from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.diagnostics.rule_doc import RuleDoc
from pipeproof.diagnostics.source import UnreadableTextError, read_utf8

MAX_BYTES = 2**26
"""Largest schedule file."""

_RIGHT = "schedule: {kind: custom, num_micro_batches: 1, programs: [[0F0, 0B0], [1F0, 1B0]]}"

UNREADABLE = RuleDoc(
    code="PP130",
    title="the schedule file cannot be read",
    explanation=(
        "`schedule.path` is relative to the plan file. The file does not exist, is a directory, may not be read, is "
        "larger than any schedule, or is not UTF-8 text."
    ),
    wrong="schedule: {kind: file, path: schedules/, num_micro_batches: 4, micro_batch_size: 2}   # a directory",
    right="schedule: {kind: file, path: schedules/zb.csv, num_micro_batches: 4, micro_batch_size: 2}",
)
NO_OPERATIONS = RuleDoc(
    code="PP131",
    title="a rank of the schedule computes nothing",
    explanation=(
        "The file is empty, or the program of a pipeline rank has no computation. In PyTorch's CSV every line is a "
        "rank, an empty one too: the ranks below it would be counted wrongly."
    ),
    wrong="schedule: {kind: custom, num_micro_batches: 1, programs: [[0F0, 0B0], []]}",
    right=_RIGHT,
)
BAD_OPERATION = RuleDoc(
    code="PP132",
    title="not an operation of this format",
    explanation=(
        "Operations are read strictly: the full text must be one operation. PyTorch's own reader accepts `2F0xyz` as "
        "`2F0`, so that a typing error becomes another schedule. Its CSV has compute operations (F, B, I, W and "
        "overlapped pairs), SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD and REDUCE_GRAD; our text form has more. "
        "Fleet's strings have f and b, as in `f0;b0;` or `f0_vp1;b0_vp1;`."
    ),
    wrong="schedule: {kind: custom, num_micro_batches: 1, programs: [[0F0xyz, 0B0], [1F0, 1B0]]}",
    right=_RIGHT,
)
BAD_LINE = RuleDoc(
    code="PP133",
    title="malformed line or attribute in a program text",
    explanation=(
        "A program text has one line for each rank, in order, and lines that declare tensors and groups. Attributes "
        "are in braces directly after their operation. An unknown attribute is refused: if it were ignored, its "
        "default would apply, and a different program from the intended one would be proved."
    ),
    wrong="rank 0: 0F0{que=side}",
    right="rank 0: 0F0{queue=side} WAIT(0F0)",
)
MISPLACED = RuleDoc(
    code="PP134",
    title="an operation is not on the rank that holds its stage",
    explanation=(
        "A stage is on the rank that computes it, which alone has its weights. The rank that computes most of a stage "
        "counts as its holder; an operation of that stage on another rank is misplaced, mostly because of a wrong "
        "stage number."
    ),
    wrong="schedule: {kind: custom, num_micro_batches: 1, programs: [[0F0, 1B0], [1F0, 1B0]]}",
    right=_RIGHT,
)
WRONG_RANKS = RuleDoc(
    code="PP135",
    title="the schedule is for another number of ranks",
    explanation="A schedule has one program for each pipeline rank: one line of a file for each of `topology.pp`.",
    wrong="topology: {pp: 3}\nschedule: {kind: custom, num_micro_batches: 1, programs: [[0F0, 0B0], [1F0, 1B0]]}",
    right=f"topology: {{pp: 2}}\n{_RIGHT}",
)
WRONG_MICRO_BATCHES = RuleDoc(
    code="PP136",
    title="the schedule is for another number of micro-batches",
    explanation=(
        "`schedule.num_micro_batches` is the number of micro-batches of a step, and determines the global batch. The "
        "programs must work on those, numbered from 0, and on no others. The same holds for the splits of "
        "`schedule.num_sequence_splits`: if sequences are split, each operation names its split, as in 2F0.s1."
    ),
    wrong="schedule: {kind: custom, num_micro_batches: 2, programs: [[0F0, 0B0], [1F0, 1B0]]}",
    right=_RIGHT,
)
WRONG_FORMAT = RuleDoc(
    code="PP137",
    title="the schedule file is in another format",
    explanation=(
        "`schedule.format` is text (our own), csv (PyTorch's, compute operations only), csv-comms (PyTorch's, with "
        "communication) or fleet (the strings of Fleet's static scheduler); auto detects the format. The content is "
        "in none of these, or not in the named one."
    ),
    wrong="schedule: {kind: file, path: with_sends.csv, format: csv, num_micro_batches: 4, micro_batch_size: 2}",
    right="schedule: {kind: file, path: with_sends.csv, format: csv-comms, num_micro_batches: 4, micro_batch_size: 2}",
)
NO_PEER = RuleDoc(
    code="PP138",
    title="a transfer has no peer",
    explanation=(
        "A send goes to the rank that holds the next stage (of a gradient: the stage before), a receive comes from "
        "there. No rank holds that stage, several do, or it is on the same rank, where nothing is transferred."
    ),
    wrong="rank 0: 0F0 0SEND_B0\nrank 1: 1F0",
    right="rank 0: 0F0 0SEND_F0 WAIT(0SEND_F0)\nrank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0",
)
WRONG_STAGES = RuleDoc(
    code="PP139",
    title="the schedule is for other stages",
    explanation=(
        "Stages are numbered from 0 without gaps. Their number is `topology.pp` x `schedule.num_chunks`, or that of "
        "the stages in `schedule.placement`; if it lists them, each rank computes exactly those."
    ),
    wrong="schedule: {kind: custom, num_micro_batches: 1, programs: [[0F0, 0B0], [2F0, 2B0]]}",
    right=_RIGHT,
)

SCHEDULE_FILE_CODES: tuple[RuleDoc, ...] = (
    UNREADABLE,
    NO_OPERATIONS,
    BAD_OPERATION,
    BAD_LINE,
    MISPLACED,
    WRONG_RANKS,
    WRONG_MICRO_BATCHES,
    WRONG_FORMAT,
    NO_PEER,
    WRONG_STAGES,
)


class ScheduleFileError(BadPlanError):
    """A schedule that cannot be read, or does not fit its plan: PP130 to PP139, in the order of the file."""


def read_schedule_text(path: str | Path) -> str:
    """Return the text of a schedule file.

    Raises:
        ScheduleFileError: PP130.
    """
    try:
        return read_utf8(str(path), MAX_BYTES, "schedule")
    except UnreadableTextError as error:
        raise ScheduleFileError(UNREADABLE.finding(error.message, error.location)) from error
