"""Timelines as lists of operations, from files of the commands and from plans, for comparison.

A trace has whole nanoseconds and leaves out operations without duration (except
computations and transfers); a run report has measured microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

from pipeproof.analysis.tune.repartition import layer_times, stage_times
from pipeproof.comm.lower import blaming_plan, lower_loaded
from pipeproof.foreign_text import MALFORMED, MOST_RANKS, decode_json, open_foreign, read_foreign
from pipeproof.schedule.op_table import OpGraph
from pipeproof.schedule.ops import Op, parse_op
from pipeproof.sim.simulate import simulate
from pipeproof.specs.cost import CostSource
from pipeproof.specs.load_plan import LoadedPlan, load_plan
from pipeproof.stages.describe.model_family import stage_layers
from pipeproof.verify.check_plan import require_whole_step
from pipeproof.views.chrome_trace import ARRIVAL

Source = Literal["plan", "trace", "report"]


class TimelineFileError(ValueError):
    """A file that is not a timeline; the message has its name, the position, and the files that are."""


@dataclass(frozen=True, slots=True)
class TimedOp:
    """One operation as it ran; times in exact microseconds of its timeline's clock.

    ``order`` breaks ties of time as the rank's program does.
    """

    rank: int
    step: int
    queue: str
    op: Op
    start: Fraction
    end: Fraction
    order: int

    @property
    def duration(self) -> Fraction:
        """From start to end, in microseconds."""
        return self.end - self.start


@dataclass(frozen=True)
class TimelineFile:
    """The operations of a file and its kind; ``measured`` is true for measured times.

    ``cost_source`` is the origin of simulated times, and ``note`` a sentence about times that the plan leaves out; of
    a plan, and of a trace that states them. ``graph`` and ``loaded`` are for plans; other files have none.
    """

    file: str
    source: Source
    measured: bool
    ops: tuple[TimedOp, ...]
    cost_source: str | None = None
    note: str = ""
    graph: OpGraph | None = field(default=None, repr=False, compare=False)
    loaded: LoadedPlan | None = field(default=None, repr=False, compare=False)


def read_timeline(path: Path, load: Callable[[Path], LoadedPlan] = load_plan) -> TimelineFile:
    """Read a trace or a run report, or simulate a plan, which ``load`` reads; the content decides.

    Raises:
        TimelineFileError: it is JSON of another kind, or an event is not an operation.
        BadPlanError: as a plan, it cannot be read, lowered or simulated.
        SimulationError: the plan does not end.
    """
    content = _json_object(path)
    if content is None or "pipeproof" in content:
        return simulated_plan(str(path), load(path))
    name = str(path)
    if isinstance(content.get("traceEvents"), list):
        return _of_trace(name, content)
    if isinstance(content.get("timeline"), list):
        ops = tuple(_each(name, "timeline entry", content["timeline"], _of_entry))
        return TimelineFile(name, "report", measured=True, ops=_some(name, ops))
    fix = "a plan, a trace (`simulate -o`, `run -o`) and a report (`run --report`) have one"
    if "makespan" in content and "ranks" in content:
        fix = "these are the figures of a simulation; `simulate -o` writes its timeline"
    raise TimelineFileError(f"{name}: it has no timeline; {fix}")


_MOST_BYTES = 2**30


def _json_object(path: Path) -> dict[str, Any] | None:
    """The file's content if it is a JSON object; the plan reader reports anything else."""
    try:
        with open_foreign(path) as stream:
            if not stream.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
                return None
    except OSError:
        return None
    try:
        content = decode_json(read_foreign(path, _MOST_BYTES))
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def simulated_plan(file: str, loaded: LoadedPlan) -> TimelineFile:
    """Simulate the plan of a file.

    Raises:
        BadPlanError: it cannot be lowered or simulated.
        SimulationError: it does not end, or its own schedule is not a whole step.
    """
    with blaming_plan(loaded):
        lowered = lower_loaded(loaded)
        require_whole_step(lowered, loaded.source)
        timeline = simulate(lowered).timeline
    ops = (
        TimedOp(s.rank, s.step, s.queue, parse_op(s.op), timeline.us(s.start), timeline.us(s.end), s.op_id)
        for s in timeline.spans
    )
    return TimelineFile(
        file, "plan", measured=False, ops=tuple(ops), cost_source=loaded.spec.cost_source,
        note=loaded.spec.placeholder_note, graph=lowered.graph, loaded=loaded,
    )  # fmt: skip


