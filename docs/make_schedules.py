"""Writes ``docs/schedules``: a page for each kind of schedule with its picture, and their index.

``python docs/make_schedules.py`` writes, ``--check`` exits 1 if a page or a
picture is stale. Texts by hand are in ``docs/schedules/notes``; all figures are
computed here, from the schedules themselves.
"""  # noqa: INP001 - a directory of scripts, not a package

from __future__ import annotations

import sys
from fractions import Fraction
from pathlib import Path

from pages import DOCS, main, table
from schedule_page import PAGES, WRITTEN_BY, page
from shown_schedule import Shown, caption, number

from pipeproof.comm.channel_models import MODELS
from pipeproof.schedule.kinds import SCHEDULE_KINDS, Placement, ScheduleKind
from pipeproof.sim.svg import schedule_svg

PICTURES = DOCS / "images" / "schedules"

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
- **deadlock**: *robust*, or *conditional*: under how many of {models} [channel models](../deadlock.md#channel-models)
  it would wait for itself. All are safe on the backend that runs them; the pages name the models.

`pipeproof schedule list` prints the kinds and their conditions, `pipeproof schedule show KIND -p 4 -m 8` the timeline
of one, `pipeproof advise PLAN` which of them would make a plan faster.
"""


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
    wanted = pages()
    sys.exit(main("docs/make_schedules.py", wanted, strays(wanted)))
