"""Executes the notebooks of ``docs/notebooks`` in this process, without Jupyter, and stores their outputs.

``python validation/pages/make_notebooks.py [--check]``. As in Jupyter, a cell shows its printed output and the value of
its last expression; the working directory is the notebook's.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

from pages import DOCS, ROOT, main

sys.path.insert(0, str(ROOT))
NOTEBOOKS = DOCS / "notebooks"


def executed(path: Path) -> str:
    """Return the notebook's text with the outputs of its cells.

    Raises:
        Exception: of a cell, with the name of the notebook and the number of the cell as a note.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    number = 0
    with contextlib.chdir(path.parent):
        for cell in notebook["cells"]:
            if cell["cell_type"] != "code":
                continue
            number += 1
            try:
                cell["outputs"] = outputs_of("".join(cell["source"]), namespace, number)
            except Exception as error:
                error.add_note(f"{path.name}, code cell {number}")
                raise
            cell["execution_count"] = number
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def outputs_of(source: str, namespace: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Execute a cell; return its outputs in the notebook format: the printed text, then the last expression."""
    module = ast.parse(source)
    last = module.body.pop() if module.body and isinstance(module.body[-1], ast.Expr) else None
    outputs: list[dict[str, Any]] = []
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(module, f"<cell {number}>", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), namespace)
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": _lines(printed.getvalue())})
    if value is not None:
        data = {"text/html": _lines(value._repr_html_())} if hasattr(value, "_repr_html_") else {}
        data["text/plain"] = _lines(repr(value))
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    found = {path: executed(path) for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    sys.exit(main("validation/pages/make_notebooks.py", found))
