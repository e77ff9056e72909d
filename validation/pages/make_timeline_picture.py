"""Make ``docs/images/timeline.png``: the page of an example plan in Chromium.

``python validation/pages/make_timeline_picture.py`` needs Chromium, which ``make test-browser`` installs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from pages import DOCS, ROOT

sys.path.insert(0, str(ROOT))
from tests.sim.browser.driver import Browser

PLAN = ROOT / "examples" / "gpt_pp4.yaml"
WIDTH, HEIGHT = 1080, 550
POINTED_AT = ("1B3", 1)
"""The operation under the pointer, and its rank."""


def main() -> None:
    """Simulate the plan, open the page, switch the critical path on, point at an operation, take the picture."""
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "timeline.html"
        subprocess.run([sys.executable, "-m", "pipeproof", "simulate", PLAN, "-o", page], cwd=ROOT, check=True)
        browser = Browser(WIDTH, HEIGHT)
        try:
            browser.open(page)
            browser.press("c")
            box = browser.run("return pipeproof.place(...arguments)", *POINTED_AT)
            top = browser.run("return document.getElementById('canvas').getBoundingClientRect().top")
            browser.move(box["x"] + box["w"] / 2, top + box["y"] + box["h"] / 2)
            (DOCS / "images" / "timeline.png").write_bytes(browser.screenshot())
        finally:
            browser.close()


if __name__ == "__main__":
    main()
