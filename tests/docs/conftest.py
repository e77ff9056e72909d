"""Fixtures that tests of pages share."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def docs_module():
    """Imports a script of ``validation/pages`` by name, as it is imported when it runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "validation" / "pages"))
        yield importlib.import_module
