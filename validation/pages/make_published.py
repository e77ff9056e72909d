"""Writes the tables of ``results/published.md``: plans of published trainings compared with the published figures.

``python validation/pages/make_published.py`` writes, ``--check`` exits 1 if a table is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from pages import EVIDENCE, fill, main, table
from published_runs import PARTS, Training

from pipeproof.schedule.ops import OpKind
from pipeproof.sim.memory_curve import Part
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.model_family import stage_layers, stored_activations

GIB = 2**30
CAPACITY = 80 * 10**9 / GIB
"""GiB of an H100 or H800 of 80 GB."""
PEAK = 989.4
"""TFLOP/s in bfloat16, against which both papers give their shares."""


@dataclass(frozen=True)
class Row:
    """Row of table 4 of arXiv:2407.21783: changed keys, GPUs, published TFLOP/s per GPU and share of peak."""

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
    "1F1B": "an overlapped forward and backward (1F1B)",
    "optimizer": "gradient reductions, optimizer",
    "idle": "idle (bubble)",
}
RECOMPUTED = ("attn.q_down", "attn.q_up", "attn.kv_up", "mlp.router", "attn.qkv_out", "mlp.experts.down",
              "mlp.shared.down", "mlp.unpermute")  # fmt: skip
"""Not kept by arXiv:2412.19437, sections 3.2.3 and 3.3.3: results of norms, of MLA's up-projections and of SwiGLU.
Results of single experts are gone once they are summed on the way back."""
SHARE_KEPT = {"mlp.experts.swiglu": 0.5, "mlp.shared.swiglu": 0.5, "attn.out": 0.75}
"""Share of bfloat16: eight bits, and twelve for the input of attention's output product (section 3.3.3)."""


@cache
def base(name: str) -> Training:
    """Return the unchanged plan."""
    return Training.of(name)


def llama_steps() -> str:
    """Table of the paper's rows, with the step that follows from them."""
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
    """Table of the step with one assumption changed at a time."""
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
        ("gathered activations are kept",
         Training.of("llama3_405b", {"memory": {"sequence_parallel_activations": "keep"}}).step),
        ("gradient reductions when ready",
         Training.of("llama3_405b", {"schedule": {"reduce_gradients": "when_ready"}}).step),
        ("gradient reductions fully hidden", given.step),
        *((f"reductions hidden, one pipeline rank of 16 is {percent} % slower",
           given.given(**slowed(given, percent)).step) for percent in (5, 10)),
        ("gradient reductions and collectives over tp fully hidden", hidden.step),
        ("FSDP with nothing hidden: weights gathered once, gradients scattered once", given.step + gather + scatter),
    ]  # fmt: skip
    return changes_table(plan.step, changes)


def deepseek_steps() -> str:
    """Table of the parts of a step; each is the mean of all ranks."""
    plan = base("deepseek_v3")
    ranks = range(plan.spec.topology.pp)
    by_rank = [plan.parts(rank) for rank in ranks]
    rows: list[tuple[str, ...]] = [compared("step, s", plan.step, DEEPSEEK["step"], 3)]
    for part in PARTS:
        times = [parts[part] for parts in by_rank]
        rows.append((*compared(f"{NAMES[part]}, s", sum(times) / len(times), DEEPSEEK[part], 2),
                     f"{min(times):.2f} to {max(times):.2f}"))  # fmt: skip
    main = Training.of("deepseek_v3", {"model": {"mtp": None}})  # the papers count only the main model's work
    tokens, reached = plan.tokens, main.tflops(plan.step)
    rows += [
        compared("TFLOP/s per GPU, causal attention", reached, 385, 0),
        compared("the same for the published step, with pipeproof's count", main.tflops(DEEPSEEK["step"]), 385, 0),
        (*compared("share of peak in bfloat16, %", 100 * reached / PEAK, 38.94, 2), ""),
        compared("tokens per day, 10^9", tokens / plan.step * 86400 / 10**9, 272.80, 1),
        compared("GPU hours for 10^12 tokens, 10^3",
                 plan.step / tokens * 10**12 / 3600 * plan.spec.topology.num_ranks / 1000, 180, 0),
    ]  # fmt: skip
    header = ("mean of the ranks", "simulated", "published", "ratio", "range over ranks")
    return table(header, [(*row, *[""] * (len(header) - len(row))) for row in rows])


def mean_parts(plan: Training) -> dict[str, float]:
    """Return the seconds of each part of a step, as mean of the ranks."""
    by_rank = [plan.parts(rank) for rank in range(plan.spec.topology.pp)]
    return {part: sum(parts[part] for parts in by_rank) / len(by_rank) for part in PARTS}


def deepseek_each() -> str:
    """Table of the time of a single phase, assuming that the published run has the same order."""
    plan = base("deepseek_v3")
    counts = plan.counts()
    rows = list[tuple[str, ...]]()
    for name, count in counts.items():
        each = compared(NAMES[name], 1000 * mean_parts(plan)[name] / count, 1000 * DEEPSEEK[name] / count, 1)
        rows.append((each[0], f"{count:.1f}", *each[1:]))
    alone = ("1F", "1B", "1W")
    ratios = []
    for parts in (mean_parts(plan), DEEPSEEK):
        pair, both = parts["1F1B"] / counts["1F1B"], sum(parts[name] for name in alone) / counts["1F"]
        ratios.append(f"{pair / both:.2f}")
    rows.append(("a pair, relative to both alone with their W", "", *ratios, ""))
    return table(("phase", "number per rank", "simulated, ms", "published, ms", "ratio"), rows)


