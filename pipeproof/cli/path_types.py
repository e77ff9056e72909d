"""Types of arguments and options that are paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

_PLAN_SUFFIXES = (".yaml", ".yml", ".json")
_INDEX = "index.json"
"""Ending of the index files of checkpoints, ours and Hugging Face's."""


class GivenPath(click.Path):
    """A path that is not empty: an empty one would be the current directory, and comes from an unset shell variable."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if value in ("", b""):
            self.fail("the path is empty", param, ctx)
        return super().convert(value, param, ctx)


PLACE = GivenPath(path_type=Path)
"""A file or a directory that may exist or not."""


def is_plan(path: Path) -> bool:
    """Return True if a path is read as a plan; the index of a checkpoint has such a suffix, too."""
    return path.suffix in _PLAN_SUFFIXES and not path.is_dir() and not path.name.endswith(_INDEX)
