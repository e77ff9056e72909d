"""Make the screenshots of the pages for a browser at three widths: play and page in ``docs/images``.

``python validation/pages/make_page_pictures.py`` needs Chromium, which ``make test-browser`` installs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from pages import DOCS, ROOT

sys.path.insert(0, str(ROOT))
from pipeproof.views.play.play_page import play_html
from tests.sim.browser.driver import Browser

SIZES = ((390, 844), (1024, 768), (1600, 1000))
"""Width and height of a phone, a small window and a large one."""

PLAN = (ROOT / "examples" / "gpt_pp4.yaml").read_text(encoding="utf-8")
SLOW_LINKS = PLAN.replace("p2p_latency_us: 0", "p2p_latency_us: 40")
SELECTED = ("1B2", 1)
"""The operation whose causes are shown, and its rank."""


def main() -> None:
    """Write each page to a temporary file, open it at each size, take the picture."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        (folder / "slow_links.yaml").write_text(SLOW_LINKS, encoding="utf-8")
        play, timeline = (folder / name for name in ("play.html", "timeline.html"))
        play.write_text(play_html(), encoding="utf-8")
        _command(folder, "simulate", "slow_links.yaml", "-o", timeline.name)
        for width, height in SIZES:
            for name, page in (("play", play), ("page", timeline)):
                _picture(page, name, width, height)


def _command(folder: Path, *arguments: str) -> None:
    """Run a command in a folder: titles then have the names of its files. Plans that differ have the status 1."""
    command = [sys.executable, "-m", "pipeproof", *arguments]
    done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stderr)


def _picture(page: Path, name: str, width: int, height: int) -> None:
    browser = Browser(width, height)
    try:
        browser.prefer("light")
        browser.open(page)
        browser.settle()
        if name == "page":  # the causes of an operation, and the numbers of the time until its end
            browser.press("w")
            box = browser.run("return pipeproof.place(...arguments)", *SELECTED)
            top = browser.run("return document.getElementById('canvas').getBoundingClientRect().top")
            browser.click(box["x"] + box["w"] / 2, top + box["y"] + box["h"] / 2)
            browser.press("]")
        browser.settle()
        (DOCS / "images" / f"{name}-{width}.png").write_bytes(browser.screenshot())
    finally:
        browser.close()


if __name__ == "__main__":
    main()
