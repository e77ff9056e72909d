"""Doors: plans made from what users already have.

``from_strategy`` takes a Fleet strategy object; ``import_files`` the files of
one of ``KINDS``; ``check_imported`` judges what either gives.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeproof.interop.imported import Flags, Imported
    from pipeproof.interop.judge import check_imported, load_imported
    from pipeproof.interop.kinds import KINDS, import_files
    from pipeproof.interop.paddle.fleet import from_strategy

__all__ = ["KINDS", "Flags", "Imported", "check_imported", "from_strategy", "import_files", "load_imported"]

_HOMES = {
    "KINDS": "kinds",
    "Flags": "imported",
    "Imported": "imported",
    "check_imported": "judge",
    "from_strategy": "paddle.fleet",
    "import_files": "kinds",
    "load_imported": "judge",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pipeproof.interop' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pipeproof.interop.{_HOMES[name]}"), name)
