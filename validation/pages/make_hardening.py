"""Write the measured parts of ``validation/results/hardening.md`` from ``validation/results/hardening.json``.

``python validation/pages/make_hardening.py`` writes, ``--check`` exits 1 if a page is stale. The figures come from
``validation/hardening/*.py --write`` and ``python -m tests.fuzz --write``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pages import EVIDENCE, fill, main, table

RESULTS = json.loads((EVIDENCE / "hardening.json").read_text(encoding="utf-8"))


_ENVIRONMENTS = (
    ("disk", "environments", "commands on a full disk, or with a limit of the size of files"),
    ("signals", "environments", "commands ended by SIGINT, SIGTERM, SIGHUP or SIGQUIT at a random moment"),
    ("users", "environments", "commands with an input, an output or a TMPDIR of another user"),
    ("strangers", "strangers", "runs that start while a stranger connects to each of their ports"),
)


def limits_table() -> str:
    """Return time and memory of every limit."""
    rows = [
        (row["name"], row["limit"], f"{row['seconds']:g} s", f"{row['peak_mb']} MB", str(row["status"]))
        for row in RESULTS["limits"]
    ]
    return table(("input", "limit", "time", "peak memory", "exit status"), rows)


_PLACES = (("", ""), ("_on_gpus", ", on two GPUs with NCCL, 12 or 20 runs at a time"))
"""Suffix of the figures of kills and starts, and where they were measured."""


def kills_row(suffix: str, where: str) -> tuple[str, ...]:
    """Return the row of kills."""
    kills = RESULTS[f"kills{suffix}"]
    return (
        "kill", "`validation/hardening/kill_resume.py`",
        (f"{kills['kills']} launchers killed, then the run completed ({kills['resumed_from_a_state']} from a state), "
        f"compared bit for bit{where}"),
        f"{kills['equal']}; {kills['processes_left']} processes left, the last ended after {kills['longest_end_s']} s",
        f"{kills['seconds']:,} s",
    )  # fmt: skip


def starts_row(suffix: str, where: str) -> tuple[str, ...]:
    """Return the row of starts."""
    starts = RESULTS[f"starts{suffix}"]
    return (
        "start", "`validation/hardening/kill_resume.py`", f"{starts['starts']} runs started in a row{where}",
        f"{starts['passed']}", f"{starts['seconds']:,} s",
    )  # fmt: skip


def tried_table() -> str:
    """Return the attempts of each tool and the number that was handled."""
    fuzz, soak = RESULTS["fuzz"], RESULTS["soak"]
    limits = RESULTS["limits"]
    environments = [
        (name, f"`validation/hardening/{file}.py`", f"{len(RESULTS[name]['runs'])} {tried}",
         f"{sum(run['problem'] is None for run in RESULTS[name]['runs'])}", f"{RESULTS[name]['seconds']} s")
        for name, file, tried in _ENVIRONMENTS
    ]  # fmt: skip
    growths = ", ".join(f"{process} {kb:,} kB" for process, kb in soak["kb_per_1000_steps"].items())
    num_handled = sum(row["problem"] is None for row in limits)
    rows = [
        ("fuzz", "`python -m tests.fuzz`", f"{fuzz['mutants']:,} mutants of {fuzz['readers']} kinds of files",
         f"{fuzz['mutants'] - fuzz['not_handled']:,}", f"{fuzz['seconds']} s"),
        ("limits", "`validation/hardening/limits.py`", f"{len(limits)} inputs at or beyond a limit", f"{num_handled}",
         f"{sum(row['seconds'] for row in limits):.0f} s"),
        *(kills_row(suffix, where) for suffix, where in _PLACES),
        *(starts_row(suffix, where) for suffix, where in _PLACES),
        ("soak", "`validation/hardening/kill_resume.py`", (f"{soak['steps']:,} steps with 20 checkpoints, "
         f"{soak['processes']} processes"), (f"status {soak['status']}; resident memory in 1,000 steps: {growths}; "
         f"{soak['descriptors_grown']} descriptors more"),
         f"{soak['seconds']} s"),
        *environments,
    ]  # fmt: skip
    return table(("attack", "tool", "tried", "handled", "ran for"), rows)


def trainings_table() -> str:
    """Return how each attacked training ended, and the ends of the script of docs/train.md."""
    rows = [
        (row["attack"], str(row["status"]), f"{row['seconds']:g} s", row["outcome"].replace("|", "/"),
         "no" if row["problem"] else "yes")
        for row in RESULTS["trainings"]["runs"]
    ]  # fmt: skip
    return table(("attack", "exit status", "ended after", "last error, or end", "handled"), rows)


def exits_text() -> str:
    """Return the ends of the script of docs/train.md in a sentence."""
    found = RESULTS["exits"]
    ends = ", ".join(f"{number} ended with {end}" for end, number in sorted(found["ends"].items()))
    return (
        f"The script of docs/train.md ran {found['times']} times, two at a time, on a machine with a load of "
        f"{found['load']}: {ends}."
    )


def pages() -> dict[Path, str]:
    """Return the page with its tables of limits and of attacks."""
    page = EVIDENCE / "hardening.md"
    return {
        page: fill(
            page,
            {"limits": limits_table(), "tried": tried_table(), "trainings": trainings_table(), "exits": exits_text()},
        )
    }


if __name__ == "__main__":
    sys.exit(main("validation/pages/make_hardening.py", pages()))
