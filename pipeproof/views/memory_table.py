"""Memory in a terminal: the peak of each rank with its parts, and the memory of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.text import Text

from pipeproof.comm.op_graph import LoweredPlan
from pipeproof.diagnostics.problems import grouped, ranges_text, runs
from pipeproof.diagnostics.units import size_text, time_text, unit_name, unit_of
from pipeproof.sim.memory_curve import GIB, PARTS, STATES, MemoryCurve
from pipeproof.sim.simulate import Simulation
from pipeproof.sim.step_memory import stage_holdings, state_of_stage
from pipeproof.stages.describe.stage_memory import (
    StoredActivation,
    is_flash,
    memory_dtype,
    optimizer_bytes,
)
from pipeproof.views.tables import print_table


def render_memory(simulation: Simulation, lowered: LoweredPlan, console: Console) -> None:
    """Print the table of peaks, equal ranks grouped, and the comparison with the budget."""
    curves = simulation.memory
    power = unit_of(max(curve.peak for curve in curves))
    parts = [part for part in PARTS if part not in STATES and any(curve.make_up[part] for curve in curves)]
    console.print()
    head = f"memory at each rank's peak, in {unit_name(power)}; states are weights with their gradients and optimizer's"
    console.print(Text(head), soft_wrap=True)
    console.print(Text(_assumptions(lowered)), soft_wrap=True)
    rows = []
    for ranks in _alike(curves):
        curve = curves[ranks[0]]
        states = sum(curve.make_up[part] for part in STATES)
        peak, *sizes = (
            size_text(size, power, unit=False)
            for size in (curve.peak, states, *(curve.make_up[part] for part in parts))
        )
        rows.append((ranges_text(ranks), peak, time_text(curve.peak_at_us), *sizes))
    print_table(("rank", ">peak", ">at", ">states", *(f">{part}" for part in parts)), rows, console)
    budget = lowered.spec.memory.budget_gib
    if budget is not None:
        over = sum(curve.peak > budget * GIB for curve in curves)
        verdict = "no rank needs more" if not over else f"{over} of {len(curves)} ranks need more"
        console.print(Text(f"memory.budget_gib is {budget:g}: {verdict}"), soft_wrap=True)


def render_stage_memory(lowered: LoweredPlan, console: Console) -> None:
    """Print the constant memory of each stage, and the activations of one micro-batch, operation by operation."""
    stages = range(lowered.spec.num_stages)
    held = [stage_holdings(lowered, stage) for stage in stages]
    states = [state_of_stage(lowered, stage, min(holders, default=0)) for stage, holders in enumerate(lowered.holders)]
    kinds = runs([(states[stage], held[stage]) for stage in stages])
    splits = lowered.spec.schedule.num_sequence_splits
    unit = "micro-batch" if splits == 1 else f"one of {splits} pieces of a micro-batch"
    console.print(Text(f"one rank's memory by stage; activations of one {unit}; {_assumptions(lowered)}"))
    cells = []
    for first, last in kinds:
        state = states[first]
        rows = [
            ("parameters", "always", size_text(state.parameters)),
            *([("whole parameters", "gather to RESHARD", size_text(once))] if (once := state.whole_parameters) else ()),
            ("gradients", "always", size_text(state.gradients)),
            *(
                [("whole gradients", "B or W to its sums", size_text(whole))]
                if (whole := state.whole_gradients)
                else ()
            ),
            ("optimizer", "always", size_text(state.optimizer)),
            *((one.name, one.lifetime.value, size_text(int(one.num_bytes))) for one in held[first]),
            ("all activations", "from F on", size_text(_from_forward(held[first]))),
        ]
        names = (ranges_text(range(first, last + 1)), *("" for _ in rows[1:]))
        cells += [(name, *row) for name, row in zip(names, rows, strict=True)]
    print_table(("stage", "held", "how long", ">size"), cells, console)


def _from_forward(held: Iterable[StoredActivation]) -> int:
    return int(sum(one.num_bytes for one in held if one.lifetime.is_from_forward))


def _assumptions(lowered: LoweredPlan) -> str:
    spec = lowered.spec
    attention = "flash" if is_flash(spec) else "unfused"
    memory = spec.memory
    again = "" if memory.recompute == "none" else f", {memory.recompute} recompute"
    if memory.recompute == "selective" and memory.recompute_modules != ("core_attn",):
        again += f" of {', '.join(memory.recompute_modules)}"
    if spec.memory.offload_blocks:
        again += f", {spec.memory.offload_blocks} blocks of each stage offloaded"
    if spec.memory.product_inputs != "dtype":
        again += f", inputs of products in {spec.memory.product_inputs}"
    shared = " shared by dp ranks"
    gradients = spec.gradient_dtype + (shared if memory.shard_gradients == "dp" else "")
    optimizer = f"{optimizer_bytes(spec):g} optimizer bytes a parameter"
    optimizer += shared if memory.shard_optimizer == "dp" else ""
    return f"{memory_dtype(spec)}, gradients in {gradients}, {optimizer}, {attention} attention{again}"


def _alike(curves: Sequence[MemoryCurve]) -> list[list[int]]:
    """Ranks with equal peaks, times of peaks and parts, in order."""
    groups = grouped(((curve.peak_at_us, *curve.make_up.values()), rank) for rank, curve in enumerate(curves))
    return list(groups.values())


def make_up_text(curve: MemoryCurve) -> str:
    """The parts of a peak, the largest first: ``activations 20.1 GiB, parameters 11.0 GiB``."""
    parts = sorted(curve.make_up.items(), key=lambda item: -item[1])
    return ", ".join(f"{part} {size_text(num_bytes)}" for part, num_bytes in parts if num_bytes)
