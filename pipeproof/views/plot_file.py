"""The writer of pictures that matplotlib draws (extra ``plot``): png, svg or pdf, independent of user settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pipeproof.atomic_write import output_file

SUFFIXES = (".png", ".svg", ".pdf")

_UNDATED: Mapping[str, Mapping[str, None]] = MappingProxyType(
    {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
)
"""Metadata that matplotlib must not write into a file: the same bytes for the same content."""


@contextmanager
def default_style() -> Iterator[None]:
    """Draw and write within it with matplotlib's defaults; its names in an SVG would be hashes with a random salt."""
    from matplotlib.style import context

    with context(["default", {"svg.hashsalt": "pipeproof", "pdf.fonttype": 42}]):
        yield


def new_figure(**options: Any) -> Any:
    """A figure that no window shows; ``options`` are those of matplotlib's ``Figure``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(**options)
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: Any, path: Path, title: str) -> None:
    """Write the picture in the form that the suffix names, overwriting what is there.

    Raises:
        ValueError: the suffix is none of png, svg and pdf.
        OSError: the file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{str(path)!r}: pictures end with {', '.join(SUFFIXES)}")
    with output_file(path) as new:
        figure.savefig(new, format=suffix.removeprefix("."), dpi=200, metadata={"Title": title, **_UNDATED[suffix]})