def deepseek_changes() -> str:
    """Table of the step with one assumption changed at a time."""
    name, plan = "deepseek_v3", base("deepseek_v3")
    units = 112 / 132
    by_itself, wide = {"nodes_per_token": None}, {"dispatch_dtype": None}
    changes = [
        ("each visit of an expert crosses the network separately", moe(by_itself).step),
        ("tokens go to experts in bfloat16", moe(wide).step),
        ("both", moe({**by_itself, **wide}).step),
        ("products in bfloat16", analytic(name, matmul_dtype=None).step),
        *((f"products at {e:g} of peak", analytic(name, matmul_efficiency=e).step) for e in (0.6, 0.8)),
        ("products at 0.25 of peak, which W alone suggests", analytic(name, matmul_efficiency=0.25).step),
        ("products and attention on 112 of 132 multiprocessors",
         analytic(name, matmul_efficiency=round(0.7 * units, 3), attention_efficiency=round(0.5 * units, 3)).step),
        ("links and network at 0.6 of their bandwidth", analytic(name, link_efficiency=0.6).step),
        ("every block recomputed", Training.of(name, {"memory": {"recompute": "full"}}).step),
        ("no overlapped pairs, gradient reductions hidden", plan.given(overlapped_us=None).step),
        ("gradient reductions fully hidden", plan.given().step),
        ("three blocks on the stage of the MTP module, not one",
         Training.of(name, {"model": {"empty_layers": None}}).step),
        ("the same partition without the MTP module",
         Training.of(name, {"model": {"empty_layers": None, "mtp": None}}).step),
    ]  # fmt: skip
    return changes_table(plan.step, changes)


def memory() -> str:
    """Table of the rank with the highest peak."""
    changes: dict[str, dict[str, dict[str, Any]]] = {
        "llama3_405b": {
            "as it is": {},
            "gathered activations are kept": {"memory": {"sequence_parallel_activations": "keep"}},
            "gradients in bfloat16": {"memory": {"gradient_dtype": "bfloat16"}},
            "every block recomputed": {"memory": {"recompute": "full"}},
        },
        "deepseek_v3": {
            "as it is": {},
            "tokens go to experts in bfloat16": {"model": {"moe": {"dispatch_dtype": None}}},
            "every block recomputed": {"memory": {"recompute": "full"}},
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
    header = ("plan", "change", "peak, GiB", "capacity", "weights", "gradients", "optimizer", "activations", "messages")
    return table(header, rows)


def deepseek_kept() -> str:
    """Table of the activations of a block with experts for one micro-batch, as counted and as published."""
    plan = base("deepseek_v3")
    layers = {layer.name: layer for layer in describe_gpt(plan.spec)}
    last = layers[[name for name in stage_layers(plan.spec)[1] if name in layers][-1]]
    rows, sums = list[tuple[str, ...]](), [0.0, 0.0]
    for held in stored_activations(plan.spec, [last], plan.costs.size):
        counted = float(held.num_bytes) / 2**20
        if not held.lifetime.is_from_forward or counted < 1:
            continue
        published = 0 if held.name in RECOMPUTED else counted * SHARE_KEPT.get(held.name, 1)
        sums = [sums[0] + counted, sums[1] + published]
        if counted != published:
            rows.append((f"`{held.name}`", f"{counted:.0f}", f"{published:.0f}"))
    rows += [("total, including equal ones", *(f"{part:.0f}" for part in sums))]
    return table(("kept from F on, MiB", "counted", "as published"), rows)


def slowed(given: Training, percent: int) -> dict[str, Any]:
    """Return the times of a plan with one slower pipeline rank, neither the first nor the last."""
    longer, pp = Fraction(100 + percent, 100), given.spec.topology.pp
    return {
        key: tuple(us * longer if stage % pp == 5 else us for stage, us in enumerate(getattr(given.spec.cost, key)))
        for key in ("forward_us", "backward_input_us", "backward_weight_us")
    }


def analytic(name: str, **keys: Any) -> Training:
    """Return the training with these keys of ``cost.analytic``."""
    return Training.of(name, {"cost": {"analytic": keys}})


def moe(keys: dict[str, Any]) -> Training:
    """Return DeepSeek-V3 with these keys of ``model.moe``."""
    return Training.of("deepseek_v3", {"model": {"moe": keys}})


def changes_table(step: float, changes: Iterable[tuple[str, float]]) -> str:
    """Table of the step of the plan and of each change."""
    rows = [("the plan as it is", f"{step:.2f}", "")]
    rows += [(text, f"{other:.2f}", f"{100 * (other / step - 1):+.0f} %") for text, other in changes]
    return table(("change", "step, s", "difference"), rows)


def compared(name: str, simulated: float, published: float, digits: int) -> tuple[str, ...]:
    """Row with a simulated figure, the published one, and their ratio."""
    return name, f"{simulated:.{digits}f}", f"{published:.{digits}f}", f"{simulated / published:.2f}"


def percent(share: float) -> str:
    """Format a share in whole percents."""
    return f"{100 * share:.0f} %"


if __name__ == "__main__":
    page = EVIDENCE / "published.md"
    parts = {
        "llama-steps": llama_steps(),
        "llama-changes": llama_changes(),
        "deepseek-steps": deepseek_steps(),
        "deepseek-each": deepseek_each(),
        "deepseek-changes": deepseek_changes(),
        "memory": memory(),
        "deepseek-kept": deepseek_kept(),
    }
    sys.exit(main("validation/pages/make_published.py", {page: fill(page, parts)}))
