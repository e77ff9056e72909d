"""Writes ``results/accuracy-left-out.md``: errors of measurements that are left out of the fits of constants.

``python validation/pages/make_left_out.py`` fits to the measurements that come with pipeproof (a minute).
"""

from __future__ import annotations

import sys

from pages import EVIDENCE, ROOT, main, table

sys.path.insert(0, str(ROOT / "benchmarks"))

import fit_host_times
import fit_memory_shares

PAGE = EVIDENCE / "accuracy-left-out.md"
_HEAD = """# Measurements that are left out of a fit

Constants that were [fitted to trainings](accuracy.md#what-was-fitted-on-what) are fitted again to all but
one group, which the result then predicts. `python validation/pages/make_left_out.py` writes this page in a minute, from
the measurements that come with pipeproof, and a test computes it again. `benchmarks/fit_host_times.py` and
`benchmarks/fit_memory_shares.py` print its two parts.

"""


def rows() -> list[tuple[str, str, str, float, float]]:
    """Return each fit: measurements, the part left out in turn, constants, and the mean errors with and without it."""
    found = []
    for fit in fit_host_times.left_out():
        what = "each case" if fit.name == "one GB200 node" else "each case, on all its machines"
        found.append((f"Megatron-LM, dense, {fit.name}", what, fit.constants, fit.within, fit.without))
    for (group, share, error), fits in fit_memory_shares.left_out():
        found += [(group, name, f"memory share {share} ({without} without it)", error, alone)
                  for name, without, alone in fits]  # fmt: skip
    return found


def page() -> str:
    """Return the text of the page."""
    cells = [(*texts, f"{100 * within:.1f} %", f"{100 * without:.1f} %") for *texts, within, without in rows()]
    heading = ("measurements", "left out", "constants", "error with it", "error without it")
    return _HEAD + table(heading, cells)


if __name__ == "__main__":
    sys.exit(main("validation/pages/make_left_out.py", {PAGE: page()}))
