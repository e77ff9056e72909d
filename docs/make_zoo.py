"""Writes ``docs/zoo.md``: which rule kills which bug that was found in the field.

``python docs/make_zoo.py`` writes, ``--check`` exits 1 if the page is stale.
The table is that of ``tests/zoo``, whose tests hold every line of it.
"""  # noqa: INP001 - a directory of scripts, not a package

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from pages import DOCS, ROOT, main, table

INTRODUCTION = """\
<!-- Written by docs/make_zoo.py from tests/zoo/. Do not edit. -->
# The bug zoo

Bugs that were found in the field, in frameworks that train with pipeline parallelism, each as a small right program
or plan and the one change that brings the bug back. The tests see that no rule calls the right form an error, and
that the mutant is killed by exactly the rules that stand here, with all rules on. Where it says *seen*, the tests also
run the mutant on real processes and find the symptom.
"""

RUN_ONLY = """\
These are right as graphs and wrong inside one operation. What finds them is the comparison of a run with the uncut
reference.
"""

ACCEPTED = """\
Right programs that stand close to a bug: none has an error, and neither has any plan that pipeproof's own generators
make (random topologies, schedules, transports).
"""

RULES = """\
Every error rule with the mutants that it alone kills, all other rules being on: without the rule they would pass.
Mutants that are named by a code are no bugs of the field but made for their rule (`tests/zoo/rule_mutants.py`).
"""


def page() -> str:
    """The whole page."""
    sys.path.insert(0, str(ROOT))
    zoo: Any = importlib.import_module("tests.zoo.table")
    accept: Any = importlib.import_module("tests.zoo.accept")
    parts = [INTRODUCTION]
    for family in dict.fromkeys(bug["family"] for bug in zoo.BUGS.values()):
        cases = [case for case in zoo.CASES if zoo.BUGS[case.row]["family"] == family]
        if cases:
            parts += [f"## {family[0].upper()}{family[1:]}\n", _kill_table(cases, zoo.BUGS)]
    run_only = [(bug, zoo.BUGS[bug]["where"], zoo.BUGS[bug]["symptom"]) for bug in zoo.ONLY_A_RUN]
    parts += ["## Only a run can tell\n", RUN_ONLY, table(("bug", "where", "symptom"), run_only)]
    parts += ["## Accepted\n", ACCEPTED, "".join(f"- {name}\n" for name in accept.ACCEPTED)]
    rules = [(_link(code), ", ".join(case.id for case in zoo.only_killer(code))) for code in zoo.ERROR_RULES]
    parts += ["## Rules\n", RULES, table(("rule", "kills alone"), rules)]
    return "\n".join(parts)


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
    return f"[{code}](rules/{code}.md)"


if __name__ == "__main__":
    pages: dict[Path, str] = {DOCS / "zoo.md": page()}
    sys.exit(main("docs/make_zoo.py", pages))
