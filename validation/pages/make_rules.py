"""Write ``docs/codes.md``, the list of all codes that pipeproof can report; the site gets a page for each code.

``python validation/pages/make_rules.py`` writes the list, ``--check`` exits 1 if it is stale. The pages have the texts
that ``pipeproof --explain CODE`` prints; ``site_hooks`` adds them when the site is built.
"""

from __future__ import annotations

import sys

from pages import DOCS, listed, main, table

from pipeproof.cli.code_registry import all_docs
from pipeproof.diagnostics.finding import ExampleKind, RuleDoc

FAMILIES = {
    "1": "The plan: file, sizes, placement, completeness",
    "2": "Layouts and transports",
    "3": "Matching of sends, receives and collectives",
    "4": "Deadlock",
    "5": "Buffer lifetime and races",
    "6": "Gradient coverage, reduction and scale",
    "7": "Memory",
    "8": "Performance",
    "9": "Runs",
}
"""The subject of the codes by their first digit."""

INTRODUCTION = """\
Every finding has one of these codes. The meaning of a code never changes. `pipeproof --explain CODE` prints its page in
the terminal. Only errors change the exit status; with `--strict`, warnings do too.
"""

FENCES = {
    ExampleKind.PLAN: "yaml",
    ExampleKind.PROGRAM: "text",
    ExampleKind.PYTHON: "python",
    ExampleKind.JOB: "text",
    ExampleKind.COMMAND: "console",
    ExampleKind.OUTCOME: "text",
}
"""The language of the fenced block of an example, by kind."""

ABOUT_EXAMPLES = {
    ExampleKind.PLAN: "The examples are parts of a plan file; the tests merge them into a small plan and check it.",
    ExampleKind.PROGRAM: "The examples are program texts, as `pipeproof check FILE` reads them; the tests check them.",
    ExampleKind.PYTHON: "The examples are Python code; the tests run it and check `subject`.",
    ExampleKind.JOB: "The examples are parts of a training file of PaddleFormers, a Fleet strategy as text, or a "
    "script; the tests import and check them.",
    ExampleKind.COMMAND: "The examples are commands.",
    ExampleKind.OUTCOME: "The examples are observed outcomes.",
}
"""A sentence about the examples, by kind."""

WRITTEN_BY = (
    "<!-- Written by validation/pages/make_rules.py from the code's documentation in pipeproof/. Do not edit. -->\n"
)


def code_list() -> str:
    """The table of all codes, by subject. Each row has an anchor."""
    docs = all_docs()
    parts = [WRITTEN_BY, "# Codes\n", INTRODUCTION]
    for digit in sorted({doc.code[2] for doc in docs}):
        rows = [(listed(doc.code), doc.severity, doc.title) for doc in docs if doc.code[2] == digit]
        parts += [f"## {digit}xx: {FAMILIES[digit]}\n", table(("code", "severity", "meaning"), rows)]
    return "\n".join(parts)


def code_pages() -> dict[str, str]:
    """The page of each code."""
    return {doc.code: _page(doc) for doc in all_docs()}


def _page(doc: RuleDoc) -> str:
    return "\n".join(
        [
            f"# {doc.code}: {doc.title}\n",
            f"Severity: {doc.severity}. [All codes](../codes.md)\n",
            f"{doc.explanation}\n",
            f"{ABOUT_EXAMPLES[doc.example_kind]}\n",
            f"Wrong:\n\n```{FENCES[doc.example_kind]}\n{doc.wrong}\n```\n",
            f"Right:\n\n```{FENCES[doc.example_kind]}\n{doc.right}\n```\n",
        ]
    )


if __name__ == "__main__":
    sys.exit(main("validation/pages/make_rules.py", {DOCS / "codes.md": code_list()}))
