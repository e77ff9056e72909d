"""Writes the tables of ``docs/published.md``: the plans of published trainings beside their published figures.

``python docs/make_published.py`` writes, ``--check`` exits 1 if a table is stale.
"""  # noqa: INP001 - a directory of scripts, not a package

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from pages import DOCS, fill, main, table
from published_runs import PARTS, Training

from pipeproof.schedule.ops import OpKind
from pipeproof.sim.memory.curve import Part
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.memory import activations_of
from pipeproof.stages.describe.partition import stage_layers

GIB = 2**30
CAPACITY = 80 * 10**9 / GIB
"""GiB of an H100 or H800 of 80 GB."""
PEAK = 989.4
"""TFLOP/s in bfloat16, against which both papers give their shares."""


@dataclass(frozen=True)
class Row:
    """A row of table 4 of arXiv:2407.21783: what it changes, GPUs, published TFLOP/s of a GPU and share of peak."""

    change: dict[str, Any]
    gpus: str
    tflops: int
    share: str


LLAMA = (
    Row({}, "8,192", 430, "43 %"),
    Row({"topology": {"dp": 128}, "schedule": {"num_micro_batches": 16}}, "16,384", 400, "41 %"),
    Row(
        {"topology": {"cp": 16, "dp": 8}, "schedule": {"num_micro_batches": 16}, "model": {"seq_length": 131072}},
        "16,384, cp 16, 131,072 tokens", 380, "38 %",
    ),
)  # fmt: skip
DEEPSEEK = {"step": 19.926, "1F": 1.13, "1B": 1.99, "1W": 0.48, "1F1B": 13.95, "idle": 2.06, "optimizer": 0.29}
"""Seconds, arXiv:2505.09343, table 4, the multi-plane network."""
NAMES = {
    "1F": "a forward alone (1F)",
    "1B": "a backward alone, with W or without (1B)",
    "1W": "W alone (1W)",
    "1F1B": "a forward and a backward side by side (1F1B)",
    "optimizer": "sums of gradients, optimizer",
    "idle": "idle (bubble)",
}
RECOMPUTED = ("attn.q_down", "attn.q_up", "attn.kv_up", "mlp.router", "attn.qkv_out", "mlp.experts.down",
              "mlp.shared.down", "mlp.unpermute")  # fmt: skip
"""Not kept by arXiv:2412.19437, section 3.2.3 and 3.3.3: results of norms, of MLA's up-projections and of SwiGLU; what
came of each expert is gone where it is summed on the way back."""
SHARE_KEPT = {"mlp.experts.swiglu": 0.5, "mlp.shared.swiglu": 0.5, "attn.out": 0.75}
"""Of bfloat16: kept in eight bits, the input of attention's last product in twelve (section 3.3.3)."""


@cache
def base(name: str) -> Training:
    """The plan as it is."""
    return Training.of(name)


def llama_steps() -> str:
    """The rows of the paper's table, with the step that follows from them."""
    header = ("GPUs", "step, s", "published, 6 N D", "with attention", "ratio", "TFLOP/s", "published", "share of peak",
              "published", "no computation", "(p - 1) / (v m)")  # fmt: skip
    rows = []
    for row in LLAMA:
        one = Training.of("llama3_405b", row.change) if row.change else base("llama3_405b")
        schedule = one.spec.schedule
        bubble = (one.spec.topology.pp - 1) / (schedule.num_chunks * schedule.num_micro_batches)
        rate = one.spec.topology.num_ranks * row.tflops * 10**12
        plain, whole = 6 * one.num_weights * one.tokens / rate, one.flops / rate
        reached = one.tflops(one.step)
        rows.append((row.gpus, f"{one.step:.2f}", f"{plain:.2f}", f"{whole:.2f}", f"{one.step / whole:.2f}",
                     f"{reached:.0f}", str(row.tflops), percent(reached / PEAK), row.share, percent(one.idle),
                     percent(bubble)))  # fmt: skip
    return table(header, rows)


