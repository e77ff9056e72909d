"""Public names of a package that are imported at first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(package: str, homes: Mapping[str, str], root: str = "pipeproof") -> Callable[[str], Any]:
    """Return the ``__getattr__`` of ``package``.

    ``homes`` has for each public name its module below ``root``, and behind a colon the name there if it differs.
    """

    def imported(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, original = homes[name].partition(":")
        return getattr(import_module(f"{root}.{module}"), original or name)

    return imported
