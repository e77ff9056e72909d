"""Import of plans from the configurations of other tools.

``from_strategy`` takes a Fleet strategy object, ``from_arguments`` the
arguments that another tool has in its process, ``import_files`` the files of
one of ``KINDS``; ``check_imported`` checks the plan of each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeproof.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from pipeproof.interop.importers.check_imported import check_imported, load_imported
    from pipeproof.interop.importers.from_arguments import from_arguments
    from pipeproof.interop.importers.import_kinds import KINDS, import_files
    from pipeproof.interop.importers.imported import Flags, Imported
    from pipeproof.interop.importers.paddle.fleet_strategy import from_strategy

__all__ = [
    "KINDS",
    "Flags",
    "Imported",
    "check_imported",
    "from_arguments",
    "from_strategy",
    "import_files",
    "load_imported",
]

_MODULES = {
    "KINDS": "import_kinds",
    "Flags": "imported",
    "Imported": "imported",
    "check_imported": "check_imported",
    "from_arguments": "from_arguments",
    "from_strategy": "paddle.fleet_strategy",
    "import_files": "import_kinds",
    "load_imported": "check_imported",
}

__getattr__ = lazy_exports(__name__, _MODULES, "pipeproof.interop.importers")
