"""Tokens per second and GPU in the performance summaries of Megatron-Bridge."""

from __future__ import annotations

from typing import Any

from pipeproof.interop.tune_models import MODELS, NOT_DESCRIBED, PublicModel
from validation.board.bridge_recipes import recipe_of
from validation.board.measurement import (
    EXPERTS_OVER_TP,
    Cells,
    Measurement,
    NoPlanError,
    Quantity,
    divided,
    known_device,
    megatron_schedule,
    partition,
)

COLUMNS = frozenset(
    {
        "System", "#-GPUs", "Precision", "GBS", "MBS", "Sequence Length", "TP", "PP", "CP", "VP", "EP",
        "Tokens / sec / GPU", "release", "section", "model", "FSDP",
    }
)  # fmt: skip
_PRECISIONS = {"BF16": None, "FP8": "float8", "MXFP8": "float8", "NVFP4": "float4"}

_NOT_DESCRIBED = {**NOT_DESCRIBED, "deepseekv4": "sparse attention has no key in a plan"}
"""Reasons by the beginning of a model's name in lower case."""
_REGRESSIONS = {
    ("gpt oss 120b", "26.06.01"): "another release's code: the source marks its figure as a regression "
    "(NVIDIA/cudnn-frontend, issue 256)"
}
"""Reasons by model and release: one configuration has a much higher figure in another release."""
_WITH_BIASES = "gpt oss 120b"
"""Model whose experts have biases, and whose rotary positions have YaRN's factor, which no fused operation has."""


def megatron_bridge_rows(cells: Cells) -> tuple[Measurement]:
    """Return the measurement of a row.

    Raises:
        MeasurementFileError: a cell cannot be read.
    """
    model_name, section = cells.text("model"), cells.text("section")
    model = MODELS.get(model_name.lower())
    group = f"Megatron-Bridge, {'dense' if model is None or 'moe' not in model.keys else 'MoE'}"
    system, release = f"{cells.text('#-GPUs')} {cells.text('System')}", cells.text("release")
    name = f"{model_name}, {system}, {cells.text('Precision')}, {release}, {section.removesuffix(' Performance')}"
    measured = cells.number("Tokens / sec / GPU")
    try:
        plan, notes = _plan(cells, _described(model_name, model))
    except NoPlanError as error:
        group = group if model else "Megatron-Bridge, other models"
        return (Measurement(group, name, Quantity.TOKENS, measured, None, str(error)),)
    of = {"system": cells.text("System"), "model": model_name.lower()}
    return (Measurement(group, name, Quantity.TOKENS, measured, plan, notes=notes, **of),)


def _described(name: str, model: PublicModel | None) -> PublicModel:
    if model is not None:
        return model
    reasons = [reason for start, reason in _NOT_DESCRIBED.items() if name.lower().startswith(start)]
    raise NoPlanError(reasons[0] if reasons else f"the sizes of {name} are not known to the board")


def _plan(cells: Cells, model: PublicModel) -> tuple[dict[str, Any], tuple[str, ...]]:
    if cells.text("FSDP") not in ("", "0", "1", "n/a"):
        raise NoPlanError("sharded weights (FSDP) have no key in a plan")
    if cells.text("section").startswith("LoRA"):
        raise NoPlanError("frozen weights with adapters (LoRA) have no key in a plan")
    release = cells.text("release").split()[0]
    if reason := _REGRESSIONS.get((cells.text("model").lower(), release)):
        raise NoPlanError(reason)
    precision = cells.text("Precision")
    if precision not in _PRECISIONS:
        raise NoPlanError(f"products in {precision} have no key in a plan")
    device = known_device(cells.text("System"))
    notes = list(model.notes)
    tp, pp, cp = (cells.count(name, 1) for name in ("TP", "PP", "CP"))
    num_chunks, ep = cells.count("VP", 1), cells.count("EP", 1)
    replicas = divided(cells.count("#-GPUs"), tp * pp * cp, "ranks over tp, pp and cp")
    over_tp = replicas % ep != 0 and ep % tp == 0
    if over_tp:
        notes.append(EXPERTS_OVER_TP.format(ep=ep, tp=tp, rest=ep // tp))
        ep //= tp
    dp = divided(replicas, ep, "data-parallel ranks over ep")
    size = cells.count("MBS")
    sizes = (tp, pp, num_chunks, cells.count("EP", 1), size)
    recipe = recipe_of(cells.text("model").lower(), cells.text("System"), precision, release, sizes)
    # Each rank sends the tokens of all tp ranks here, so of experts over tp too: once to each node comes closest.
    exchange = "direct" if recipe.by_all_to_all and not over_tp else "by_node"
    analytic: dict[str, Any] = {"device": device, "dtype": "bfloat16", "exchange": exchange}
    if recipe.is_replayed_whole:
        analytic["execution"] = "graph"
    if recipe.replayed:
        analytic["replayed"] = list(recipe.replayed)
    if cells.text("model").lower() == _WITH_BIASES:
        analytic |= {"fused_rotary": False, "expert_biases": not recipe.has_fused_experts}
    if recipe.has_fused_experts:
        analytic["fused_experts"] = True
    overlap = [name for name, is_given in (
        ("tp", tp > 1), ("ep", ep > 1 and recipe.overlaps_exchange and (pp == 1 or num_chunks > 1)),
    ) if is_given]  # fmt: skip
    if overlap:
        analytic["overlap"] = overlap
    if _PRECISIONS[precision]:
        analytic["matmul_dtype"] = _PRECISIONS[precision]
    mtp = model.keys.get("mtp", {})
    plan = {
        "pipeproof": 1,
        "model": {"kind": "gpt", **model.keys, "seq_length": cells.count("Sequence Length")},
        "topology": {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp": dp, "sequence_parallel": tp > 1},
        "schedule": megatron_schedule(num_chunks, cells.count("GBS"), replicas, size),
        "stages": partition(model.keys["num_layers"], pp * num_chunks, mtp.get("num_modules", 0)),
        "cost": {"analytic": analytic},
        "memory": {
            "shard_optimizer": "dp",
            "gradient_dtype": "bfloat16",
            "cross_entropy": "fused",
            "sequence_parallel_activations": "regather" if tp > 1 else "keep",
            **({"recompute": "selective", "recompute_modules": list(recipe.recomputed)} if recipe.recomputed else {}),
        },
    }
    return plan, tuple(notes)
