"""Times of a plan's stages from the timers that Megatron-LM, and Paddle with its trainers, print.

Megatron-LM prints its timers every ``--log-interval`` iterations, divided by the number of iterations; with
``--timing-log-level 2`` these include ``forward-compute`` and ``backward-compute``, each summed over the micro-batches
and model chunks of a rank. ``--timing-log-option`` chooses the form:

- ``all``: ``times across ranks (ms):``, then ``  NAME:`` and a line ``     rank  3: 12.34`` for each rank;
- ``minmax``: ``(min, max) time across ranks (ms):``, then lines ``    NAME .....: (1.23, 4.56)``;
- ``max``: ``max time across ranks (ms):``, then lines ``    NAME .....: 4.56``.

Paddle's pipeline (``enable_timer`` of ``pp_configs``) prints ``time (ms) | forward_step: 12.34 | backward_step: ...``
after each step, in the log of each rank. PaddleFormers and PaddleNLP print these timers with their own ones as
``[Profile global_step: 7] time (ms) | optimizer-step : 1.20 | ... | forward_step: 12.34``, and whole steps as
``global_step: 10, ... interval_runtime: 2.259``, in seconds since the line before. The rank is in the name of the file
(``workerlog.3``). Times of the pipeline's timers are summed over the micro-batches and chunks of the rank.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import IO

from pipeproof.interop.profiles.measurements import Measurements, RankTimes
from pipeproof.interop.profiles.profile_codes import not_assigned, unreadable
from pipeproof.interop.profiles.rank_trace import rank_of_name
from pipeproof.schedule.ops import COMPUTE_KINDS, OpKind
from pipeproof.specs.profile_file import TraceFormat
from pipeproof.verify.subject import Subject

MAX_LINE = 2**20
"""Longest line of a log, in characters."""
_MAX_SPREAD = 0.1
"""Largest difference of minimum and maximum at which all ranks count as equal, as a share of the maximum."""

_NAME = r"([A-Za-z][\w-]*)"
_NUMBER = r"(\d+(?:\.\d+)?)"
_ALL = re.compile(r"\btimes across ranks \(ms\):\s*$")
_MINMAX = re.compile(r"\(min, max\) time across ranks \(ms\):\s*$")
_MAX = re.compile(r"max time across ranks \(ms\):\s*$")
_TIMER = re.compile(rf"(?:^|[\s:]) {{2}}{_NAME}:\s*$")
_OF_RANK = re.compile(rf"\s{{2,}}rank\s+(\d+): {_NUMBER}\s*$")
_PAIR = re.compile(rf"{_NAME} \.*: \({_NUMBER}, {_NUMBER}\)\s*$")
_SINGLE = re.compile(rf"{_NAME} \.*: {_NUMBER}\s*$")
_PADDLE = re.compile(r"(?:\[Profile global_step: (\d+)\].*?)?time \(ms\) \|")
_PADDLE_TIMER = re.compile(rf"\| {_NAME} ?: {_NUMBER}")
_INTERVAL = re.compile(rf"global_step: (\d+)\b.*\binterval_runtime: {_NUMBER}")

_KINDS: Mapping[str, OpKind] = MappingProxyType(
    {
        "forward-compute": OpKind.FORWARD,
        "backward-compute": OpKind.BACKWARD,
        "optimizer": OpKind.STEP,
        "all-grads-sync": OpKind.REDUCE_GRAD,
        "forward_step": OpKind.FORWARD,
        "backward_step": OpKind.BACKWARD,
        "optimizer-step": OpKind.STEP,
        "all-reduce": OpKind.REDUCE_GRAD,
    }
)
"""Kind of operation of a timer."""
_PADDLE_PAIR = "forward_backward_step"
_WHOLE = "forward-backward"
_AFTER_WHOLE = ("optimizer", "optimizer-step", "all-reduce")
"""Timers that run after that of the whole; Megatron's sum of gradients is in it."""
_WAITS = re.compile(r"(^|[-_])(send|recv)([-_]|$)|allreduce_shared_weight_gradients|broadcast_final_loss")
"""Timers of messages, which include the waits for them."""