def _of_trace(name: str, content: Mapping[str, Any]) -> TimelineFile:
    events = [event for event in content["traceEvents"] if isinstance(event, dict)]
    queues = {
        (event.get("pid"), event.get("tid")): str(event.get("args", {}).get("name"))
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name"
    }

    def of_slice(event: Mapping[str, Any], _: int) -> TimedOp:
        start, about = _exact(event["ts"]), event["args"]
        rank, queue = int(event["pid"]), queues[event["pid"], event["tid"]]
        end = start + _exact(event["dur"])
        return TimedOp(
            rank, int(about["step"]), queue, parse_op(event["name"]), start, end, int(about["op_id"])
        )  # fmt: skip

    shown = [event for event in events if event.get("ph") == "X" and event.get("cat") != ARRIVAL]
    ops = tuple(_each(name, "slice", shown, of_slice))
    other = content.get("otherData")
    about = other if isinstance(other, dict) else {}
    source = about.get("cost_source")
    return TimelineFile(
        name, "trace", about.get("clock") == "measured", _some(name, ops),
        cost_source=source if source in get_args(CostSource) else None, note=str(about.get("note", "")),
    )  # fmt: skip


def _of_entry(entry: Mapping[str, Any], index: int) -> TimedOp:
    return TimedOp(
        int(entry["rank"]), int(entry["step"]), str(entry["queue"]), parse_op(entry["op"]),
        _exact(entry["start_us"]), _exact(entry["end_us"]), index,
    )  # fmt: skip


def _each(
    name: str, what: str, items: list[Any], read: Callable[[Mapping[str, Any], int], TimedOp]
) -> Iterator[TimedOp]:
    for index, item in enumerate(items):
        try:
            op = read(item, index)
            if not 0 <= op.rank < MOST_RANKS:
                raise ValueError(f"its rank is {op.rank}, and a job has at most {MOST_RANKS:,}")
            yield op
        except KeyError as error:
            raise TimelineFileError(
                f"{name}: {what} {index} has no {error.args[0]!r}; another tool wrote it"
            ) from error
        except MALFORMED as error:
            raise TimelineFileError(f"{name}: {what} {index} is not an operation: {error}") from error


def _some(name: str, ops: tuple[TimedOp, ...]) -> tuple[TimedOp, ...]:
    if not ops:
        raise TimelineFileError(f"{name}: its timeline is empty")
    return ops


def _exact(us: Any) -> Fraction:
    """Microseconds as written, in whole picoseconds: the last digits of a sum of floats are noise."""
    return Fraction(round(us * 10**6), 10**6)


# --- Two plans with placeholder times and different stages, put on the same time per layer ---
# Costs of a plan are per stage. A plan with twice as many stages would have twice the work if each of its stages took
# the same placeholder: its step would be longer because of the default and not because of its schedule.


def with_common_layers(a: TimelineFile, b: TimelineFile) -> tuple[TimelineFile, str]:
    """Return B with the time per layer of A, and a note about the costs of both; the note is empty if nothing differs.

    B is simulated again if both are plans with placeholder times, the same layers, and other stages.

    Raises:
        BadPlanError: the plan of B cannot be simulated with these times.
    """
    if a.loaded is None or b.loaded is None:
        return b, ""
    plan_a, plan_b = a.loaded.spec, b.loaded.spec
    sources = {plan_a.cost_source, plan_b.cost_source}
    if plan_a.has_layer_times and plan_b.has_layer_times:
        return b, ""
    if plan_a.num_stages == plan_b.num_stages or not sources <= {"placeholder", "given"}:
        return b, ""
    text = f"A has {plan_a.num_stages} stages, B {plan_b.num_stages}"
    stages_a, stages_b = stage_layers(plan_a), stage_layers(plan_b)
    same_layers = sorted(sum(stages_a, ())) == sorted(sum(stages_b, ()))
    if sources != {"placeholder"} or not same_layers:
        return b, f"costs are per stage, and {text}: each side has its own"
    cost, stages = plan_a.cost, range(plan_a.num_stages)
    times = {
        key: stage_times(stages_b, layer_times(stages_a, [of_stage(stage) for stage in stages]))
        for key, of_stage in {
            "forward_us": cost.forward_of,
            "backward_input_us": cost.backward_input_of,
            "backward_weight_us": cost.backward_weight_of,
        }.items()
    }
    if not all(times["forward_us"]):
        return b, f"costs are per stage, and {text}: each side has its own"
    kept = {**times, "backward_us": None, "overlapped_us": None}
    spec = plan_b.model_copy(update={"cost": plan_b.cost.model_copy(update=kept)})
    normalized = simulated_plan(b.file, replace(b.loaded, spec=spec))
    restored = replace(normalized, loaded=b.loaded, cost_source=b.cost_source, note=b.note)
    return restored, f"costs are per layer, as in A: {text}"
