"""Write the generated parts of ``docs/pictures.md``: one plan in every output format of a timeline.

``python validation/pages/make_forms.py`` writes, ``--check`` exits 1 if a part is stale.
``make_timeline_picture.py`` makes the screenshot of the page for a browser.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from pages import DOCS, ROOT, fill, main
from rich.console import Console

from pipeproof import load_plan, lower
from pipeproof.cli.timeline_option import write_timeline
from pipeproof.sim.simulate import simulate
from pipeproof.views.timeline_text import render_timeline

PLAN = ROOT / "examples" / "gpt_pp4.yaml"


def terminal() -> str:
    """Return the timeline of the terminal, 80 columns wide."""
    console = Console(file=io.StringIO(), width=80)
    render_timeline(simulate(lower(load_plan(PLAN).spec)).timeline, console)
    assert isinstance(console.file, io.StringIO)
    return _block("text", "$ pipeproof simulate examples/gpt_pp4.yaml\n" + console.file.getvalue())


def written(suffix: str) -> bytes:
    """Return the content that ``simulate -o`` writes into a file with this suffix."""
    lowered = lower(load_plan(PLAN).spec)
    simulation = simulate(lowered)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"plan{suffix}"
        write_timeline(path, PLAN.stem, simulation.timeline, lowered.graph, simulation.memory)
        return path.read_bytes()


def chrome() -> str:
    """Return the first message in the Chrome trace, from send to arrival, and a counter."""
    lines = written(".json").decode().splitlines()
    wanted = ('"name":"0SEND_F0"', '"id":0,"ph":"s"', '"name":"1RECV_F0 is there"', '"id":0,"ph":"f"', '"ph":"C"')
    return _block("json", "\n".join(next(line for line in lines if part in line) for part in wanted))


def _block(kind: str, text: str) -> str:
    return f"```{kind}\n{text.strip()}\n```\n"


def pages() -> dict[Path, str]:
    """Return the page."""
    page = DOCS / "pictures.md"
    parts = {"terminal": terminal(), "chrome": chrome()}
    return {page: fill(page, parts)}


if __name__ == "__main__":
    sys.exit(main("validation/pages/make_forms.py", pages()))
