"""Page of a hang: the last operations of each rank as a picture, and the verdict as text."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from pipeproof.exec.monitor.job import JobNow
from pipeproof.exec.monitor.ring import OpState, RingOp
from pipeproof.exec.monitor.verdict import Verdict
from pipeproof.schedule.ops import OpKind
from pipeproof.views.colours import COLLECTIVE, KIND_COLOURS, is_dark
from pipeproof.views.svg import label_in, rect, svg_page, text, tooltip

_LAST_OPS: Final = 24
_WIDTH, _LEFT, _ROW, _TOP = 1200, 90, 30, 40
_SEND: Final = KIND_COLOURS[OpKind.FORWARD][0]
_RECEIVE: Final = KIND_COLOURS[OpKind.BACKWARD][0]
_PENDING: Final = "#d1242f"


def hang_html(verdict: Verdict, job: JobNow) -> str:
    """Return the page: one HTML file without a script, which loads nothing from elsewhere."""
    title = f"{verdict.status}: {verdict.kind}, rank {', '.join(map(str, verdict.causes)) or 'unknown'}"
    parts = [f"<h1>{escape(title)}</h1>", hang_svg(verdict, job)]
    parts += [f"<pre>{escape(f'{finding.code} {finding.message}')}</pre>" for finding in verdict.findings]
    parts += [f"<p>{escape(line)}</p>" for line in (*verdict.reasons, *verdict.stacks.lines(verdict.causes))]
    style = "body{font-family:system-ui,sans-serif;margin:2em}pre{white-space:pre-wrap}svg{max-width:100%;height:auto}"
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def hang_svg(verdict: Verdict, job: JobNow) -> str:
    """Return the picture: a row for each rank with its last operations, one column each; those that wait are red.

    Columns count the operations of a rank, not time: while a job hangs, the
    wait would be wider than everything before it.
    """
    height = _TOP + _ROW * len(job.ranks) + 10
    marks = [text(_LEFT, 24, "Last operations of each rank; red: not done", "title")]
    for row, rank in enumerate(job.ranks):
        top = _TOP + row * _ROW
        name = f"rank {rank.rank}" + (" (cause)" if rank.rank in verdict.causes else "")
        marks.append(text(8, top + 17, name))
        marks += _row(rank.ring.ops[-_LAST_OPS:], top)
    return svg_page((_WIDTH, height), "Last operations of each rank", marks)


def _row(ops: tuple[RingOp, ...], top: int) -> Iterator[str]:
    width = (_WIDTH - _LEFT - 10) / _LAST_OPS
    for column, op in enumerate(ops):
        x = _LEFT + column * width
        colour = {"send": _SEND, "recv": _RECEIVE}.get(op.op, COLLECTIVE)
        colour = colour if op.state is OpState.DONE else _PENDING
        peer = "" if op.peer is None else f" {'->' if op.op == 'send' else '<-'}{op.peer}"
        label = f"{op.op}{peer} #{op.number}"
        about = f"{label} of group {op.group.name}, {op.dtype}{list(op.shape)}, {op.state.name.lower()}, {op.at}"
        yield rect(colour, x, top, width - 1, _ROW - 6, tooltip(about))
        middle, room = (x + width / 2, top + (_ROW - 6) / 2), (width - 3, _ROW - 8)
        lines = [f"{op.op}{peer}", f"#{op.number}"]
        yield label_in(middle, room, lines, on_dark=is_dark(colour))
