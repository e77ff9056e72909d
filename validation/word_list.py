"""Find private vocabulary and grammar that have to be read twice, in code, messages, tests and documentation.

``python validation/word_list.py [PATH ...]`` prints ``file:line: word -> replacement`` for each hit and exits 1 if
there is any. Without paths it searches the files that ``searched_files`` lists.
``tests/docs/test_word_list.py`` keeps it empty.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

WORDS: tuple[tuple[str, str], ...] = (
    (r"mend(?:s|ed|ing)?", "fix, suggested fix"),
    (r"(?:go|goes|going|gone|went) on", "resume, continue"),
    (r"(?:held|hold|holds|holding) against", "compare with, check against"),
    (r"stands?(?! for\b)|stood", "is, is stored, is listed"),
    (r"beside", "next to, in addition to"),
    (r"told|(?<!\.)(?<!def )tells?", "report, print, state"),
    (r"says?|said", "report, print, state"),
    (r"(?<!_)uncut(?!_)", "unpartitioned"),
    (r"own[ _]layers?", "custom layers"),
    (r"judg(?:e|es|ed|ing|ement)(?!_by)", "check, verdict"),
    (r"befell|befalls?", "failure"),
    (r"hand(?:ed)?[ _]?over", "p2p data flow"),
    (r"dealt", "assigned"),
    (r"turned round", "inverse"),
    (r"carr(?:y|ies|ied|ying) out", "execute, run"),
    (r"surely", "definitely"),
    (r"lanes?", "MTP stream, queue, track"),
    (r"seal(?:s|ed)?", "checksum"),
    (r"(?<!\")felt", "sensitivity"),
    (r"whoever|whatever", "a plain sentence"),
)
"""Word pattern, whole words, any case; and its replacement (see "Words" in CONTRIBUTING.md).

Keys of JSON files keep their names: ``judged_by``, ``uncut_loss``, ``felt``.
"""

_GAP = r"(?:[ \t]|[\"']?\s*\n\s*(?:#\s*|f?[\"'])?)+"
"""White space between two words of a sentence, which may be divided between comments or parts of a string."""

GRAMMAR: tuple[tuple[str, str], ...] = (
    (r"(?:is|are|was|were|be) no (?!longer\b|more\b|less\b|matter\b)\w+", "is not a .."),
    ("of which", "the noun again"),
    (r"alike(?!\":)", "identical, equal"),
    ("the same of", "the noun again"),
    ("likewise", "also"),
    ("so that", "a second sentence"),
    ("what (?:it|they|that|this|these|those|one)", "a plain noun"),
    ("(?:that|those) of", "the noun again"),
)
"""Pattern of a sentence, in which a blank is any white space, and its replacement. "There is no .." is plain.

The key ``"alike"`` of JSON files keeps its name.
"""

ALLOWED = {"MTP stream, queue, track": ("pipeproof/views/", "docs/timeline", "docs/pictures", "CHANGELOG.md")}
"""Files, by the beginning of their path, in which a word is the field's own: a lane is a row of a timeline."""

FIRST_WORDS = ("What", "Whether", "As", "How", "Who", "Whose", "Which", "Where", "That")
"""Words that no docstring begins with: a docstring is a noun phrase or an imperative."""

_PATTERN = re.compile(
    r"(?<![A-Za-z])(?:" + "|".join(f"(?P<w{i}>{word})" for i, (word, _) in enumerate(WORDS)) + r")(?![A-Za-z])",
    re.IGNORECASE,
)
_SENTENCE = re.compile(
    r"(?<![\w`-])(?:"
    + "|".join(f"(?P<g{i}>{words.replace(' ', _GAP)})" for i, (words, _) in enumerate(GRAMMAR))
    + r")\b",
    re.IGNORECASE,
)
_THERE = re.compile(r"there\W*$", re.IGNORECASE)
_SOURCES = ("pipeproof/**/*.py", "validation/**/*.py", "benchmarks/**/*.py", "examples/**/*.py")
_TESTS = "tests/**/*.py"
_PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "examples/**/*.md", "examples/**/*.yaml")
_NOT_SEARCHED = {"validation/word_list.py", "tests/docs/test_word_list.py"}


@dataclass(frozen=True, slots=True)
class Hit:
    """One word at one line of a file, and its replacement."""

    path: Path
    line: int
    word: str
    replacement: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r} -> {self.replacement}"


def searched_files(root: Path = ROOT) -> Iterator[Path]:
    """All files that the check covers, relative to ``root``, in a fixed order."""
    for pattern in (*_SOURCES, _TESTS, *_PAGES):
        for path in sorted(root.glob(pattern)):
            relative = path.relative_to(root)
            if str(relative) not in _NOT_SEARCHED:
                yield relative


def find(text: str, path: Path) -> Iterator[Hit]:
    """The hits of one file; in Python files also docstrings that begin with one of ``FIRST_WORDS``.

    Tests are searched for ``GRAMMAR`` alone.
    """
    for match in _SENTENCE.finditer(text):
        if _THERE.search(text, max(0, match.start() - len("there ,")), match.start()) is None:
            assert match.lastgroup is not None
            line, (_, replacement) = text.count("\n", 0, match.start()) + 1, GRAMMAR[int(match.lastgroup[1:])]
            yield Hit(path, line, " ".join(match[0].split()), replacement)
    if path.parts[:1] == ("tests",):
        return
    for number, line in enumerate(text.splitlines(), start=1):
        for match in _PATTERN.finditer(line):
            assert match.lastgroup is not None
            _, replacement = WORDS[int(match.lastgroup[1:])]
            if not str(path).startswith(ALLOWED.get(replacement, ())):
                yield Hit(path, number, match[0], replacement)
    if path.suffix == ".py":
        yield from _first_words(text, path)


def _first_words(text: str, path: Path) -> Iterator[Hit]:
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                continue
            value = statement.value.value
            first = value.split(maxsplit=1)[0].rstrip(",:") if isinstance(value, str) and value.strip() else ""
            if first in FIRST_WORDS:
                yield Hit(path, statement.lineno, first, "a noun phrase or an imperative at the start of a docstring")


def main(arguments: list[str]) -> int:
    """Print all hits of the given files, or of all; exit status 1 if there is one."""
    paths = [Path(argument) for argument in arguments] or list(searched_files())
    hits = [hit for path in paths for hit in find((ROOT / path).read_text(encoding="utf-8"), path)]
    print("\n".join(map(str, hits)) if hits else "no word of the list")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
