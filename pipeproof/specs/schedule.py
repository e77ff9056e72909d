"""The section ``schedule``: the order in which each pipeline rank works."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema

from pipeproof.diagnostics.finding import BadPlanError, RuleDoc
from pipeproof.diagnostics.problems import KeyPath, Problem, describe_value, dotted, listed, problems_error
from pipeproof.diagnostics.source import UnreadableTextError, read_utf8
from pipeproof.specs.section import FROM_LIST, Section

ScheduleName = Literal[
    "gpipe", "1f1b", "eager_1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "interleaved_zb", "zb_v", "v_half",
    "v_min", "dualpipe", "dualpipe_v", "chimera", "seq1f1b", "optimal", "custom", "file",
]  # fmt: skip
"""A kind of schedule; ``pipeproof.schedule.kinds`` describes each."""

Half = Literal["F", "B", "W"]
"""A part of an overlapped pair: forward, backward, or the weight gradients that the backward deferred."""

PAIRS: tuple[Half, ...] = ("B", "W", "F")
"""The cycle of halves of ``overlap: pairs``, as in DeepSeek's DualPipe and Megatron-LM's combined 1F1B."""

_HALVES = get_args(Half)

_MAX_STAGE = 2**32
"""Largest number of a stage."""


def _validate_placement(value: object) -> Literal["loop", "v"] | tuple[tuple[int, ...], ...]:
    if value == "loop" or value == "v":  # a comparison with each narrows the type
        return value
    if not isinstance(value, list | tuple):
        code = "PP106" if isinstance(value, str) else "PP105"
        raise problems_error([_not_a_placement(code, (), "loop, v or a list of the stages of each rank", value)])
    problems = []
    for rank, stages in enumerate(value):
        if not isinstance(stages, list | tuple):
            problems.append(_not_a_placement("PP105", (rank,), "a list of stages", stages))
            continue
        for index, stage in enumerate(stages):
            if type(stage) is not int:
                problems.append(_not_a_placement("PP105", (rank, index), "an integer", stage))
            elif not 0 <= stage <= _MAX_STAGE:
                problems.append(_not_a_placement("PP106", (rank, index), "the number of a stage", stage))
    if problems:
        raise problems_error(problems)
    return tuple(tuple(stages) for stages in value)


def _not_a_placement(code: str, path: KeyPath, expected: str, value: object) -> Problem:
    name = dotted(("schedule", "placement", *path))
    return Problem(code, path, f"`{name}` must be {expected}, found {describe_value(value)}")


def _to_json(value: Literal["loop", "v"] | tuple[tuple[int, ...], ...]) -> str | list[list[int]]:
    return value if isinstance(value, str) else [list(stages) for stages in value]


StagePlacement = Annotated[
    Literal["loop", "v"] | tuple[tuple[int, ...], ...],
    PlainValidator(_validate_placement),
    PlainSerializer(_to_json, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": ["loop", "v"]},
                {
                    "type": "array",
                    "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                },
            ]
        }
    ),
]
"""``loop``, ``v``, or the stages of each pipeline rank."""


def _validate_overlap(value: object) -> Literal["none", "pairs"] | tuple[Half, ...]:
    if value == "none" or value == "pairs":  # a comparison with each narrows the type
        return value
    order = value.get("order") if isinstance(value, Mapping) and set(value) == {"order"} else value
    if not isinstance(order, list | tuple):
        code, what = ("PP106" if isinstance(value, str) else "PP105"), "none, pairs or {order: [B, W, F]}"
        message = f"`schedule.overlap` must be {what}, found {describe_value(value)}"
        raise problems_error([Problem(code, (), message)])
    halves: list[Half] = [half for half in _HALVES if half in order]
    if sorted(halves) != sorted(map(str, order)) or not {"F", "B"} <= set(halves):
        message = f"`schedule.overlap.order` must have F and B once each, and W at most once, found {list(order)}"
        raise problems_error([Problem("PP106", (), message, help="write for example [B, W, F]")])
    return tuple(sorted(halves, key=order.index))


Overlap = Annotated[
    Literal["none", "pairs"] | tuple[Half, ...],
    PlainValidator(_validate_overlap),
    PlainSerializer(lambda value: value if isinstance(value, str) else {"order": list(value)}, when_used="json"),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": ["none", "pairs"]},
                {
                    "type": "object",
                    "properties": {
                        "order": {
                            "type": "array",
                            "items": {"type": "string", "enum": ["F", "B", "W"]},
                            "minItems": 2,
                            "maxItems": 3,
                            "uniqueItems": True,
                        }
                    },
                    "required": ["order"],
                    "additionalProperties": False,
                },
            ]
        }
    ),
]
"""``none``, ``pairs``, or a cycle of halves."""


class ScheduleSpec(Section):
    """The order in which each pipeline rank works on its micro-batches."""

    kind: ScheduleName = Field(
        description="The kind of schedule; `pipeproof schedule list` describes each. file: read from path; custom: "
        "the given programs."
    )
    variant: Literal["torch", "megatron", "fleet", "fleet_fthenb", "fleet_balanced"] | None = Field(
        default=None,
        description="The tool whose order is used, where tools differ; without it, the backend's tool.",
    )
    framework: Literal["megatron", "torch", "paddle"] | None = Field(
        default=None,
        description="The framework that trains: `tune` tries its schedules only. Without it, as for `variant`.",
    )
    path: str | None = Field(
        default=None,
        description="With kind file, the file of the schedule, relative to the plan file.",
        json_schema_extra={"minLength": 1},
    )
    format: Literal["auto", "text", "csv", "csv-comms", "fleet"] = Field(
        default="auto",
        description="Format of the file: our text form, PyTorch's CSV without or with communication, or the strings "
        "of Fleet's static scheduler; auto detects it.",
    )
    programs: Annotated[tuple[Annotated[tuple[str, ...], FROM_LIST], ...], FROM_LIST] | None = Field(
        default=None, description="With kind custom, the operations of each pipeline rank in order, such as 0F0."
    )
    num_micro_batches: int = Field(
        ge=1,
        le=10**6,
        description="Micro-batches per step and data-parallel rank. Without it, they follow from `global_batch_size`.",
    )
    global_batch_size: int | None = Field(
        default=None,
        ge=1,
        le=10**12,
        description="Sequences in a step over all dp and ep ranks: the product of their number, `num_micro_batches` "
        "and `micro_batch_size`.",
    )
    micro_batch_size: int = Field(ge=1, le=10**6, description="Sequences in a micro-batch.")
    last_micro_batch_size: int | None = Field(
        default=None, ge=1, le=10**6, description="Sequences in the last micro-batch, if it has fewer."
    )
    seq_lengths: Annotated[tuple[Annotated[int, Field(ge=1, le=2**26)], ...], FROM_LIST] | None = Field(
        default=None, description="Tokens per sequence of each micro-batch, where they differ."
    )
    num_chunks: int = Field(
        default=1, ge=1, le=2**16, description="Stages per pipeline rank; the schedule limits the choice."
    )
    micro_batch_group_size: int | None = Field(
        default=None,
        ge=1,
        le=10**6,
        description="With variant megatron, number of micro-batches that go through a chunk before the next chunk; "
        "without it, the number of pipeline ranks.",
    )
    num_sequence_splits: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Number of equal splits of each sequence; more than 1 with seq1f1b, file and custom.",
    )
    memory_limit: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Largest number of chunk activations of one micro-batch that a rank holds, from F to the end of W. "
        "For kind optimal; `tune` without `--gpus` respects it too.",
    )
    reduce_gradients: Literal["at_end", "when_ready"] = Field(
        default="at_end",
        description="When gradients are summed over ranks: at_end, after all computations; when_ready, as soon as the "
        "last computation has added to the gradients of the stage, in parallel with later computations. Gradients of a "
        "stage with copies are always summed at the end.",
    )
    overlap: Overlap = Field(
        default="none",
        description="How a forward and a backward that overlap share their rank: none, as two whole computations; "
        "pairs, alternating at each all-to-all of experts, which runs while the other one computes: dispatch of "
        "the forward next to the backward of the experts, and so on; or your own cycle, such as "
        "`{order: [B, W, F]}`, where W are the weight gradients that B has deferred (without W, at the end). Custom "
        "layers allow pairs only: modules of `pipeproof.torch` declare their overlap points, which the graph "
        "does not have.",
    )
    placement: StagePlacement | None = Field(
        default=None,
        description="Assignment of stages to ranks: loop (round-robin), v (there and back), or the stages of each "
        "pipeline rank; a stage listed on several ranks has a copy on each. Without it, as the schedule needs, and "
        "with kinds file and custom as they compute them.",
    )

    @property
    def alternation(self) -> tuple[Half, ...] | None:
        """The cycle of halves of overlapped pairs; None if pairs are whole computations."""
        if self.overlap == "none":
            return None
        return PAIRS if self.overlap == "pairs" else self.overlap

    def _problems(self) -> Iterator[Problem]:
        yield from _check_source(self)
        yield from _check_placement(self)


def _check_source(schedule: ScheduleSpec) -> Iterator[Problem]:
    """PP104 if the file or the programs are missing, PP106 for keys that belong to another kind."""
    for kind, key in (("file", "path"), ("custom", "programs")):
        is_set = getattr(schedule, key) is not None
        if schedule.kind == kind and not is_set:
            message = f"`schedule.{key}` is missing, which `kind: {kind}` needs"
            example = "path: schedules/zb.csv" if key == "path" else "programs: [[0F0, 0B0], [1F0, 1B0]]"
            yield Problem("PP104", ("kind",), message, help=f"add `{example}`")
        elif is_set and schedule.kind != kind:
            message = f"`schedule.{key}` is given, and `kind: {schedule.kind}` does not use it"
            yield Problem("PP106", (key,), message, help=f"use kind: {kind}, or remove {key}", at_key=True)
    if schedule.programs == ():
        yield Problem("PP106", ("programs",), "`schedule.programs` is empty", help="give one for each rank")
    if schedule.format != "auto" and schedule.kind != "file":
        message = f"`schedule.format` is given, and `kind: {schedule.kind}` is not read from a file"
        yield Problem("PP106", ("format",), message, help="use kind: file, or remove format", at_key=True)


def _check_placement(schedule: ScheduleSpec) -> Iterator[Problem]:
    """PP106: a list of stages by rank has every stage, and replaces ``num_chunks``."""
    placement = schedule.placement
    if not isinstance(placement, tuple):
        return
    if schedule.num_chunks > 1:
        message = "`schedule.num_chunks` is given together with a list of stages as `schedule.placement`"
        yield Problem("PP106", ("num_chunks",), message, help="remove num_chunks", at_key=True)
    copies = Counter(stage for stages in placement for stage in stages)
    missing = [stage for stage in range(max(copies, default=0)) if stage not in copies]
    if missing:
        message = f"`schedule.placement` lists stage {max(copies)}, and stage {listed(missing, 'and')} is missing"
        yield Problem("PP106", ("placement",), message, help="number stages from 0")
    for rank, stages in enumerate(placement):
        if not stages:
            yield Problem("PP106", ("placement", rank), f"pipeline rank {rank} has no stage")
        elif len(set(stages)) < len(stages):
            yield Problem("PP106", ("placement", rank), f"pipeline rank {rank} has one stage twice: {list(stages)}")


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
        "`2F0`: a typing error becomes another schedule. Its CSV has compute operations (F, B, I, W and "
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
        "A stage is on the rank that computes it: no other rank has its weights. The rank that computes most of a "
        "stage counts as its holder; an operation of that stage on another rank is misplaced, mostly because of a "
        "wrong stage number."
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
        "programs must work on exactly these, numbered from 0. The same holds for the splits of "
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
        "communication) or fleet (the strings of Fleet's static scheduler); auto detects the format. The content is in "
        "none of these, or not in the named one."
    ),
    wrong="schedule: {kind: file, path: with_sends.csv, format: csv, num_micro_batches: 4, micro_batch_size: 2}",
    right="schedule: {kind: file, path: with_sends.csv, format: csv-comms, num_micro_batches: 4, micro_batch_size: 2}",
)
NO_PEER = RuleDoc(
    code="PP138",
    title="a transfer has no peer",
    explanation=(
        "A send goes to the rank that holds the next stage (for a gradient: the previous stage), and a receive comes "
        "from there. Here no rank holds that stage, several do, or it is on the same rank, which needs no transfer."
    ),
    wrong="rank 0: 0F0 0SEND_B0\nrank 1: 1F0",
    right="rank 0: 0F0 0SEND_F0 WAIT(0SEND_F0)\nrank 1: 1RECV_F0 WAIT(1RECV_F0) 1F0",
)
WRONG_STAGES = RuleDoc(
    code="PP139",
    title="the schedule is for other stages",
    explanation=(
        "Stages are numbered from 0 without gaps. Their number is `topology.pp` x `schedule.num_chunks`, or the number "
        "of stages in `schedule.placement`; if it lists them, each rank computes exactly those."
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
        raise ScheduleFileError(UNREADABLE.finding(error.message, error.location)) from None
