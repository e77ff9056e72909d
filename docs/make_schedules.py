"""Writes ``docs/schedules``: a page for each kind of schedule with its picture, and their index.

``python docs/make_schedules.py`` writes, ``--check`` exits 1 if a page or a
picture is stale. Texts by hand are in ``docs/schedules/notes``; all figures are
computed here, from the schedules themselves.
"""  # noqa: INP001 - a directory of scripts, not a package

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from shlex import join
from types import MappingProxyType

from closed_forms import NAMES, ClosedForm, closed_forms
from pages import DOCS, main, table
from sizes_and_times import Case

from pipeproof.comm.sample_plan import sample_plan
from pipeproof.schedule.asap import Time
from pipeproof.schedule.inexpressible import InexpressibleError
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement, ScheduleKind
from pipeproof.schedule.ops import OpKind, parse_op
from pipeproof.schedule.programs import UnfitSizesError, stages_of
from pipeproof.schedule.sizes import ANY_SIZES, sizes_of
from pipeproof.schedule.write import WRITTEN_FORMATS, write_schedule
from pipeproof.sim.figures import RankFigures, figures_of
from pipeproof.sim.svg import schedule_svg
from pipeproof.sim.timed import timeline_of
from pipeproof.specs.finding import CycleWitness
from pipeproof.specs.load import LoadedPlan
from pipeproof.specs.render_cycle import cycle_drawing
from pipeproof.verify.check import check
from pipeproof.verify.deadlock.models import MODELS
from pipeproof.verify.schedule_verdict import Outcome, ScheduleVerdict, judge_schedule

PAGES = DOCS / "schedules"
PICTURES = DOCS / "images" / "schedules"

WRITTEN_BY = "<!-- Written by docs/make_schedules.py from the schedules and docs/schedules/notes. Do not edit. -->\n"

INDEX = """\
# Schedules

The order in which each pipeline rank works on its micro-batches, as `schedule.kind` names it in a plan. Each is a pure
function of sizes (and, for `optimal`, of times), and has a page with its timeline, its closed forms and their
conditions. `custom` and `file` are schedules of one's own: [schedules from files](../schedules-from-files.md).

Below, every schedule runs the same network: {p} ranks, {m} micro-batches; forward, gradient of inputs and gradient of
weights of a micro-batch take 1 each on a rank's share of the network, messages take no time, and each rank computes as
soon as it can. A rank with two stages has two halves of that share; where sequences are cut, they are cut in two. A
forward beside a backward takes as long as one after the other, though it is there to take less. So each rank works for
{work} in all, and what the makespan has above that is bubble.
"""

COLUMNS = """\
- **bubble**: idle time of a rank in the makespan; the largest of a rank within its own span (first start to last end),
  which is what zero-bubble papers report, in brackets.
- **peak**: the most activations that a rank holds at a time, freed by the end of W (of B where it is whole); 1 is what
  a rank's share of the network keeps for one micro-batch.
- **weights**: how often the network is there; 2 where each stage has two copies.
- **deadlock**: *robust*, or *conditional*: under how many of {models} [channel models](../deadlock.md#channel-models) it
  would wait for itself. All are safe on the backend that runs them; the pages name the models.

`pipeproof schedule list` prints the kinds and their conditions, `pipeproof schedule show KIND -p 4 -m 8` the timeline of
one, `pipeproof advise PLAN` which of them would make a plan faster.
"""

CYCLE = """\
A shortest cycle under the first model that is named: `^1` waits for `^2`, and the last for `^1`. ([Deadlock](../deadlock.md)
says what the models are, and what helps.)
"""

CROSSING = (
    "Each of these ranks has a receive behind a send of its own, and that send waits for the receive of another.\n"
)


MEMORY_LIMITS = MappingProxyType({"optimal": 4})
"""What is shown of kinds that keep to a limit: one stage a rank, in the memory of 1F1B."""


