"""Build the Markdown page of one kind of schedule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from shlex import join

from closed_forms import NAMES, ClosedForm
from known_forms import closed_forms
from pages import table
from shown_schedule import Shown, caption, number, plan_text
from sizes_and_times import Case

from pipeproof.diagnostics.finding import CycleWitness
from pipeproof.diagnostics.text_output import cycle_drawing
from pipeproof.schedule.formats.inexpressible import InexpressibleError
from pipeproof.schedule.formats.read_schedule import WRITTEN_FORMATS, write_schedule
from pipeproof.schedule.kinds import ANY_SIZES, Placement, ScheduleKind, sizes_of
from pipeproof.schedule.programs import UnfitSizesError
from pipeproof.sim.timeline import figures_of, timeline_of
from pipeproof.verify.check_plan import check
from pipeproof.verify.schedule_verdict import Outcome

ANY = "Any number of ranks and micro-batches, including one of either and fewer micro-batches than ranks."

CYCLE = """\
A shortest cycle under the first model named above: `^1` waits for `^2`, and the last waits for `^1`.
([Deadlock](../deadlock.md) explains the models and the remedies.)
"""

CROSSING = (
    "Each of these ranks has a receive behind its own send, and that send waits for the receive of another rank.\n"
)


def page(shown: Shown) -> str:
    """The page of one kind."""
    kind = shown.kind
    parts = [
        f"# `{kind.name}`: {kind.title}\n",
        f"Source: {kind.source}. [All schedules](../schedules.md)\n",
        f"![Timeline of {caption(shown.case)}](../images/schedules/{kind.name}.svg)\n",
        console(shown.case.command()),
        _figures(shown),
        note(kind),
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


def note(kind: ScheduleKind) -> str:
    """The docstring of the module that generates a kind, without its first line, as Markdown."""
    text = import_module(f"pipeproof.schedule.generators.{kind.generator or kind.name}").__doc__
    assert text is not None
    _, _, rest = text.partition("\n")
    return re.sub(r" ?::\n", ":\n", rest.replace("``", "`")).strip() + "\n"


def console(*commands: tuple[str, ...] | str) -> str:
    """A block of command lines."""
    lines = [command if isinstance(command, str) else join(command) for command in commands]
    return "```console\n" + "".join(f"$ {line}\n" for line in lines) + "```\n"


def _figures(shown: Shown) -> str:
    header = ("rank", "stages", "span", "busy", "bubble of span", "bubble of the step", "peak, freed by W",
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
    """The supported numbers of ranks and micro-batches, and how others are refused."""
    kind = shown.kind
    yield "## Sizes\n"
    for variant in kind.variants or (None,):
        condition = sizes_of(kind.name, variant)
        prefix = f"`variant: {variant}`: " if variant else ""
        if condition == ANY_SIZES:
            yield f"{prefix}{ANY}\n"
        else:
            yield f"{prefix}`{condition}`, with `p` ranks and `m` micro-batches.\n"
            yield "".join(f"- {refusal}\n" for refusal in _refusals(replace(shown.case, variant=variant)))


def _refusals(case: Case) -> Iterator[str]:
    """One case for each reason to refuse sizes, with the generator's message."""
    reasons = set()
    for p, m in [(case.p, m) for m in (10, 9, 6, 3)] + [(p, case.m) for p in (3, 5)]:
        try:
            replace(case, p=p, m=m).schedule()
        except UnfitSizesError as error:
            reason = re.sub(r"\d+", "", str(error))
            if reason not in reasons:
                reasons.add(reason)
                yield f"p = {p}, m = {m} is refused: {error}. Help: {error.help}."


def _variants(shown: Shown) -> Iterator[str]:
    """A table of the variants for some numbers of micro-batches, which marks equal orders."""
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
            cells.append(f"not supported; {error.help}")
            continue
        first = first_with.setdefault(programs, variant)
        peaks = " ".join(str(figures.peak_activations) for figures in figures_of(timeline_of(own.timed())))
        cells.append(f"{number(own.timed().makespan)}; {peaks}" if first == variant else f"the order of `{first}`")
    return cells


def _forms(name: str) -> Iterator[str]:
    """The closed forms with their conditions, each with its values inside and outside of the condition."""
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
    stages = "for stages with equal times" if form.even else "for any times of stages"
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
    return " ".join(number(form.true_value(timed, rank) if true else form.formula_value(case, rank)) for rank in ranks)


def _placement(shown: Shown) -> str:
    lists = ", ".join(str(list(stages)) for stages in shown.stages)
    here = f"With {shown.case.p} ranks a plan's `placement` would be `[{lists}]`"
    if shown.kind.placement is Placement.ANY:
        return f"`placement` places the stages: `loop` (the default), `v`, or any lists. {here}.\n"
    return (
        f"Stages are placed {shown.kind.placement.text}. {here}; "
        "it may assign the same sets to the ranks in another order.\n"
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
    """Return whether every rank of the cycle both sends and receives."""
    ops_of: dict[int, str] = {}
    for op in witness.ops:
        ops_of[op.rank] = ops_of.get(op.rank, "") + op.op
    return all("SEND" in ops and "RECV" in ops for ops in ops_of.values())


def _commands(shown: Shown) -> Iterator[str]:
    """Commands for the plan: check, simulate, and every format that can express the schedule."""
    yield "pipeproof check plan.yaml"
    yield "pipeproof simulate plan.yaml"
    for form in WRITTEN_FORMATS:
        try:
            write_schedule(shown.case.schedule(), form)
        except InexpressibleError:
            continue
        yield join(replace(shown.case, f=1, i=1, w=1).command("--as", form))
