"""The site in Chromium at three sizes: nothing is wider than the window, and wide tables scroll inside their box."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs_browser, pytest.mark.needs("material")]

ROOT = Path(__file__).parents[2]
PAGES = (
    "index",
    "options",
    "plan",
    "claims",
    "installation",
    "results/reshard-matrix",
    "codes",
    "pictures",
    "zh/tutorial",
)
"""The first page, those with the widest tables, code and pictures, and one in Chinese."""
CLIPPED = """
return Array.from(document.querySelectorAll("article table")).filter((table) => {
  const box = table.closest(".md-typeset__scrollwrap") || table;
  return box.getBoundingClientRect().right > innerWidth + 1 && getComputedStyle(box).overflowX !== "auto";
}).length;
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "-d", str(directory)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, timeout=400, check=True,
    )  # fmt: skip
    return directory


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1024, 768), (1600, 1000)])
def test_pages_fit(site, width, height):
    from tests.sim.browser.driver import Browser

    browser = Browser(width, height)
    try:
        for name in PAGES:
            browser.open(site / f"{name}.html")
            assert browser.run("return document.documentElement.scrollWidth") == width, name
            assert browser.run(CLIPPED) == 0, name
            fonts = browser.run("return getComputedStyle(document.body).fontFamily")
            assert "Noto Sans CJK SC" in fonts
    finally:
        browser.close()