_EACH_RANK = "log each rank: `--timing-log-level 2 --timing-log-option all`"


@dataclass(slots=True)
class _Block:
    """Timers of one or more steps: milliseconds of a step by timer and rank; a pair of bounds where ranks are unknown.

    ``step`` is the number of the last step, None if the log does not show it.
    """

    line: int
    step: int | None = None
    ranks: dict[str, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    bounds: dict[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(slots=True)
class _Log:
    file: str
    format: TraceFormat
    blocks: list[_Block]
    intervals: list[tuple[int, float]]
    """Number of the step, and seconds since the line before."""


def log_format(path: Path) -> TraceFormat | None:
    """Return the kind of a text file with timers, None if it has none.

    Raises:
        BadPlanError: PP163, it is not text.
    """
    for _, line in _lines(path):
        if _ALL.search(line) or _MINMAX.search(line) or _MAX.search(line):
            return "megatron_timers"
        if _PADDLE.search(line) or _INTERVAL.search(line):
            return "paddle_timers"
    return None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a log without their ends."""
    try:
        with _open(path) as stream:
            number = 0
            while line := stream.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    raise unreadable(str(path), f"a line has more than {MAX_LINE} characters", "give a log", number)
                yield number, line.rstrip()
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(str(path), f"the log cannot be read: {error}", "give a readable file") from error
    except UnicodeDecodeError as error:
        raise unreadable(str(path), "the file is not UTF-8 text", "give a log as text") from error


def _open(path: Path) -> IO[str]:
    with path.open("rb") as stream:
        compressed = stream.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8") if compressed else path.open(encoding="utf-8")


def measure_logs(kind: TraceFormat, paths: Sequence[Path], subject: Subject) -> Measurements:
    """Return the times of the stages in logs: one of Megatron-LM, or those of Paddle's ranks.

    Raises:
        BadPlanError: PP163, a log has no timers; PP164, a timer cannot be assigned to a stage.
    """
    read = _megatron_blocks if kind == "megatron_timers" else _paddle_blocks
    logs = [read(path, subject) for path in paths]
    for log in logs:
        _require_timers(log)
    found = Measurements(kind, [log.file for log in logs], 0, 0)
    samples = _Samples(subject, found)
    for log in logs:
        counted = log.blocks[1:] or log.blocks
        found.num_steps = max(found.num_steps, len(log.blocks))
        found.num_counted = max(found.num_counted, len(counted))
        for block in counted:
            samples.add(log, block)
        samples.add_steps(log)
    samples.finish()
    return found


def _megatron_blocks(path: Path, _: Subject) -> _Log:
    log = _Log(str(path), "megatron_timers", [], [])
    form: re.Pattern[str] | None = None
    timer = ""
    for number, line in _lines(path):
        started = next((each for each in (_MINMAX, _MAX, _ALL) if each.search(line)), None)
        if started is not None:
            form, timer = started, ""
            log.blocks.append(_Block(number))
        elif form is _ALL and (match := _OF_RANK.search(line)) and timer:
            log.blocks[-1].ranks[timer][int(match[1])] = float(match[2])
        elif form is _ALL and (match := _TIMER.search(line)):
            timer = match[1]
        elif form is _MINMAX and (match := _PAIR.search(line)):
            log.blocks[-1].bounds[match[1]] = float(match[2]), float(match[3])
        elif form is _MAX and (match := _SINGLE.search(line)):
            log.blocks[-1].bounds[match[1]] = 0.0, float(match[2])
        else:
            form = None
    # Other parts of the program print timers in the same form, for instance of its start.
    log.blocks = [block for block in log.blocks if _KINDS.keys() & (block.ranks.keys() | block.bounds.keys())]
    return log


def _paddle_blocks(path: Path, subject: Subject) -> _Log:
    log = _Log(str(path), "paddle_timers", [], [])
    rank = rank_of_name(path.name)
    if rank is None and subject.plan.mesh.num_ranks == 1:
        rank = 0
    if rank is None:
        raise not_assigned(str(path), "the name does not show the rank", "keep the name of the launcher: `workerlog.3`")
    for number, line in _lines(path):
        if match := _INTERVAL.search(line):
            log.intervals.append((int(match[1]), float(match[2])))
        if match := _PADDLE.search(line):
            block = _Block(number, None if match[1] is None else int(match[1]))
            for name, ms in _PADDLE_TIMER.findall(line):
                block.ranks[name][rank] = float(ms)
            log.blocks.append(block)
    if any(block.step is not None for block in log.blocks):  # the lines of the trainer repeat those of the pipeline
        log.blocks = [block for block in log.blocks if block.step is not None]
        log.blocks = list(_per_step(log))
    return log


def _per_step(log: _Log) -> Iterator[_Block]:
    """Yield the trainer's blocks, whose timers add up since the block before, with times of one step."""
    for before, block in zip([None, *log.blocks[:-1]], log.blocks, strict=True):
        assert block.step is not None
        steps = 1 if before is None or before.step is None else block.step - before.step
        if steps < 1:
            raise not_assigned(
                log.file, f"step {block.step} follows step {before and before.step}", "give the log of one run",
                block.line,
            )  # fmt: skip
        for of_ranks in block.ranks.values():
            for rank in of_ranks:
                of_ranks[rank] /= steps
        yield block


def _require_timers(log: _Log) -> None:
    needed = {OpKind.FORWARD, OpKind.BACKWARD}
    for block in log.blocks:
        if needed <= {_KINDS.get(name) for name in (*block.ranks, *block.bounds)}:
            return
    if log.format == "megatron_timers":
        raise unreadable(log.file, "no times of forward-compute and backward-compute", "use `--timing-log-level 2`")
    reason = "times of whole steps only" if log.intervals else "no times of forward_step and backward_step"
    raise unreadable(log.file, reason, "set `enable_timer: true` in `pp_configs` of the strategy")


class _Samples:
    """Samples of stages from timers of ranks."""

    def __init__(self, subject: Subject, found: Measurements) -> None:
        self._subject, self._found = subject, found
        graph, mesh = subject.graph, subject.plan.mesh
        self._counts: dict[int, dict[tuple[int, OpKind], int]] = {}
        """By pipeline coordinate: operations of a step by stage and kind."""
        for index, rank in enumerate(graph.global_rank):
            counts: dict[tuple[int, OpKind], int] = defaultdict(int)
            for op_id in graph.rank_ops(index):
                op = graph.ops[op_id]
                if op.kind in COMPUTE_KINDS:
                    counts[op.stage, op.kind] += 1
            self._counts[mesh.coords(rank)["pp"]] = counts
        self._notes: dict[str, None] = {}
        self._ranks: dict[int, RankTimes] = {}
        self._steps_ns: list[int] = []

    def add(self, log: _Log, block: _Block) -> None:
        """Add the times of one block."""
        mesh = self._subject.plan.mesh
        for name, (low, high) in block.bounds.items():
            if name in _KINDS:
                block.ranks[name] = dict.fromkeys(range(mesh.num_ranks), self._common(log, block, name, low, high))
        by_rank: dict[int, dict[str, float]] = defaultdict(dict)
        for name, of_ranks in block.ranks.items():
            for rank, ms in of_ranks.items():
                if rank >= mesh.num_ranks:
                    raise not_assigned(
                        log.file, f"rank {rank}, and the plan has {mesh.num_ranks} ranks", "give the plan of this run",
                        block.line,
                    )  # fmt: skip
                by_rank[rank][name] = ms
        for rank, timers in by_rank.items():
            self._add_rank(log, block, rank, timers)

    def _common(self, log: _Log, block: _Block, name: str, low: float, high: float) -> float:
        """Return the mean of bounds that are close, or those of a single rank."""
        if self._subject.plan.mesh.num_ranks == 1:
            return high
        if high - low > _MAX_SPREAD * high:
            if _KINDS[name] not in COMPUTE_KINDS:
                self._note(f"{name} differs over the ranks ({low:.2f} to {high:.2f} ms): the maximum counts for all")
                return high
            raise not_assigned(
                log.file, f"{name} is {low:.2f} to {high:.2f} ms, and the log does not show on which rank", _EACH_RANK,
                block.line,
            )  # fmt: skip
        self._note(f"{name}: the ranks are within {_MAX_SPREAD:.0%}, and the mean of the bounds counts for all stages")
        return (low + high) / 2

    def _add_rank(self, log: _Log, block: _Block, rank: int, timers: Mapping[str, float]) -> None:
        counts = self._counts[self._subject.plan.mesh.coords(rank)["pp"]]
        if timers.get(_PADDLE_PAIR):
            raise not_assigned(
                log.file, f"{_PADDLE_PAIR} times a forward and a backward that overlap, as one", "turn the overlap off",
                block.line,
            )  # fmt: skip
        shares = self._ranks.setdefault(rank, RankTimes(rank))
        stages = sorted({stage for stage, _ in counts})
        inside = 0
        for name, ms in timers.items():
            kind, time_ns = _KINDS.get(name), round(ms * 1e6)
            if kind in COMPUTE_KINDS:
                self._computations(log, block, rank, name, time_ns)
                shares.computation_ns += time_ns
                inside += time_ns
            elif kind is not None:
                for stage in stages:
                    self._found.ops[stage, kind].append(time_ns // len(stages))
                shares.update_ns += time_ns
            elif _WAITS.search(name):
                shares.communication_ns += time_ns
                inside += time_ns
        after = sum(round(timers.get(name, 0) * 1e6) for name in _AFTER_WHOLE)
        sync = round(timers.get("all-grads-sync", 0) * 1e6)
        shares.total_ns += max(round(timers.get(_WHOLE, 0) * 1e6), inside + sync) + after

    def _computations(self, log: _Log, block: _Block, rank: int, name: str, time_ns: int) -> None:
        """Divide the time of a timer by the operations of its kind on the rank."""
        counts = self._counts[self._subject.plan.mesh.coords(rank)["pp"]]
        kinds = {OpKind.FORWARD} if _KINDS[name] is OpKind.FORWARD else COMPUTE_KINDS - {OpKind.FORWARD}
        planned = {key: count for key, count in counts.items() if key[1] in kinds}
        if any(kind is not _KINDS[name] for _, kind in planned):
            raise not_assigned(
                log.file, f"{name} has one time, and backwards of the plan have two parts", "give the plan of this run",
                block.line,
            )  # fmt: skip
        if len(planned) > 1:
            self._note(f"{len(planned)} stages of a rank share its timers: their times count as equal")
        for stage, kind in planned:
            self._found.ops[stage, kind].append(time_ns // sum(planned.values()))

    def add_steps(self, log: _Log) -> None:
        """Add the lengths of whole steps."""
        for (before, _), (step, seconds) in zip(log.intervals, log.intervals[1:], strict=False):
            if step > before:
                self._steps_ns.append(round(seconds * 1e9 / (step - before)))

    def finish(self) -> None:
        """Complete the measurements."""
        self._found.ranks = [self._ranks[rank] for rank in sorted(self._ranks)]
        if self._steps_ns:
            self._found.step_ns = round(median(self._steps_ns))
        elif self._ranks:
            self._found.step_ns = round(
                max(shares.total_ns for shares in self._ranks.values()) / self._found.num_counted
            )
        num_ranks = self._subject.plan.mesh.num_ranks
        if len(self._ranks) < num_ranks:
            self._note(f"{len(self._ranks)} of {num_ranks} ranks have timers")
        self._found.notes += self._notes

    def _note(self, text: str) -> None:
        self._notes[text] = None
