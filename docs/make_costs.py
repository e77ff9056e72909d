"""Writes the generated parts of ``docs/costs.md``: the data sheets, and a plan like that of Llama 3 405B.

``python docs/make_costs.py`` writes, ``--check`` exits 1 if a part is stale.
"""  # noqa: INP001 - a directory of scripts, not a package

from __future__ import annotations

import io
import sys
from dataclasses import fields
from typing import Any

from pages import DOCS, fill, main, table
from rich.console import Console

from pipeproof.comm.analytic.devices import DEVICES, Device
from pipeproof.comm.analytic.resolve import AnalyticCosts
from pipeproof.comm.analytic.show import render_costs
from pipeproof.comm.lower import lower
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load import plan_from_dict
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.work import Phase

PUBLISHED = {32: ("8,192", "43 %"), 16: ("16,384", "41 %")}
"""Sequences of a data-parallel rank and step: GPUs and share of peak, arXiv:2407.21783, table 4."""


def llama(num_micro_batches: int) -> PlanSpec:
    """Sizes and mesh of Llama 3 405B at 8,192 tokens; one of its data-parallel ranks."""
    blocks = [[f"layer.{i}"] for i in range(126)]
    plan: dict[str, Any] = {
        "pipeproof": 1,
        "model": {
            "kind": "gpt", "num_layers": 126, "hidden_size": 16384, "num_heads": 128, "num_kv_heads": 8,
            "ffn_size": 53248, "vocab_size": 128256, "seq_length": 8192,
        },
        "topology": {"pp": 16, "tp": 8, "sequence_parallel": True},
        "schedule": {
            "kind": "interleaved", "num_chunks": 8, "num_micro_batches": num_micro_batches, "micro_batch_size": 1,
        },
        "stages": [["embed"], *blocks, ["norm", "head"]],
        "cost": {"analytic": {"device": "h100", "dtype": "bfloat16"}},
    }  # fmt: skip
    return plan_from_dict(plan).spec


def devices_part() -> str:
    """A row for each data sheet."""
    header = (
        "device", "float8", "bfloat16", "float32", "memory", "links", "one device", "network", "ranks per node",
        "receives slow by", "source",
    )  # fmt: skip
    names = sorted((field.name for field in fields(Device)), key=lambda name: name == "source")
    rows = [
        (f"`{name}`", *("-" if getattr(device, key) is None else str(getattr(device, key)) for key in names))
        for name, device in DEVICES.items()
    ]
    return table(header, rows)


def stages_part() -> str:
    """What ``pipeproof show --costs`` prints of the plan."""
    plan = llama(16)
    assert plan.cost.analytic is not None
    text = io.StringIO()
    render_costs(AnalyticCosts(plan, plan.cost.analytic), Console(file=text, width=120, color_system=None))
    return f"```text\n{text.getvalue().rstrip()}\n```"


def published_part() -> str:
    """Predicted and published share of peak."""
    header = ("sequences", "GPUs", "step without dp, s", "idle", "predicted share of peak", "published")
    rows = []
    for num_micro_batches, (gpus, published) in PUBLISHED.items():
        plan = llama(num_micro_batches)
        assert plan.cost.analytic is not None
        costs = AnalyticCosts(plan, plan.cost.analytic)
        simulation = simulate(lower(plan))
        makespan, pp = simulation.makespan, plan.topology.pp
        busy = sum(rank.busy_us for rank in simulation.figures) / len(simulation.figures)
        forward = sum(stage[Phase.FORWARD].flops for stage in costs.stages)
        share = 3 * num_micro_batches * float(forward / (pp * makespan)) / (costs.device.bfloat16 * 10**6)
        idle = 1 - float(busy / makespan)
        step = f"{float(makespan) / 10**6:.2f}"
        rows.append((str(num_micro_batches), gpus, step, f"{100 * idle:.0f} %", f"{100 * share:.0f} %", published))
    return table(header, rows)


if __name__ == "__main__":
    page = DOCS / "costs.md"
    parts = {"devices": devices_part(), "stages": stages_part(), "published": published_part()}
    sys.exit(main("docs/make_costs.py", {page: fill(page, parts)}))
