"""Make the screenshots of the pages for a browser at three widths: ``docs/images/play-*.png`` and ``page-*.png``.

``python validation/pages/make_page_pictures.py`` needs Chromium, which ``make test-browser`` installs.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from pages import DOCS, ROOT

sys.path.insert(0, str(ROOT))
from pipeproof.views.play.play_page import play_html
from tests.sim.browser.driver import Browser

SIZES = ((390, 844), (1024, 768), (1600, 1000))
"""Width and height of a phone, a small window and a large one."""


def main() -> None:
    """Write each page to a temporary file, open it at each size, take the picture."""
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "play.html"
        page.write_text(play_html(), encoding="utf-8")
        for width, height in SIZES:
            browser = Browser(width, height)
            try:
                browser.prefer("light")
                browser.open(page)
                browser.settle()
                (DOCS / "images" / f"play-{width}.png").write_bytes(browser.screenshot())
            finally:
                browser.close()


if __name__ == "__main__":
    main()
