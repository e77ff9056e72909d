"""Compares the choices of a table of published trainings with ``pipeproof tune``, and writes the results.

``python benchmarks/tune_published.py [TABLE.csv] [-o TUNE.json]`` reads a table of Megatron-Bridge's performance
summary, by default the one that comes with pipeproof. For each training with a plan it searches the layouts of
Megatron-LM on the same devices with the same batch and types. The memory limit is the device's memory, or the
prediction for the published layout if that is more. No layout has pairs that alternate, which the table does not name.
``--match`` compares some trainings only. Results are added to the file as they come, with the commit that computed
them; the same command resumes. ``validation/pages/make_tune.py`` makes the tables of
validation/results/tune-published.md from them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeproof.analysis.tune.evaluate_layout import parts_of_step
from pipeproof.analysis.tune.frameworks import FRAMEWORKS
from pipeproof.analysis.tune.layout_plans import base_data, plan_data
from pipeproof.analysis.tune.layouts import Layout
from pipeproof.analysis.tune.search_layouts import tune
from pipeproof.comm.lower import lower
from pipeproof.cost.devices import DEVICES
from pipeproof.sim.memory_curve import GIB
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import LoadedPlan, plan_from_dict
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.model_family import stage_layers
from pipeproof.stages.describe.stage_memory import state_of_weights
from validation.board.accuracy_board import MEASUREMENTS, read_measurements

TOP = 5
_RESULTS = Path(__file__).parents[1] / "validation" / "results" / "tune.json"


def published_layout(spec: PlanSpec) -> Layout:
    """The layout of a published training."""
    topology, schedule = spec.topology, spec.schedule
    return Layout(
        topology.pp, schedule.num_chunks, topology.tp, topology.cp, topology.ep, topology.dp,
        schedule.micro_batch_size, schedule.num_micro_batches, schedule.kind, schedule.variant, "balanced", "none",
        spec.memory.shard_optimizer if topology.dp > 1 else "none",
    )  # fmt: skip


def compare(spec: PlanSpec, workers: int | None) -> dict[str, Any]:
    """The published layout and the rows of a search on the same devices."""
    framework = FRAMEWORKS["megatron"]
    assert spec.cost.analytic is not None
    device, layout = spec.cost.analytic.device, published_layout(spec)
    base = base_data(spec, framework, device)
    published = _simulated(plan_from_dict(plan_data(base, framework, layout, stage_layers(spec))).spec)
    peak_gib = published["peak_gib"]
    limit = max(float(DEVICES[device].memory_gib), peak_gib)
    batch = layout.dp * layout.ep * layout.mbs * layout.num_micro_batches
    start = time.perf_counter()
    result = tune(
        LoadedPlan(spec), gpus=spec.topology.num_ranks, device=device, global_batch=batch, memory_gib=limit, top=TOP,
        fix={"overlap": ["none"]}, workers=workers,
    )  # fmt: skip
    return {
        "device": device,
        "num_gpus": spec.topology.num_ranks,
        "global_batch": batch,
        "published": {**asdict(layout), **published},
        "memory_gib": limit,
        "rows": [
            {**asdict(row.layout), "step_s": row.step_s, "peak_gib": row.peak_gib, "parts_s": dict(row.parts_s)}
            for row in sorted(result.rows, key=lambda row: row.step)
        ],
        "counts": asdict(result.counts),
        "seconds": time.perf_counter() - start,
        "commit": _commit(),
    }


def _simulated(spec: PlanSpec) -> dict[str, Any]:
    """Step, its parts, and the memory of the rank that holds most, with its parts in GiB.

    ``sharded_gib`` is the part of the optimizer's state that is not sharded by the model, and that Megatron-LM's
    distributed optimizer shards: over cp, and for weights outside of experts over ep as well.
    """
    lowered = lower(spec)
    simulation = simulate(lowered)
    rank, curve = max(enumerate(simulation.memory), key=lambda item: item[1].peak)
    held = {name for names in stage_layers(spec)[rank :: spec.topology.pp] for name in names}
    weights = [weight for layer in describe_gpt(spec) if layer.name in held for weight in layer.parameters]
    cp, ep = spec.topology.cp, spec.topology.ep
    sharded = sum(
        state_of_weights(spec, [weight]).optimizer * (1 - 1 / (cp * (1 if "ep" in weight.sharded_over else ep)))
        for weight in weights
    )
    return {
        "step_s": float(simulation.makespan) / 10**6,
        "peak_gib": curve.peak / GIB,
        "parts_s": {name: float(us) / 10**6 for name, us in parts_of_step(spec, lowered, simulation).items()},
        "parts_gib": {str(part): num_bytes / GIB for part, num_bytes in curve.make_up.items()},
        "sharded_gib": sharded / GIB,
    }


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Compare the trainings that the results file lacks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("table", nargs="?", type=Path, default=MEASUREMENTS / "megatron_bridge_perf.csv")
    parser.add_argument("-o", "--output", type=Path, default=_RESULTS)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--match", default="", help="only trainings whose title matches this regular expression")
    options = parser.parse_args()
    kept: dict[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
    measured: dict[str, tuple[Mapping[str, Any], list[float], str]] = {}
    for row in read_measurements([options.table])[0][0].rows:
        if row.plan is not None:
            key = json.dumps(row.plan, sort_keys=True)
            measured.setdefault(key, (row.plan, [], row.name))[1].append(row.measured)
    trainings = kept.setdefault("trainings", {})
    loaded = [(plan_from_dict(plan).spec, values, name) for plan, values, name in measured.values()]
    for spec, values, full_name in sorted(loaded, key=lambda item: item[0].topology.num_ranks):
        name = ", ".join(full_name.split(", ")[:3])
        layout = published_layout(spec)
        title = f"{name}: {layout.pp}.{layout.vpp}.{layout.tp}.{layout.cp}.{layout.ep}.{layout.mbs}"
        title += f" x {layout.num_micro_batches} of {spec.model.seq_length}"
        if not re.search(options.match, title):
            continue
        if title not in trainings:
            trainings[title] = {"name": name, "measured": values, **compare(spec, options.workers)}
            options.output.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        found = trainings[title]
        print(
            f"{title}: published {found['published']['step_s']:.3f} s, found {found['rows'][0]['step_s']:.3f} s, "
            f"{found['seconds']:.0f} s", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
