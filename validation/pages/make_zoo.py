"""Write ``results/zoo.md`` and ``results/zoo-computation.md``: bugs from the field, and the rules that kill them.

``python validation/pages/make_zoo.py`` writes, ``--check`` exits 1 if a page is stale.
The tables come from ``tests/zoo``, whose tests check every line.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from pages import EVIDENCE, ROOT, main, table

COMMUNICATION = "ABCDL"
"""The families of bugs on the first page, by the first letter of their ids; all others are on the second page."""

WRITTEN_BY = "<!-- Written by validation/pages/make_zoo.py from tests/zoo/. Do not edit. -->\n"

INTRODUCTION = """\
# The bug zoo

The zoo contains bugs found in the field, in frameworks that train with pipeline parallelism. Each bug is a small
correct program or plan, and the one change (the *mutation*) that reintroduces the bug. The tests check that no rule
reports an error on the correct form, and that exactly the listed rules kill the mutant, with all rules on. Where the
table has *seen*, the tests also run the mutant on real processes and observe the symptom.

This page has the bugs in layouts, order, messages and mapping, and of models that are not a chain. [The second
page](zoo-computation.md) has those in gradients, buffers and state.
"""

COMPUTATION = """\
# The bug zoo: gradients, buffers, state

These are the other bugs of [the zoo](zoo.md), which explains the tables.
"""

RUN_ONLY = """\
The graphs of these bugs are correct: the fault is inside one operation. The comparison of a run with the unpartitioned
reference finds them.
"""

ACCEPTED = """\
These correct programs resemble a bug. No rule reports an error on them, nor on any plan of pipeproof's own generators
(random topologies, schedules, transports).
"""

RULES = """\
Every error rule is listed with the mutants that only this rule kills, with all other rules on. Without the rule these
mutants would pass. Mutants named by a code are not bugs from the field: they were made for their rule
(`tests/zoo/rule_mutants.py`).
"""


def pages() -> dict[Path, str]:
    """Both pages by their paths."""
    sys.path.insert(0, str(ROOT))
    zoo: Any = importlib.import_module("tests.zoo.table")
    accept: Any = importlib.import_module("tests.zoo.accept")
    families = dict.fromkeys(bug["family"] for bug in zoo.BUGS.values())
    cases = {family: [case for case in zoo.CASES if zoo.BUGS[case.row]["family"] == family] for family in families}
    communication: list[str] = []
    computation: list[str] = []
    for family, mutants in cases.items():
        if mutants:
            page = communication if mutants[0].row[0] in COMMUNICATION else computation
            page += [f"## {family[0].upper()}{family[1:]}\n", _kill_table(mutants, zoo.BUGS)]
    run_only = [(bug, zoo.BUGS[bug]["where"], zoo.BUGS[bug]["symptom"]) for bug in zoo.ONLY_A_RUN]
    rules = [(_link(code), ", ".join(case.id for case in zoo.only_killer(code))) for code in zoo.ERROR_RULES]
    first = [WRITTEN_BY + INTRODUCTION, *communication]
    first += ["## Accepted\n", ACCEPTED, "".join(f"- {name}\n" for name in accept.ACCEPTED)]
    first += ["## Rules\n", RULES, table(("rule", "kills alone"), rules)]
    second = [WRITTEN_BY + COMPUTATION, *computation]
    second += ["## Found by a run only\n", RUN_ONLY, table(("bug", "where", "symptom"), run_only)]
    return {EVIDENCE / "zoo.md": "\n".join(first), EVIDENCE / "zoo-computation.md": "\n".join(second)}


def _kill_table(cases: list[Any], bugs: dict[str, dict[str, str]]) -> str:
    rows = []
    for case in cases:
        bug = bugs[case.row]
        ran = f" *Seen:* {case.ran}." if case.ran else ""
        rows.append((case.id, bug["where"], bug["symptom"], case.mutation + "." + ran, _links(case.kills)))
    return table(("bug", "where", "symptom", "mutation", "killed by"), rows)


def _links(codes: tuple[str, ...]) -> str:
    return " ".join(map(_link, codes))


def _link(code: str) -> str:
    return f"[{code}](../../docs/codes.md#{code.lower()})"


if __name__ == "__main__":
    sys.exit(main("validation/pages/make_zoo.py", pages()))
