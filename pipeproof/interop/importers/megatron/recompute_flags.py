"""Flags of recomputation of Megatron-LM: what the backward computes again, as ``memory.recompute``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, cast, get_args

from pipeproof.interop.importers.megatron.flag_values import FlagReader
from pipeproof.specs.memory import RecomputeModule

MODULES: Final = "--recompute-modules"
_GRANULARITY, _ACTIVATIONS, _WHOLE_EXPERTS = (
    "--recompute-granularity", "--recompute-activations", "--moe-layer-recompute",
)  # fmt: skip
_CORE: Final = "core_attn"
_NOT_DESCRIBED: Final = ("gdn_norm_out", "gdp_in_proj", "gdp_qkv", "mhc")
"""Modules of Megatron-LM that no block of a plan has."""


def import_recomputation(reader: FlagReader) -> None:
    """Set ``memory.recompute`` and ``memory.recompute_modules``.

    Raises:
        PlanFileError: PP170, a value cannot be read; PP171, Megatron-LM refuses it.
    """
    granularity, flag, recompute = reader.text(_GRANULARITY), _GRANULARITY, ""
    if reader.has(_WHOLE_EXPERTS):
        if granularity == "full":
            reader.megatron_refuses(f"{_WHOLE_EXPERTS} is given with {_GRANULARITY} full", _WHOLE_EXPERTS)
        flag, recompute = _WHOLE_EXPERTS, "selective"
    elif reader.has(_ACTIVATIONS):
        flag, recompute = _ACTIVATIONS, "selective"
    elif granularity in ("selective", "full"):
        recompute = granularity
    modules = [*_known_modules(reader)] if recompute == "selective" else []
    if recompute == "full" or modules:
        reader.take(flag, ("memory", "recompute"), recompute)
    if modules and modules != [_CORE] and reader.draft.get("memory", "recompute") == "selective":
        reader.take(MODULES if reader.has(MODULES) else flag, ("memory", "recompute_modules"), modules)
    if recompute != "selective" and reader.has(MODULES) and recomputed_modules(reader) != [_CORE]:
        why = f"only `{_GRANULARITY} selective` reads it"
        reader.draft.ignore(MODULES, why, reader.location(MODULES))


def recomputed_modules(reader: FlagReader) -> list[str]:
    """Return the modules that the flags name, those of Megatron-LM's default without any.

    They are words, or a list as Python writes it.
    """
    setting = reader.setting(MODULES)
    values = () if setting is None else setting.values
    modules = re.findall(r"\w+", " ".join(value or "" for value in values)) if values else [_CORE]
    return [*modules, *(["moe"] if reader.has(_WHOLE_EXPERTS) and "moe" not in modules else [])]


def _known_modules(reader: FlagReader) -> Iterator[RecomputeModule]:
    """Yield the modules that the model has; for most others Megatron-LM does nothing."""
    setting, draft = reader.setting(MODULES), reader.draft
    if setting is not None and None in setting.values:
        draft.ignore(MODULES, f"its value is {setting.why}", setting.location)
        yield _CORE
        return
    is_latent = ("model", "mla") in draft
    has_shared = ("model", "moe", "num_shared_experts") in draft
    absent = {*_NOT_DESCRIBED, *(() if has_shared else ("shared_experts",))}
    absent |= set() if ("model", "moe") in draft else {"moe", "moe_act"}
    keeps_gathered = reader.has("--sequence-parallel") and draft.get("schedule", "overlap") is not None
    known = get_args(RecomputeModule)
    for module in dict.fromkeys(recomputed_modules(reader)):
        if module not in (*known, *_NOT_DESCRIBED):
            reader.megatron_refuses(f"{MODULES} has `{module}`, and its modules are {', '.join(known)}", MODULES)
        elif module == "mla_up_proj" and not is_latent:
            reader.megatron_refuses(f"{MODULES} has mla_up_proj without --multi-latent-attention", MODULES)
        elif module == "shared_experts" and has_shared and reader.has("--moe-shared-expert-overlap"):
            reader.megatron_refuses(f"{MODULES} has shared_experts with --moe-shared-expert-overlap", MODULES)
        elif module in absent:
            draft.ignore(f"{MODULES} {module}", "the model has no such module", reader.location(MODULES))
        elif keeps_gathered and module in ("layernorm", "mla_up_proj", "mlp"):
            draft.ignore(f"{MODULES} {module}", "pairs keep gathered inputs here", reader.location(MODULES))
        else:
            yield cast("RecomputeModule", module)