def llama_changes() -> str:
    """One assumption at a time."""
    plan = base("llama3_405b")
    given, hidden = plan.given(), plan.given(**plan.without_links())
    parameters, gradients = (
        max(curve.make_up[part] for curve in plan.simulation.memory) for part in (Part.PARAMETERS, Part.GRADIENTS)
    )
    gather = plan.collective_s(OpKind.ALL_GATHER, "dp", parameters // plan.spec.topology.dp)
    scatter = plan.collective_s(OpKind.REDUCE_SCATTER, "dp", gradients)
    changes = [
        *((f"products at {e:g} of peak", analytic("llama3_405b", matmul_efficiency=e).step) for e in (0.6, 0.8)),
        ("attention at 0.4 of peak", analytic("llama3_405b", attention_efficiency=0.4).step),
        ("links and network at 0.6 of their bandwidth", analytic("llama3_405b", link_efficiency=0.6).step),
        ("what is gathered is kept, not gathered again",
         Training.of("llama3_405b", {"memory": {"gathered": "kept"}}).step),
        ("sums of gradients as each chunk's are ready",
         Training.of("llama3_405b", {"schedule": {"reduce_gradients": "when_ready"}}).step),
        ("sums of gradients wholly hidden", given.step),
        *((f"so, and one pipeline rank of 16 {percent} % slower", given.given(**slowed(given, percent)).step)
          for percent in (5, 10)),
        ("so, and collectives over tp wholly hidden", hidden.step),
        ("FSDP with nothing hidden: weights gathered once, gradients scattered once", given.step + gather + scatter),
    ]  # fmt: skip
    return changes_table(plan.step, changes)


def deepseek_steps() -> str:
    """The parts of a step; each the mean of all ranks."""
    plan = base("deepseek_v3")
    ranks = range(plan.spec.topology.pp)
    by_rank = [plan.parts(rank) for rank in ranks]
    rows: list[tuple[str, ...]] = [beside("step, s", plan.step, DEEPSEEK["step"], 3)]
    for part in PARTS:
        mine = [parts[part] for parts in by_rank]
        rows.append((*beside(f"{NAMES[part]}, s", sum(mine) / len(mine), DEEPSEEK[part], 2),
                     f"{min(mine):.2f} to {max(mine):.2f}"))  # fmt: skip
    main = Training.of("deepseek_v3", {"model": {"mtp": None}})  # whose work alone the papers count
    tokens, reached = plan.tokens, main.tflops(plan.step)
    rows += [
        beside("TFLOP/s of a GPU, causal attention", reached, 385, 0),
        beside("the same of the published step, by the count used here", main.tflops(DEEPSEEK["step"]), 385, 0),
        (*beside("share of peak in bfloat16, %", 100 * reached / PEAK, 38.94, 2), ""),
        beside("tokens a day, 10^9", tokens / plan.step * 86400 / 10**9, 272.80, 1),
        beside("GPU hours for 10^12 tokens, 10^3",
               plan.step / tokens * 10**12 / 3600 * plan.spec.topology.num_ranks / 1000, 180, 0),
    ]  # fmt: skip
    header = ("mean of the ranks", "simulated", "published", "ratio", "from rank to rank")
    return table(header, [(*row, *[""] * (len(header) - len(row))) for row in rows])


def mean_parts(plan: Training) -> dict[str, float]:
    """Seconds of each part of a step, the mean of the ranks."""
    by_rank = [plan.parts(rank) for rank in range(plan.spec.topology.pp)]
    return {part: sum(parts[part] for parts in by_rank) / len(by_rank) for part in PARTS}


def deepseek_each() -> str:
    """The same for one of each, were the published run of the same order."""
    plan = base("deepseek_v3")
    counts = plan.counts()
    rows = list[tuple[str, ...]]()
    for name, count in counts.items():
        each = beside(NAMES[name], 1000 * mean_parts(plan)[name] / count, 1000 * DEEPSEEK[name] / count, 1)
        rows.append((each[0], f"{count:.1f}", *each[1:]))
    alone = ("1F", "1B", "1W")
    ratios = []
    for parts in (mean_parts(plan), DEEPSEEK):
        pair, both = parts["1F1B"] / counts["1F1B"], sum(parts[name] for name in alone) / counts["1F"]
        ratios.append(f"{pair / both:.2f}")
    rows.append(("a pair, by the two alone with their W", "", *ratios, ""))
    return table(("one of", "of these on a rank", "simulated, ms", "published, ms", "ratio"), rows)


def deepseek_changes() -> str:
    """One assumption at a time."""
    name, plan = "deepseek_v3", base("deepseek_v3")
    units = 112 / 132
    by_itself, wide = {"nodes_per_token": None}, {"dispatch_dtype": None}
    changes = [
        ("each visit of an expert crosses the network by itself", moe(by_itself).step),
        ("tokens go to experts in bfloat16", moe(wide).step),
        ("both", moe({**by_itself, **wide}).step),
        ("products in bfloat16", analytic(name, matmul_dtype=None).step),
        *((f"products at {e:g} of peak", analytic(name, matmul_efficiency=e).step) for e in (0.6, 0.8)),
        ("products at 0.25 of peak, which W alone suggests", analytic(name, matmul_efficiency=0.25).step),
        ("products and attention on 112 of 132 units of the chip",
         analytic(name, matmul_efficiency=round(0.7 * units, 3), attention_efficiency=round(0.5 * units, 3)).step),
        ("links and network at 0.6 of their bandwidth", analytic(name, link_efficiency=0.6).step),
        ("every block computed again", Training.of(name, {"memory": {"recompute": "full"}}).step),
        ("nothing side by side, sums of gradients hidden", plan.given(overlapped_us=None).step),
        ("sums of gradients wholly hidden", plan.given().step),
        ("three blocks on the stage of the module, not one", Training.of(name, {"model": {"empty_layers": None}}).step),
        ("without the module, so cut",
         Training.of(name, {"model": {"empty_layers": None, "mtp": None}}).step),
    ]  # fmt: skip
    return changes_table(plan.step, changes)


def memory() -> str:
    """Of the rank that needs most."""
    changes: dict[str, dict[str, dict[str, Any]]] = {
        "llama3_405b": {
            "as it is": {},
            "what is gathered is kept": {"memory": {"gathered": "kept"}},
            "gradients in bfloat16": {"memory": {"gradient_dtype": "bfloat16"}},
            "every block computed again": {"memory": {"recompute": "full"}},
        },
        "deepseek_v3": {
            "as it is": {},
            "tokens go to experts in bfloat16": {"model": {"moe": {"dispatch_dtype": None}}},
            "every block computed again": {"memory": {"recompute": "full"}},
        },
    }
    rows = []
    for name, of_plan in changes.items():
        for text, change in of_plan.items():
            one = Training.of(name, change) if change else base(name)
            curve = max(one.simulation.memory, key=lambda curve: curve.peak)
            parts = (Part.PARAMETERS, Part.GRADIENTS, Part.OPTIMIZER, Part.ACTIVATIONS, Part.MESSAGES)
            rows.append((f"`{name}`", text, f"{curve.peak / GIB:.1f}", f"{CAPACITY:.1f}",
                         *(f"{curve.make_up[part] / GIB:.1f}" for part in parts)))  # fmt: skip
    header = ("plan", "", "peak, GiB", "of", "weights", "gradients", "optimizer", "activations", "messages")
    return table(header, rows)


def deepseek_kept() -> str:
    """What a block with experts keeps of a micro-batch from its forward on: as counted, and as published."""
    plan = base("deepseek_v3")
    layers = {layer.name: layer for layer in describe_gpt(plan.spec)}
    last = layers[[name for name in stage_layers(plan.spec)[1] if name in layers][-1]]
    rows, sums = list[tuple[str, ...]](), [0.0, 0.0]
    for held in activations_of(plan.spec, [last], plan.costs.size):
        mine = float(held.num_bytes) / 2**20
        if not held.life.is_from_forward or mine < 1:
            continue
        published = 0 if held.name in RECOMPUTED else mine * SHARE_KEPT.get(held.name, 1)
        sums = [sums[0] + mine, sums[1] + published]
        if mine != published:
            rows.append((f"`{held.name}`", f"{mine:.0f}", f"{published:.0f}"))
    rows += [("all, with those that are equal", *(f"{part:.0f}" for part in sums))]
    return table(("kept from F on, MiB", "counted", "as published"), rows)


def slowed(given: Training, percent: int) -> dict[str, Any]:
    """The times of a plan with one of its pipeline ranks slower, neither the first nor the last."""
    longer, pp = Fraction(100 + percent, 100), given.spec.topology.pp
    return {
        key: tuple(us * longer if stage % pp == 5 else us for stage, us in enumerate(getattr(given.spec.cost, key)))
        for key in ("forward_us", "backward_input_us", "backward_weight_us")
    }


def analytic(name: str, **keys: Any) -> Training:
    """With these keys of ``cost.analytic``."""
    return Training.of(name, {"cost": {"analytic": keys}})


def moe(keys: dict[str, Any]) -> Training:
    """With other exchanges."""
    return Training.of("deepseek_v3", {"model": {"moe": keys}})


def changes_table(step: float, changes: Iterable[tuple[str, float]]) -> str:
    """The step of the plan, and of each change of it."""
    rows = [("the plan as it is", f"{step:.2f}", "")]
    rows += [(text, f"{other:.2f}", f"{100 * (other / step - 1):+.0f} %") for text, other in changes]
    return table(("changed", "step, s", ""), rows)


def beside(name: str, simulated: float, published: float, digits: int) -> tuple[str, ...]:
    """A figure, what was published, and the first by the second."""
    return name, f"{simulated:.{digits}f}", f"{published:.{digits}f}", f"{simulated / published:.2f}"


def percent(share: float) -> str:
    """Whole percents."""
    return f"{100 * share:.0f} %"


if __name__ == "__main__":
    page = DOCS / "published.md"
    parts = {
        "llama-steps": llama_steps(),
        "llama-changes": llama_changes(),
        "deepseek-steps": deepseek_steps(),
        "deepseek-each": deepseek_each(),
        "deepseek-changes": deepseek_changes(),
        "memory": memory(),
        "deepseek-kept": deepseek_kept(),
    }
    sys.exit(main("docs/make_published.py", {page: fill(page, parts)}))
