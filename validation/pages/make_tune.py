"""Writes the tables of ``validation/results/tune-published.md`` from ``validation/results/tune.json``.

``python validation/pages/make_tune.py`` writes, ``--check`` exits 1 if a part is stale.
``benchmarks/tune_published.py`` makes the results.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pages import EVIDENCE, fill, main, table

from pipeproof.cost.devices import DEVICES
from validation.board.accuracy_board import MEASUREMENTS, read_measurements

RESULTS = EVIDENCE / "tune.json"
PAGE = EVIDENCE / "tune-published.md"
TABLE = MEASUREMENTS / "megatron_bridge_perf.csv"
_COMPARED = ("pp", "vpp", "tp", "cp", "ep", "mbs")
_MESH = ("pp", "tp", "cp", "ep")


_RECIPES = (
    ("Qwen3_30B", "MXFP8", ("activations of experts in paged buffers (`moe_paged_stash`); inputs of products kept in 8 "
     "bits"), "qwen/common.py; TransformerEngine module/linear.py"),
    ("Qwen3_30B", "", "inputs of products kept in 8 bits",
     "qwen/h100/qwen3_moe.py; TransformerEngine module/linear.py"),
    ("GPT OSS", "", "normalizations and the activation of experts are computed again (`recompute_modules`)",
     "gpt_oss/b200/gpt_oss.py"),
    ("LLAMA3_70B, 64 DGX-GB300", "NVFP4", ("the mesh of a recipe that shards weights over dp (FSDP) and offloads the "
     "activations of 20 or 30 blocks; the summary prints it without FSDP"), "llama/gb300/llama3.py"),
    ("LLAMA3_70B, 64 DGX-GB300", "MXFP8", "no recipe has this choice: that in MXFP8 has VPP 5 and MBS 1",
     "llama/gb300/llama3.py"),
    ("LLAMA", "", "inputs of products kept in 8 or 4 bits, nothing else", "llama; TransformerEngine module/linear.py"),
    ("DeepSeekV3, 256 DGX-GB200", "", ("MLA's up-projections are computed again; the moments of the optimizer are in "
     "bfloat16 in one of two recipes, which also offloads inputs of experts"), "deepseek/gb200/deepseek_v3.py"),
    ("DeepSeekV3, 256 DGX-B300", "", ("MLA's up-projections are computed again; experts in paged buffers; the recipe "
     "has VPP 2 and MBS 1, not the printed MBS 2"), "deepseek/b300/deepseek_v3.py"),
    ("DeepSeekV3", "", "MLA's up-projections are computed again, on B200 dense MLPs, too", "deepseek"),
    ("Qwen3_235B", "", "inputs of products kept in 8 bits, nothing else",
     "qwen/h100/qwen3_moe.py; TransformerEngine module/linear.py"),
    ("Kimi", "", "MLA's up-projections are computed again; inputs of products kept in 8 bits",
     "kimi/gb300/kimi_k2.py"),
)  # fmt: skip
"""Settings of recipes that a plan does not have: model, type, settings, files below ``perf_recipes`` of Megatron-Bridge
(commit 067f987). The first that fits counts."""


def summary_part(trainings: Mapping[str, Any]) -> str:
    """Number of trainings in which the search is at least as good, and in which the published choice is listed."""
    rows = list(trainings.values())
    commits = sorted({row["commit"] for row in rows})
    plans = [(row.name, row.plan) for row in read_measurements([TABLE])[0][0].rows if row.plan is not None]
    known = {json.dumps([plan["topology"], plan["schedule"], plan["model"], plan["cost"]["analytic"]["device"],
                         plan["cost"]["analytic"].get("matmul_dtype")]): name for name, plan in plans}  # fmt: skip
    left_out = Counter(", ".join(name.split(", ")[:3]) for name in known.values()) - Counter(
        row["name"] for row in rows
    )
    missing = ", ".join(f"{name} ({number})" for name, number in sorted(left_out.items()))
    first, third = (sum((_place(row, _COMPARED) or len(row["rows"]) + 1) <= most for row in rows) for most in (1, 3))
    as_good = sum(row["rows"][0]["step_s"] <= row["published"]["step_s"] * (1 + 1e-9) for row in rows)
    same, mesh = (sum(_place(row, names) is not None for row in rows) for names in (_COMPARED, _MESH))
    over = sum(row["published"]["peak_gib"] > _device_gib(row) for row in rows)
    return (
        f"Computed by commit {', '.join(commits)}: {len(rows)} of {len(known)} trainings."
        + (f" Without the time to compare them: {missing}.\n\n" if missing else "\n\n")
        + f"- {as_good} of {len(rows)}: the first row is at least as fast as the published choice, by the same model.\n"
        f"- {same} of {len(rows)}: the published choice (PP, VPP, TP, CP, EP and micro-batch size) is one of the first "
        f"five rows, in {third} one of the first three, in {first} the first one; {mesh} of {len(rows)} with PP, TP, "
        "CP and EP alone.\n"
        f"- {over} of {len(rows)}: the published choice needs more memory by the model than the device has. Then the "
        "search has the limit that the published choice needs.\n"
    )


def trainings_part(trainings: Mapping[str, Any]) -> str:
    """Table of the published choice and the first row of each training."""
    header = (
        "training",
        "batch",
        "published",
        "step, s",
        "GiB",
        "first row",
        "step, s",
        "GiB",
        "published in the top 5",
    )
    return table(
        header,
        [
            (
                row["name"],
                f"{row['global_batch']:,}",
                _layout(row["published"]),
                f"{row['published']['step_s']:.2f}",
                f"{row['published']['peak_gib']:.0f}",
                _layout(row["rows"][0]),
                f"{row['rows'][0]['step_s']:.2f}",
                f"{row['rows'][0]['peak_gib']:.0f}",
                _place_text(row),
            )
            for row in trainings.values()
        ],
    )


def memory_part(trainings: Mapping[str, Any]) -> str:
    """Table of the published choices that need more memory by the model than the device has."""
    lines = []
    for row in trainings.values():
        published = row["published"]
        over = published["peak_gib"] - _device_gib(row)
        if over > 0:
            parts = published["parts_gib"]
            settings, source = next(
                ending
                for start, precision, *ending in _RECIPES
                if row["name"].startswith(start) and precision in row["name"]
            )
            state = sum(parts[name] for name in ("parameters", "gradients", "optimizer"))
            lines.append(
                (
                    row["name"],
                    _layout(published),
                    f"{published['peak_gib']:.0f} of {_device_gib(row)}",
                    f"{over:.0f}",
                    f"{state:.0f}",
                    f"{parts['activations']:.0f}",
                    f"{published['sharded_gib']:.0f}" + (" (fits)" if published["sharded_gib"] >= over else ""),
                    settings,
                    source,
                )
            )
    header = (
        "training", "published", "GiB", "over", "training state", "activations", "sharded over ep and cp",
        "further settings of the recipe", "source",
    )  # fmt: skip
    return table(header, lines) if lines else "None.\n"


def speed_part(trainings: Mapping[str, Any]) -> str:
    """Times of the searches, in one process of a machine with two cores that others used as well."""
    seconds = sorted(row["seconds"] for row in trainings.values())
    slowest = max(trainings.values(), key=lambda row: row["seconds"])
    return (
        f"The {len(seconds)} searches took {seconds[len(seconds) // 2]:.0f} s each in the median; the longest, "
        f"{slowest['name']}, took {slowest['seconds']:.0f} s.\n"
    )


def measured_part(trainings: Mapping[str, Any]) -> str:
    """Table of two published choices for the same training, measured and predicted."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in trainings.values():
        groups.setdefault((row["name"], row["global_batch"]), []).append(row)
    lines = []
    for (name, _), rows in groups.items():
        for index, one in enumerate(rows):
            for other in rows[index + 1 :]:
                first, second = (sum(row["measured"]) / len(row["measured"]) for row in (one, other))
                predicted = other["published"]["step_s"] / one["published"]["step_s"]
                longer = {
                    part: us - one["published"]["parts_s"][part] for part, us in other["published"]["parts_s"].items()
                }
                term = max(longer, key=lambda part: abs(longer[part]))
                lines.append(
                    (
                        name,
                        _layout(one["published"]),
                        _layout(other["published"]),
                        f"{first / second - 1:+.1%}",
                        f"{predicted - 1:+.1%}",
                        "yes" if (first > second) == (predicted > 1) else "no",
                        f"{term} {longer[term]:+.2f} s",
                        (f"{max(one['measured']) / min(one['measured']) - 1:.1%}" if len(one["measured"]) > 1 else ""),
                    )
                )
    header = ("training", "first choice", "second choice", "first is faster, measured", "predicted", "same order",
              "largest part of the difference", "first choice over releases")  # fmt: skip
    return table(header, lines) if lines else "No training in the results was published with two choices.\n"


