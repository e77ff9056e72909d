"""The console of all commands: it wraps prose between words, and leaves lines of tables and drawings whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from pipeproof.diagnostics.text_output import given_columns, line_parts, printable_lines, prose_width


class WrappingConsole(Console):
    """A console whose ``print`` wraps text at ``prose_width``, without the option ``no_wrap``."""

    def __init__(self, **options: Any) -> None:
        # At COLUMNS=0, as terminals without a size set it, rich would print nothing.
        ignored = "COLUMNS" if given_columns() is None else None
        super().__init__(_environ={name: text for name, text in os.environ.items() if name != ignored}, **options)

    @property
    def prose_width(self) -> int | None:
        """Columns that prose is wrapped at, and that tables fit into; None where lines stay whole, as in a pipe."""
        return prose_width(self.file)

    def print(self, *objects: Any, no_wrap: bool | None = None, **options: Any) -> None:
        """Print text, wrapped between words and without control characters; rich prints other objects."""
        objects = tuple(map(_harmless, objects))
        if not no_wrap and objects and all(isinstance(one, str | Text) for one in objects):
            options["soft_wrap"] = True  # or rich would divide words at its own width
            width = self.prose_width
            if width is not None:
                markup, emoji = options.get("markup"), options.get("emoji", False)
                texts = [self.render_str(one, markup=markup, emoji=emoji) if isinstance(one, str) else one
                         for one in objects]  # fmt: skip
                objects = (Text("\n").join(_wrapped(Text(options.get("sep", " ")).join(texts), width)),)
        super().print(*objects, no_wrap=no_wrap, **options)


def _harmless(one: Any) -> Any:
    """Return text without the control characters that names in foreign files may have; other objects as they are."""
    if isinstance(one, str):
        return printable_lines(one)
    if isinstance(one, Text) and not one.plain.isprintable():
        one.plain = printable_lines(one.plain)  # of the same length: the positions of styles stay valid
    return one


def _wrapped(text: Text, width: int) -> Iterator[Text]:
    for line in text.split("\n", allow_blank=True):
        if line.cell_len <= width:
            yield line
            continue
        for start, end, indent in line_parts(line.plain, width):
            yield Text(" " * indent) + line[start:end]
