"""Schedules from files, or from programs in the plan: their codes, PP130 to PP139, and the text of a file."""

from __future__ import annotations

from pathlib import Path

from pipeproof.specs.codes import RuleDoc
from pipeproof.specs.finding import BadPlanError, Finding, Location, Severity
from pipeproof.specs.source import LINE_BREAK

MAX_BYTES = 2**26
"""Largest schedule file."""

_RIGHT = "schedule: {kind: custom, num_micro_batches: 1, programs: [[0F0, 0B0], [1F0, 1B0]]}"

UNREADABLE = RuleDoc(
    code="PP130",
    title="the schedule file cannot be read",
    explanation=(
        "`schedule.path` is relative to the plan file. The file does not exist, is a directory, may not be read, is "
        "larger than any schedule, or is not text in UTF-8."
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
        "Operations are read strictly: the whole text must be one. PyTorch's own reader takes `2F0xyz` for `2F0`, "
        "and a slip of the pen becomes another schedule. Its CSV has compute operations (F, B, I, W and overlapped "
        "pairs), SEND_F, RECV_F, SEND_B, RECV_B, UNSHARD, RESHARD and REDUCE_GRAD; our text form has more. Fleet's "
        "strings have f and b, as in `f0;b0;` or `f0_vp1;b0_vp1;`."
    ),
    wrong="schedule: {kind: custom, num_micro_batches: 1, programs: [[0F0xyz, 0B0], [1F0, 1B0]]}",
    right=_RIGHT,
)
BAD_LINE = RuleDoc(
    code="PP133",
    title="malformed line or attribute in a program text",
    explanation=(
        "A program text has one line for each rank, in order, and lines that declare tensors and groups. Attributes "
        "stand in braces right behind their operation. An unknown attribute is refused: ignored, it would leave its "
        "default in force, and another program would be proved than the one that was meant."
    ),
    wrong="rank 0: 0F0{que=side}",
    right="rank 0: 0F0{queue=side} WAIT(0F0)",
)
MISPLACED = RuleDoc(
    code="PP134",
    title="an operation is not on the rank that holds its stage",
    explanation=(
        "A stage is on the rank that computes it: its weights are there and nowhere else. The rank that computes "
        "most of a stage counts as its holder; what the schedule lets another rank do for that stage is misplaced, "
        "mostly because of a wrong stage number."
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
        "`schedule.num_micro_batches` says how many micro-batches a step has, and sizes the global batch with it. "
        "The programs must work on those, numbered from 0, and on no others. The same goes for the splits of "
        "`schedule.num_sequence_splits`: where sequences are cut, each operation names its split, as in 2F0.s1."
    ),
    wrong="schedule: {kind: custom, num_micro_batches: 2, programs: [[0F0, 0B0], [1F0, 1B0]]}",
    right=_RIGHT,
)
WRONG_FORMAT = RuleDoc(
    code="PP137",
    title="the schedule file is in another format",
    explanation=(
        "`schedule.format` is text (our own), csv (PyTorch's, compute operations only), csv-comms (PyTorch's, with "
        "communication) or fleet (the strings of Fleet's static scheduler); auto looks at the content. The content is "
        "none of these, or not the one that is named."
    ),
    wrong="schedule: {kind: file, path: with_sends.csv, format: csv, num_micro_batches: 4, micro_batch_size: 2}",
    right="schedule: {kind: file, path: with_sends.csv, format: csv-comms, num_micro_batches: 4, micro_batch_size: 2}",
)
NO_PEER = RuleDoc(
    code="PP138",
    title="a transfer has no other end",
    explanation=(
        "A send goes to the rank that holds the next stage (of a gradient: the stage before), a receive comes from "
        "there. No rank holds that stage, several do, or it is on the same rank, where nothing travels."
    ),
    wrong="rank 0: 0F0 0SEND_B0\nrank 1: 1F0",
    right="rank 0: 0F0 0SEND_F0 WAIT(0SEND_F0)\nrank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0",
)
WRONG_STAGES = RuleDoc(
    code="PP139",
    title="the schedule is for other stages",
    explanation=(
        "Stages are numbered from 0 without gaps. There are as many as `topology.pp` x `schedule.num_chunks`, or as "
        "`schedule.placement` lists; where it does list them, each rank computes exactly those."
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
    """The text of a schedule file.

    Raises:
        ScheduleFileError: PP130.
    """
    shown = str(path)
    try:
        with Path(path).open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise _unreadable(f"cannot read `{shown}`: {reason[:1].lower()}{reason[1:]}") from error
    if len(content) > MAX_BYTES:
        raise _unreadable(f"`{shown}` has more than {MAX_BYTES} bytes, which no schedule needs")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = LINE_BREAK.split(content[: error.start].decode("utf-8-sig"))
        place = Location(shown, len(before), len(before[-1]) + 1)
        raise _unreadable(f"byte 0x{content[error.start]:02x} is not UTF-8 text", place) from error


def _unreadable(message: str, place: Location | None = None) -> ScheduleFileError:
    return ScheduleFileError(Finding(UNREADABLE.code, Severity(UNREADABLE.severity), message, place))