def _place(row: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The place of the published choice among the rows, from 1; None if it is not listed."""
    wanted = [row["published"][name] for name in names]
    places = (place for place, found in enumerate(row["rows"], 1) if [found[name] for name in names] == wanted)
    return next(places, None)


def _place_text(row: Mapping[str, Any]) -> str:
    place, mesh = _place(row, _COMPARED), _place(row, _MESH)
    if place is not None:
        return f"row {place}"
    return "no" if mesh is None else f"its mesh, row {mesh}"


def _layout(layout: Mapping[str, Any]) -> str:
    names = [f"{name.upper()} {layout[name]}" for name in _COMPARED if layout[name] > 1 or name == "mbs"]
    return ", ".join(names)


def _device_gib(row: Mapping[str, Any]) -> int:
    return next(device.memory_gib for name, device in DEVICES.items() if name == row["device"])


def pages(results: Mapping[str, Any]) -> dict[Path, str]:
    """Return the page by its file."""
    trainings = results["trainings"]
    parts = {
        "summary": summary_part, "trainings": trainings_part, "measured": measured_part, "memory": memory_part,
        "speed": speed_part,
    }  # fmt: skip
    return {PAGE: fill(PAGE, {name: make(trainings) for name, make in parts.items()})}


if __name__ == "__main__":
    sys.exit(main("validation/pages/make_tune.py", pages(json.loads(RESULTS.read_text(encoding="utf-8")))))
