"""Page of a hang: the last operations of each rank as a picture, and the verdict as text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Final

from pipeproof.diagnostics.finding import Finding
from pipeproof.diagnostics.units import time_text
from pipeproof.exec.monitor.job import JobNow, RankNow
from pipeproof.exec.monitor.lateness import Lateness
from pipeproof.exec.monitor.ring import OpState, RingOp
from pipeproof.exec.monitor.verdict import Verdict
from pipeproof.interop.hang.diagnose_hang import HangReport
from pipeproof.interop.hang.flight_recorder import Launch, State
from pipeproof.schedule.ops import OpKind
from pipeproof.views.colours import COLLECTIVE, KIND_COLOURS, is_dark
from pipeproof.views.svg import label_in, rect, svg_page, text, tooltip

if TYPE_CHECKING:
    from pipeproof.exec.monitor.plan_ops import PlanOps

_LAST_OPS: Final = 24
_WIDTH, _LEFT, _ROW, _TOP = 1200, 90, 30, 40
_SEND: Final = KIND_COLOURS[OpKind.FORWARD][0]
_RECEIVE: Final = KIND_COLOURS[OpKind.BACKWARD][0]
_PENDING: Final = "#d1242f"
_POSTED: Final = "#6e7781"
_LATE: Final = ' class="late"'


def hang_html(verdict: Verdict, job: JobNow, plan: PlanOps | None = None) -> str:
    """Return the page: one HTML file without a script, which loads nothing from elsewhere.

    With a plan, and for jobs that pipeproof executes, operations have their names in it.
    """
    title = f"{verdict.status}: {verdict.kind}, rank {', '.join(map(str, verdict.causes)) or 'unknown'}"
    notes = (*verdict.reasons, *verdict.plan, *verdict.stacks.lines(verdict.causes))
    tables = [_lateness_table(name, rows) for name, rows in sorted(verdict.lateness.items())]
    rows = {rank.rank: _boxes(rank, job.now_ns, plan) for rank in job.ranks}
    return _page(title, _picture(rows, verdict.causes), verdict.findings, notes, tables)


def dumps_html(report: HangReport) -> str:
    """Return the page about Flight Recorder dumps, with the last launches of each rank."""
    rows = {dump.rank: [_launch_box(launch) for launch in dump.launches[-_LAST_OPS:]] for dump in report.dumps}
    return _page(report.title, _picture(rows, report.causes), report.findings, list(report.lines()))


def _page(
    title: str, picture: str, findings: Iterable[Finding], notes: Iterable[str], tables: Iterable[str] = ()
) -> str:
    parts = [f"<h1>{escape(title)}</h1>", picture]
    parts += [f"<pre>{escape(f'{finding.code} {finding.message}')}</pre>" for finding in findings]
    parts += [f"<p>{escape(line)}</p>" for line in notes]
    parts += tables
    style = (
        "body{font-family:system-ui,sans-serif;margin:2em}pre{white-space:pre-wrap}svg{max-width:100%;height:auto}"
        "table{border-collapse:collapse}th,td{padding:.2em .8em;text-align:right;border-bottom:1px solid #ccc}"
        "tr.late{font-weight:bold}"
    )
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _lateness_table(group: str, rows: Sequence[Lateness]) -> str:
    """Return how late each rank of a group comes to its collectives; a straggler is bold."""
    head = "".join(f"<th>{name}</th>" for name in ("rank", "came last to", "after the others", "others wait for it"))
    body = "".join(
        f"<tr{_LATE if row.is_straggler else ''}><td>{row.rank}</td>"
        f"<td>{row.num_last} of {row.num_collectives}</td><td>{time_text(row.delay_s * 1e6)}</td>"
        f"<td>{row.share:.0%} of the time</td></tr>"
        for row in rows
    )
    title = f"<h2>Collectives of group {escape(group)}</h2>"
    return f"{title}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


_Box = tuple[str, str, list[str]]
"""An operation in a picture: its colour, its text in full, and the lines in its box."""


def _picture(rows: Mapping[int, list[_Box]], causes: Collection[int]) -> str:
    """Return the picture: a row for each rank with its last operations, one column each; those not done are red.

    Columns count the operations of a rank, not time: while a job hangs, the
    wait would be wider than everything before it. A rank that pipeproof executes
    and that waits for nobody ends with the operation of the plan that it is in.
    """
    height = _TOP + _ROW * len(rows) + 10
    title = "Last operations of each rank; red: not done, grey: issued, and nothing has waited for it"
    marks = [text(_LEFT, 24, title, "title")]
    for row, (rank, boxes) in enumerate(rows.items()):
        top = _TOP + row * _ROW
        marks.append(text(8, top + 17, f"rank {rank}" + (" (cause)" if rank in causes else "")))
        for column, box in enumerate(boxes):
            marks += _box(column, top, *box)
    return svg_page((_WIDTH, height), "Last operations of each rank", marks)


def _boxes(rank: RankNow, now_ns: int, plan: PlanOps | None) -> list[_Box]:
    header = rank.ring.header
    is_computing = bool(header.plan_op) and not rank.blocking
    boxes = []
    for op in rank.ring.ops[-(_LAST_OPS - is_computing) :]:
        name = plan_name(rank, op, plan)
        peer = "" if op.peer is None else f" {'->' if op.op == 'send' else '<-'}{op.peer}"
        label = f"{op.op}{peer} #{op.number}"
        about = f"{label} of group {op.group.name}, {op.dtype}{list(op.shape)}, {op.state.name.lower()}, {op.at}"
        lines = [name or f"{op.op}{peer}", f"#{op.number}" if op.step is None else f"step {op.step}"]
        is_done, is_posted = op.state is OpState.DONE, op.state is OpState.LAUNCHED
        boxes.append((_colour(op.op, is_done, is_posted), f"{about}{', ' if op.meaning else ''}{op.meaning}", lines))
    if is_computing:
        seconds = (now_ns - header.plan_op_ns) / 1e9
        boxes.append((_PENDING, rank.plan_position(now_ns), [header.plan_op, time_text(max(0.0, seconds) * 1e6)]))
    return boxes


def _launch_box(launch: Launch) -> _Box:
    first = launch.entries[0]
    colour = _colour(first.kind, not launch.pending, launch.state is State.SCHEDULED)
    about = f"{launch.text}, {first.tensor_text}, {launch.state.name.lower()}, {launch.at}"
    name, _, number = first.text.partition(" #")
    return colour, about, [name, f"#{number.split()[0]}"]


def _colour(op: str, is_done: bool, is_posted: bool) -> str:
    if is_done:
        return {"send": _SEND, "recv": _RECEIVE}.get(op, COLLECTIVE)
    return _POSTED if is_posted else _PENDING


def plan_name(rank: RankNow, op: RingOp, plan: PlanOps | None) -> str:
    """Return the operation of the plan that an operation of a rank is; empty where that is not certain."""
    if op.plan_op or plan is None:
        return op.plan_op
    planned = plan.name(rank.ring, op).planned
    return "" if planned is None else planned.text


def _box(column: int, top: int, colour: str, about: str, lines: list[str]) -> Iterator[str]:
    width = (_WIDTH - _LEFT - 10) / _LAST_OPS
    x = _LEFT + column * width
    yield rect(colour, x, top, width - 1, _ROW - 6, tooltip(about))
    middle, room = (x + width / 2, top + (_ROW - 6) / 2), (width - 3, _ROW - 8)
    yield label_in(middle, room, lines, on_dark=is_dark(colour))
