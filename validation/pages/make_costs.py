"""Writes the generated parts of ``docs/costs.md``: the data sheets, and the times of a whole plan.

``python validation/pages/make_costs.py`` writes, ``--check`` exits 1 if a part is stale.
"""

from __future__ import annotations

import io
import sys
from dataclasses import fields

from pages import DOCS, ROOT, fill, main, table
from rich.console import Console

from pipeproof.cost.analytic_times import AnalyticCosts
from pipeproof.cost.devices import DEVICES, Device
from pipeproof.specs.load_plan import load_plan
from pipeproof.views.plan_tables import render_costs


def devices_part() -> str:
    """Table with a row for each data sheet."""
    header = (
        "device", "float8", "bfloat16", "float32", "memory", "links", "one device", "network", "host", "ranks per node",
        "GiB", "receives slow by", "source",
    )  # fmt: skip
    names = sorted((field.name for field in fields(Device)), key=lambda name: name == "source")
    rows = [
        (f"`{name}`", *("-" if getattr(device, key) is None else str(getattr(device, key)) for key in names))
        for name, device in DEVICES.items()
    ]
    return table(header, rows)


def stages_part() -> str:
    """Output of ``pipeproof show --costs`` for the Llama 3 plan."""
    plan = load_plan(ROOT / "examples" / "published" / "llama3_405b.yaml").spec
    assert plan.cost.analytic is not None
    text = io.StringIO()
    render_costs(AnalyticCosts(plan, plan.cost.analytic), Console(file=text, width=120, color_system=None))
    return f"```text\n{text.getvalue().rstrip()}\n```"


if __name__ == "__main__":
    page = DOCS / "costs.md"
    parts = {"devices": devices_part(), "stages": stages_part()}
    sys.exit(main("validation/pages/make_costs.py", {page: fill(page, parts)}))