@dataclass(frozen=True)
class Shown:
    """A kind with all that its page says of it."""

    kind: ScheduleKind

    @cached_property
    def case(self) -> Case:
        """What the picture and the index show: every rank's share of the network takes 1, 1 and 1."""
        limit = MEMORY_LIMITS.get(self.kind.name)
        num_chunks = 2 if self.kind.max_chunks is None and limit is None else self.kind.min_chunks
        share = 1 if num_chunks == 1 else Fraction(1, num_chunks)
        splits = 2 if self.kind.splits_sequences else 1
        return Case(self.kind.name, v=num_chunks, k=splits, f=share, i=share, w=share, memory_limit=limit)

    @cached_property
    def figures(self) -> tuple[RankFigures, ...]:
        """Of each rank, in the picture."""
        return figures_of(timeline_of(self.case.timed()))

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank."""
        return stages_of(self.case.schedule().programs)

    @cached_property
    def plan(self) -> LoadedPlan:
        """A plan of the schedule."""
        case = self.case
        return sample_plan(
            case.kind, case.p, case.m, num_chunks=case.num_chunks,
            num_sequence_splits=case.k, variant=next(iter(self.kind.variants), None), memory_limit=case.memory_limit,
        )  # fmt: skip

    @cached_property
    def verdict(self) -> ScheduleVerdict:
        """What the rules say of the plan."""
        return judge_schedule(self.plan)

    @cached_property
    def copies(self) -> int:
        """On how many ranks each stage stands."""
        return sum(map(len, self.stages)) // len({stage for stages in self.stages for stage in stages})

    @cached_property
    def peak(self) -> Fraction:
        """Of the busiest rank, in shares of the network."""
        num_stages = self.case.p * self.case.num_chunks
        return Fraction(max(own.peak_activations for own in self.figures) * self.case.p, num_stages * self.case.k)

    @cached_property
    def backward(self) -> str:
        """Which forms of backward there are, in words."""
        schedule = self.case.schedule()
        kinds = {op.kind for program in schedule.programs for op in program}
        forms = {OpKind.BACKWARD: "whole", OpKind.BACKWARD_INPUT: "in two parts"}
        words = [word for kind, word in forms.items() if kind in kinds]
        return " and ".join(words) + (", beside forwards" if any(schedule.pairs) else "")


def pages() -> dict[Path, str]:
    """Every page and picture by its path."""
    all_shown = [Shown(kind) for kind in SCHEDULE_KINDS.values()]
    made = {PAGES / "README.md": index(all_shown)}
    for shown in all_shown:
        made[PAGES / f"{shown.kind.name}.md"] = page(shown)
        made[PICTURES / f"{shown.kind.name}.svg"] = schedule_svg(shown.case.timed(), caption(shown.case))
    return made


def strays(wanted: dict[Path, str]) -> frozenset[Path]:
    """Pages and pictures of kinds that there are no more."""
    written = (path for path in PAGES.glob("*.md") if path.read_text(encoding="utf-8").startswith(WRITTEN_BY))
    return frozenset({*written, *PICTURES.glob("*.svg")} - set(wanted))


def index(all_shown: list[Shown]) -> str:
    """The table of all kinds."""
    case = all_shown[0].case
    header = ("schedule", "what it is", "stages a rank", "placed", "backward", "makespan", "bubble", "peak",
              "weights", "deadlock")  # fmt: skip
    parts = [
        WRITTEN_BY,
        INDEX.format(p=case.p, m=case.m, work=3 * case.m),
        table(header, [_index_row(shown) for shown in all_shown]),
        COLUMNS.format(models=len(MODELS)),
    ]
    return "\n".join(parts)


def _index_row(shown: Shown) -> tuple[str, ...]:
    kind, figures = shown.kind, shown.figures
    makespan = shown.case.timed().makespan
    bubble = max(own.bubble_makespan_ratio for own in figures)
    in_span = max(own.bubble_span_ratio for own in figures)
    failing = len(shown.verdict.failing)
    return (
        f"[`{kind.name}`]({kind.name}.md)", kind.title, _chunks(kind), _placed(kind), shown.backward, number(makespan),
        f"{_percent(bubble)} ({_percent(in_span)})", number(shown.peak), str(shown.copies),
        shown.verdict.outcome + (f", {failing}" if failing else ""),
    )  # fmt: skip


def _percent(ratio: Fraction) -> str:
    return f"{float(ratio * 100):.1f} %"


def number(value: Time) -> str:
    """Exact where three digits after the point are enough."""
    return f"{float(value):.3f}".rstrip("0").rstrip(".")


def _chunks(kind: ScheduleKind) -> str:
    if kind.max_chunks is None:
        return f"{kind.min_chunks} or more"
    return "1, two copies" if kind.placement is Placement.BOTH_WAYS else str(kind.max_chunks)


def _placed(kind: ScheduleKind) -> str:
    words = {
        Placement.LOOP: "loop",
        Placement.V: "v",
        Placement.BOTH_WAYS: "from both ends",
        Placement.ANY: "any",
    }
    return words[kind.placement]


def caption(case: Case) -> str:
    """What a picture is of."""
    parts = [f"{case.kind}, {case.p} ranks, {case.m} micro-batches"]
    parts += [f"{case.num_chunks} stages a rank"] if case.num_chunks > 1 else []
    parts += [f"sequences cut in {case.k}"] if case.k > 1 else []
    parts += [f"at most {case.memory_limit} activations"] if case.memory_limit is not None else []
    return ", ".join(parts)


def page(shown: Shown) -> str:
    """The page of one kind."""
    kind = shown.kind
    parts = [
        WRITTEN_BY,
        f"# `{kind.name}`: {kind.title}\n",
        f"Source: {kind.source}. [All schedules](README.md)\n",
        f"![Timeline of {caption(shown.case)}](../images/schedules/{kind.name}.svg)\n",
        console(shown.case.command()),
        _figures(shown),
        note(kind.name),
        *_sizes(shown),
        *_variants(shown),
        *_forms(kind.name),
        "## Placement\n",
        _placement(shown),
        "## Deadlock\n",
        *_deadlock(shown),
        "## In a plan\n",
        f"```yaml\n{plan_text(shown)}```\n",
        console(*_commands(shown)),
    ]
    return "\n".join(parts)


def note(name: str) -> str:
    """What is written by hand about a kind.

    Raises:
        ValueError: nothing is.
    """
    path = PAGES / "notes" / f"{name}.md"
    if not path.exists():
        raise ValueError(f"{path.relative_to(DOCS.parent)} is missing: every kind of schedule has a note")
    return path.read_text(encoding="utf-8")


def console(*commands: tuple[str, ...] | str) -> str:
    """A block of command lines."""
    lines = [command if isinstance(command, str) else join(command) for command in commands]
    return "```console\n" + "".join(f"$ {line}\n" for line in lines) + "```\n"


def _figures(shown: Shown) -> str:
    header = ("rank", "stages", "span", "busy", "bubble of span", "bubble of makespan", "peak, freed by W",
              "peak, freed by I")  # fmt: skip
    rows = [
        (
            str(own.rank), " ".join(map(str, shown.stages[own.rank])), number(own.span_us), number(own.busy_us),
            number(own.bubble_span_us), number(own.bubble_makespan_us), str(own.peak_activations),
            str(own.peak_activations_at_i),
        )
        for own in shown.figures
    ]  # fmt: skip
    return table(header, rows)


def _sizes(shown: Shown) -> Iterator[str]:
    """For which numbers of ranks and micro-batches there is one, and how others are refused."""
    kind = shown.kind
    yield "## Sizes\n"
    for variant in kind.variants or (None,):
        condition = sizes_of(kind.name, variant)
        who = f"`variant: {variant}`: " if variant else ""
        if condition == ANY_SIZES:
            yield f"{who}Any number of ranks `p` and micro-batches `m`, one of either and fewer `m` than `p` included.\n"
        else:
            yield f"{who}`{condition}`, with `p` ranks and `m` micro-batches.\n"
            yield "".join(f"- {refusal}\n" for refusal in _refusals(replace(shown.case, variant=variant)))


def _refusals(case: Case) -> Iterator[str]:
    """The first sizes that are refused for each key of the plan, in the words of the generator."""
    told = set()
    for p, m in [(case.p, m) for m in (10, 9, 6, 3)] + [(p, case.m) for p in (3, 5)]:
        try:
            replace(case, p=p, m=m).schedule()
        except UnfitSizesError as error:
            if error.key not in told:
                told.add(error.key)
                yield f"p = {p}, m = {m} is refused: {error}. Help: {error.help}."


def _variants(shown: Shown) -> Iterator[str]:
    """The variants beside each other for some numbers of micro-batches, with what is equal to what."""
    if not shown.kind.variants:
        return
    cases = [replace(shown.case, m=m) for m in (shown.case.p, shown.case.m, 10)]
    columns = [_variant_cells(shown.kind, case) for case in cases]
    header = ("variant", *(f"m = {case.m}" for case in cases))
    yield "## Variants\n"
    yield f"On {shown.case.p} ranks with {shown.case.num_chunks} stages each, makespan and peaks, rank by rank:\n"
    yield table(header, [(f"`{name}`", *cells) for name, *cells in zip(shown.kind.variants, *columns, strict=True)])


def _variant_cells(kind: ScheduleKind, case: Case) -> list[str]:
    first_with: dict[object, str] = {}
    cells = []
    for variant in kind.variants:
        own = replace(case, variant=variant)
        try:
            programs = own.schedule().programs
        except UnfitSizesError as error:
            cells.append(f"none; {error.help}")
            continue
        first = first_with.setdefault(programs, variant)
        peaks = " ".join(str(figures.peak_activations) for figures in figures_of(timeline_of(own.timed())))
        cells.append(f"{number(own.timed().makespan)}; {peaks}" if first == variant else f"the order of `{first}`")
    return cells


def _forms(name: str) -> Iterator[str]:
    """The closed forms with their conditions, each with what it gives inside and outside."""
    forms = closed_forms(name)
    if not forms:
        return
    yield "## Closed forms\n"
    names = {name for form in forms for name in form.names}
    yield "Names: " + "; ".join(f"`{name}` {meaning}" for name, meaning in NAMES.items() if name in names) + ".\n"
    for form in forms:
        yield _form(form)


def _form(form: ClosedForm) -> str:
    lines = [f"**{form.quantity[0].upper()}{form.quantity[1:]}** {form.relation}\n"]
    where = "".join(f"    {name} = {expression}\n" for name, expression in form.where)
    lines.append(f"    {form.formula}\n{where}")
    stages = "for stages with equal times" if form.even else "whatever the times of stages"
    condition = "" if form.condition == "True" else f", if `{form.condition}`"
    verb = "reached for" if form.relation != "=" else "as in"
    lines.append(f"{stages[0].upper()}{stages[1:]}{condition}; {verb} `{join(form.inside_case.command())}`: "
                 f"{_values(form, form.inside_case, true=True)}.\n")  # fmt: skip
    if form.outside is not None:
        which = "Not reached" if form.relation != "=" else "Outside"
        lines.append(f"{which}: `{join(form.outside.command())}` has {_values(form, form.outside, true=True)}, "
                     f"the formula gives {_values(form, form.outside, true=False)}.\n")  # fmt: skip
    return "\n".join(lines)


def _values(form: ClosedForm, case: Case, *, true: bool) -> str:
    timed = case.timed()
    ranks = range(case.p if form.by_rank else 1)
    return " ".join(number(form.true_value(timed, rank) if true else form.says(case, rank)) for rank in ranks)


def _placement(shown: Shown) -> str:
    lists = ", ".join(str(list(stages)) for stages in shown.stages)
    if shown.kind.placement is Placement.ANY:
        rule = "`placement` may be `loop`, `v` or any lists"
    else:
        rule = "`placement` may deal these sets of stages to the ranks in another order, as lists"
    return (
        f"Stages stand {shown.kind.placement.text}. With {shown.case.p} ranks: `[{lists}]`, which is what a plan's "
        f"`placement` would list. {rule}.\n"
    )


def _deadlock(shown: Shown) -> Iterator[str]:
    verdict = shown.verdict
    assert verdict.outcome is not Outcome.WRONG, verdict.reason
    yield f"**{verdict.outcome.capitalize()}** for {caption(shown.case)}: {verdict.reason}.\n"
    if verdict.outcome is Outcome.CONDITIONAL:
        witness = next(finding.witness for finding in check(shown.plan).findings if finding.code in ("PP411", "PP412"))
        assert isinstance(witness, CycleWitness)
        yield CYCLE
        yield "```text\n" + "".join(f"{line}\n" for line in cycle_drawing(witness)) + "```\n"
        if _crosses(witness):
            yield CROSSING


def _crosses(witness: CycleWitness) -> bool:
    """Whether every rank of the cycle both sends and receives."""
    kinds: dict[int, set[OpKind]] = {}
    for op in witness.ops:
        kinds.setdefault(op.rank, set()).add(parse_op(op.op).kind)
    return all({OpKind.SEND, OpKind.RECV} <= there for there in kinds.values())


def plan_text(shown: Shown) -> str:
    """A plan file with the schedule of the picture."""
    case, kind = shown.case, shown.kind
    further = [f"variant: {kind.variants[0]}"] if kind.variants else []
    further += [f"num_chunks: {case.num_chunks}"] if case.num_chunks > 1 else []
    further += [f"num_sequence_splits: {case.k}"] if case.k > 1 else []
    further += [f"memory_limit: {case.memory_limit}"] if case.memory_limit is not None else []
    schedule = ", ".join(
        [f"kind: {kind.name}", *further, f"num_micro_batches: {case.m}", "micro_batch_size: 1"],
    )
    return (
        "pipeproof: 1\n"
        f"model: {{kind: gpt, num_layers: {case.p * case.num_chunks}, hidden_size: 64, num_heads: 4, ffn_size: 128,\n"
        "        vocab_size: 256, seq_length: 32}\n"
        f"topology: {{pp: {case.p}}}\n"
        f"schedule: {{{schedule}}}\n"
    )


def _commands(shown: Shown) -> Iterator[str]:
    """What one may do with it: check and simulate the plan, and every format that can say the schedule."""
    yield "pipeproof check plan.yaml"
    yield "pipeproof simulate plan.yaml"
    for form in WRITTEN_FORMATS:
        try:
            write_schedule(shown.case.schedule(), form)
        except InexpressibleError:
            continue
        yield join(replace(shown.case, f=1, i=1, w=1).command("--format", form))


if __name__ == "__main__":
    wanted = pages()
    sys.exit(main("docs/make_schedules.py", wanted, strays(wanted)))
