"""Write the table of ``docs/schedules.md``; the site gets a page with a picture for each kind of schedule.

``python validation/pages/make_schedules.py`` writes the table, ``--check`` exits 1 if it is stale. The text of a page
is the docstring of the kind's generator; all figures are computed here, from the schedules themselves. ``site_hooks``
adds pages and pictures when the site is built.
"""

from __future__ import annotations

import sys
from fractions import Fraction

from pages import DOCS, fill, listed, main, table
from schedule_page import page
from shown_schedule import Shown, caption, number

from pipeproof.comm.channel_models import MODELS
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement, ScheduleKind
from pipeproof.views.schedule_svg import schedule_svg

INDEX = """\
In the table below, every schedule runs the same network on {p} ranks with {m} micro-batches. The forward, the gradient
of inputs and the gradient of weights of a micro-batch take 1 each on a rank's share of the network. Messages take no
time, and each rank computes as soon as it can. A rank with two stages has two halves of that share; where sequences are
split, there are two splits. An overlapped pair of a forward and a backward takes the sum of both times, although
overlap is meant to take less. Each rank therefore works for {work} in total, and the rest of the makespan is bubble.
"""

COLUMNS = """\
- **bubble**: the largest idle time of a rank within the makespan. In parentheses: the largest idle time of a rank
  within its own span (first start to last end), which zero-bubble papers report.
- **peak**: the largest number of activations that a rank holds at a time, each freed at the end of W (of B if the
  backward is whole). The unit is the activations of a rank's share of the network for one micro-batch.
- **weights**: the number of copies of the network; 2 if each stage has two copies.
- **deadlock**: *robust*, or *conditional* with the number of [channel models](deadlock.md#channel-models), of
  {models}, under which it deadlocks. All schedules are safe on the backend that runs them; the pages name the models.
"""


def schedule_pages() -> tuple[dict[str, str], dict[str, str]]:
    """The page and the picture of each kind."""
    all_shown = [Shown(kind) for kind in SCHEDULE_KINDS.values()]
    pictures = {shown.kind.name: schedule_svg(shown.case.timed(), caption(shown.case)) for shown in all_shown}
    return {shown.kind.name: page(shown) for shown in all_shown}, pictures


def kinds_part() -> str:
    """The table of all kinds, with the meaning of its columns."""
    all_shown = [Shown(kind) for kind in SCHEDULE_KINDS.values()]
    case = all_shown[0].case
    header = ("schedule", "description", "stages per rank", "placement", "backward", "makespan", "bubble", "peak",
              "weights", "deadlock")  # fmt: skip
    parts = [
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
        listed(kind.name, f"`{kind.name}`"), kind.title, _chunks(kind), _placed(kind), shown.backward, number(makespan),
        f"{_percent(bubble)} ({_percent(in_span)})", number(shown.peak), str(shown.copies),
        shown.verdict.outcome + (f", {failing}" if failing else ""),
    )  # fmt: skip


def _percent(ratio: Fraction) -> str:
    return f"{float(ratio * 100):.1f} %"


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


if __name__ == "__main__":
    file = DOCS / "schedules.md"
    sys.exit(main("validation/pages/make_schedules.py", {file: fill(file, {"kinds": kinds_part()})}))
