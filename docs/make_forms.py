"""Writes what is generated of ``docs/pictures.md``: one plan in every form that a timeline is written in.

``python docs/make_forms.py`` writes, ``--check`` exits 1 if a part is stale. The screenshot of the page for a browser
is that of ``docs/make_timeline_picture.py``.
"""  # noqa: INP001 - a directory of scripts, not a package

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path

from google.protobuf import text_format
from pages import DOCS, ROOT, fill, main, table
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from rich.console import Console

from pipeproof import load_plan, lower
from pipeproof.commands.timeline_file import write_timeline
from pipeproof.sim.csv_file import COLUMNS
from pipeproof.sim.simulate import simulate
from pipeproof.sim.terminal import render_timeline

PLAN = ROOT / "examples" / "gpt_pp4.yaml"
PICTURE = DOCS / "images" / "plan.svg"
COLUMN_WORDS = {
    "rank": "the global rank",
    "queue": "`compute`, or the channel of a transfer",
    "op": "the operation, in its text form",
    "kind": "what it does: `F`, `B`, `I`, `W`, `SEND_F`, `WAIT` ...",
    "stage": "the global stage",
    "micro_batch": "of a computation or transfer, and of what a wait or a child collective is about; else empty",
    "split": "the piece of its sequences, where these are cut",
    "start_us": "microseconds since the first start",
    "end_us": "the same of its end",
    "exact": "`no` if one of the times has no end as a decimal (1/3), and is rounded to nine digits",
    "bytes": "what a transfer moves of its rank's own tensor; of a collective where the graph says it",
    "peer": "the rank at the other end of a transfer",
    "step": "the training step of a run, 0 in a simulation",
    "op_id": "the operation's place in the graph; the same in every step",
    "clock": "`simulated` or `measured`, the same in every row",
}


def terminal() -> str:
    """The timeline as the terminal has it, 80 columns wide."""
    console = Console(file=io.StringIO(), width=80)
    render_timeline(simulate(lower(load_plan(PLAN).spec)).timeline, console)
    assert isinstance(console.file, io.StringIO)
    return _block("text", "$ pipeproof simulate examples/gpt_pp4.yaml\n" + console.file.getvalue())


def written(suffix: str) -> bytes:
    """What ``simulate -o`` writes into a file of this suffix."""
    lowered = lower(load_plan(PLAN).spec)
    simulation = simulate(lowered)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"plan{suffix}"
        write_timeline(path, PLAN.stem, simulation.timeline, lowered.graph, simulation.memory)
        return path.read_bytes()


def picture() -> str:
    """The SVG; what is there already, if another version of matplotlib made it of the same figures."""
    fresh = written(".svg").decode()
    there = PICTURE.read_text(encoding="utf-8") if PICTURE.exists() else ""
    return there if _about(there)[0] == _about(fresh)[0] and _about(there) != _about(fresh) else fresh


def _about(svg: str) -> tuple[list[str], list[str]]:
    """The title, and which version of matplotlib made it."""
    return re.findall(r"<dc:title>(.*)</dc:title>", svg), re.findall(r"Matplotlib v[\d.]+", svg)


def chrome() -> str:
    """The first message in the Chrome trace, from send to arrival, and a count."""
    lines = written(".json").decode().splitlines()
    wanted = ('"name":"0SEND_F0"', '"id":0,"ph":"s"', '"name":"1RECV_F0 is there"', '"id":0,"ph":"f"', '"ph":"C"')
    return _block("json", "\n".join(next(line for line in lines if part in line) for part in wanted))


def perfetto() -> str:
    """The tracks of a rank, and the packet in which its first send begins."""
    packets = Trace.FromString(written(".pftrace")).packet
    tracks = [packet.track_descriptor for packet in packets if packet.HasField("track_descriptor")]
    first = next(track.uuid for track in tracks if track.HasField("process"))
    names = [track.name for track in tracks if track.parent_uuid == first]
    send = next(packet for packet in packets if packet.track_event.flow_ids)
    return f"Tracks of rank 0: {', '.join(names)}. The packet in which its first send begins:\n\n" + _block(
        "text", text_format.MessageToString(send)
    )


def csv() -> str:
    """The first rows, and what the columns hold."""
    head = "\n".join(written(".csv").decode().splitlines()[:6])
    assert tuple(COLUMN_WORDS) == COLUMNS
    columns = table(("column", "holds"), [(f"`{name}`", words) for name, words in COLUMN_WORDS.items()])
    return f"{_block('text', head)}\n{columns}"


def _block(kind: str, text: str) -> str:
    return f"```{kind}\n{text.strip()}\n```\n"


def pages() -> dict[Path, str]:
    """The page and its picture."""
    page = DOCS / "pictures.md"
    parts = {"terminal": terminal(), "chrome": chrome(), "perfetto": perfetto(), "csv": csv()}
    return {page: fill(page, parts), PICTURE: picture()}


if __name__ == "__main__":
    sys.exit(main("docs/make_forms.py", pages()))
