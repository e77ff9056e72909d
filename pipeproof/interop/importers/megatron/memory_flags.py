"""Products in fewer bits, recomputation, stored activations and optimizer states, from the flags of Megatron-LM.

Names and defaults are from megatron/core/transformer/transformer_config.py and megatron/training/arguments.py
(Megatron-LM, commit d98e8a6).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final, cast, get_args

from pipeproof.interop.importers.megatron.flag_values import FlagReader
from pipeproof.specs.cost import MatmulDtype
from pipeproof.specs.memory import RecomputeModule

_OFFLOADED, _PRECISE, _GRAPHS = "--cpu-offloading-num-layers", "--use-precision-aware-optimizer", "--cuda-graph-impl"
_TP_OVERLAP = "--tp-comm-overlap"

_TYPE_OF_RECIPE: Final[Mapping[str, MatmulDtype]] = MappingProxyType(
    {"delayed": "float8", "tensorwise": "float8", "mxfp8": "float8", "blockwise": "float8_block"}
)
"""Types of products by ``--fp8-recipe``. Products of Blackwell apply the scales of MXFP8 themselves, as fast as one
scale for a tensor; scales for blocks of 128 need further instructions."""

_BYTES: Final = MappingProxyType(
    {"float32": 4, "fp32": 4, "float16": 2, "fp16": 2, "bf16": 2, "bfloat16": 2, "fp8": 1, "uint8": 1}
)
"""Bytes by names of types: of the flags, and of the printed block of arguments after ``torch.``."""
_REPLAYED = {"attn": "attention", "moe_router": "router"}
"""Parts of a block in ``cost.analytic.replayed`` by their names in Megatron-LM. Its routing choice and counting of
visits (``moe_preprocess``) are not separate operations here."""


def import_precision(reader: FlagReader) -> None:
    """Set ``memory.offload_blocks``, ``memory.optimizer_bytes``, and keys of computed times.

    Raises:
        PlanFileError: PP170, a value cannot be read; PP171, Megatron-LM refuses it.
    """
    _import_product_type(reader)
    _import_offload(reader)
    _import_optimizer_state(reader)
    _import_execution(reader)


def _import_product_type(reader: FlagReader) -> None:
    """Set the type of products, in which Transformer Engine also keeps their inputs for the gradients of weights."""
    flag, recipe = "--fp8-format", "--fp8-recipe"
    dtype: MatmulDtype | None = None
    if reader.has("--fp4-format"):
        flag, dtype = "--fp4-format", "float4"
    elif reader.has(flag):
        name = reader.text(recipe) or "delayed"
        flag, dtype = recipe if reader.has(recipe) else flag, _TYPE_OF_RECIPE.get(name)
        if dtype is None:  # `custom`
            reader.ignore(recipe, "the plan's products have no type of their own")
    if dtype is not None:
        reader.take_for_device(flag, ("cost", "analytic", "matmul_dtype"), dtype)
        reader.take_for_device(flag, ("memory", "product_inputs"), "matmul_dtype")


def _import_offload(reader: FlagReader) -> None:
    """Set the blocks whose activations are copied to the host: the first ones, of a model without pipeline ranks."""
    number = reader.number(_OFFLOADED, at_least=0)
    if not number:
        return
    conditions = (
        (reader.plan.number("topology", "pp") > 1, "there are several pipeline ranks"),
        (reader.has("--recompute-granularity"), "--recompute-granularity is given"),
        (number >= reader.plan.number("model", "num_layers"), "not all blocks can be offloaded"),
    )
    for is_refused, why in conditions:
        if is_refused:
            reader.megatron_refuses(f"with {_OFFLOADED} {number}, {why}", _OFFLOADED)
    reader.take(_OFFLOADED, ("memory", "offload_blocks"), number)


def _import_optimizer_state(reader: FlagReader) -> None:
    """Set the bytes of two moments and of the copy of weights, if they have types of their own.

    With bfloat16 weights, their copy stores only the 16 missing bits (``store_param_remainders``).
    """
    if not reader.has(_PRECISE):
        return
    names = [
        (reader.text(flag) or "fp32").removeprefix("torch.")
        for flag in ("--exp-avg-dtype", "--exp-avg-sq-dtype", "--main-params-dtype")
    ]
    if all(name in _BYTES for name in names):
        moments, copy = sum(_BYTES[name] for name in names[:2]), _BYTES[names[2]]
        has_remainders = reader.has("--bf16") and not reader.has("--no-store-param-remainders")
        shared = 2 if has_remainders and copy == 4 else 0
        reader.take(_PRECISE, ("memory", "optimizer_bytes"), moments + copy - shared)


def _import_execution(reader: FlagReader) -> None:
    """Set overlapped communication, the exchange of tokens, and whether the host starts each operation."""
    plan = reader.plan
    if reader.has(_TP_OVERLAP) and plan.get("topology", "sequence_parallel"):
        reader.take_for_device(_TP_OVERLAP, ("cost", "analytic", "overlap"), ["tp"])
    elif plan.number("topology", "tp") > 1:
        plan.set_for_device(("cost", "analytic", "overlap"), ["tp_backward"], "Megatron-LM overlaps them always")
    dispatcher = "--moe-token-dispatcher-type"
    if reader.text(dispatcher) == "flex":
        reader.take_for_device(dispatcher, ("cost", "analytic", "exchange"), "by_node")
    rotary, unfused = "--position-embedding-type", "--no-rope-fusion"
    if reader.text(rotary) == "yarn":  # Transformer Engine's operation lacks its factor
        reader.take_for_device(rotary, ("cost", "analytic", "fused_rotary"), value=False)
    elif reader.has(unfused):
        reader.take_for_device(unfused, ("cost", "analytic", "fused_rotary"), value=False)
    fuser = "--use-transformer-engine-op-fuser"
    if reader.has("--num-experts") and reader.has(fuser):
        reader.take_for_device(fuser, ("cost", "analytic", "fused_experts"), value=True)
    elif reader.has("--num-experts") and reader.has("--moe-grouped-gemm") and not reader.has("--disable-bias-linear"):
        reader.take_for_device("--moe-grouped-gemm", ("cost", "analytic", "expert_biases"), value=True)
    _import_graphs(reader)


def _import_graphs(reader: FlagReader) -> None:
    """Set the parts that the host starts by a replay: whole steps, or named parts of blocks."""
    scopes = "--cuda-graph-modules", "--cuda-graph-scope"
    for flag in (_GRAPHS, *scopes):
        if reader.has(flag) and reader.text(flag) == "full_iteration":
            reader.take_for_device(flag, ("cost", "analytic", "execution"), "graph")
            return
    if not reader.has(_GRAPHS) or reader.text(_GRAPHS) == "none":
        return
    for flag in scopes:
        names = reader.arguments.flags[flag].values if reader.has(flag) else ()
        parts = [part for name, part in _REPLAYED.items() if name in names]
        if parts:
            reader.take_for_device(flag, ("cost", "analytic", "replayed"), parts)
            return
    why = "the host starts each operation here; attn, moe_router and full_iteration are replayed"
    reader.ignore(_GRAPHS, why)


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
    if modules and modules != [_CORE] and reader.plan.get("memory", "recompute") == "selective":
        reader.take(MODULES if reader.has(MODULES) else flag, ("memory", "recompute_modules"), modules)
    if recompute != "selective" and reader.has(MODULES) and recomputed_modules(reader) != [_CORE]:
        why = f"only `{_GRANULARITY} selective` reads it"
        reader.plan.ignore(MODULES, why, reader.location(MODULES))


def recomputed_modules(reader: FlagReader) -> list[str]:
    """Return the modules that the flags name; without flags, Megatron-LM's default.

    They are words, or a list as Python writes it.
    """
    setting = reader.setting(MODULES)
    values = () if setting is None else setting.values
    modules = re.findall(r"\w+", " ".join(value or "" for value in values)) if values else [_CORE]
    return [*modules, *(["moe"] if reader.has(_WHOLE_EXPERTS) and "moe" not in modules else [])]


def _known_modules(reader: FlagReader) -> Iterator[RecomputeModule]:
    """Yield the modules that the model has; for most others Megatron-LM does nothing."""
    setting, plan = reader.setting(MODULES), reader.plan
    if setting is not None and None in setting.values:
        plan.ignore(MODULES, f"its value is {setting.why}", setting.location)
        yield _CORE
        return
    is_latent = ("model", "mla") in plan
    has_shared = ("model", "moe", "num_shared_experts") in plan
    absent = {*_NOT_DESCRIBED, *(() if has_shared else ("shared_experts",))}
    absent |= set() if ("model", "moe") in plan else {"moe", "moe_act"}
    keeps_gathered = reader.has("--sequence-parallel") and plan.get("schedule", "overlap") is not None
    module_names = get_args(RecomputeModule)
    for module in dict.fromkeys(recomputed_modules(reader)):
        if module not in (*module_names, *_NOT_DESCRIBED):
            reader.megatron_refuses(f"{MODULES} has `{module}`, and its modules are {', '.join(module_names)}", MODULES)
        elif module == "mla_up_proj" and not is_latent:
            reader.megatron_refuses(f"{MODULES} has mla_up_proj without --multi-latent-attention", MODULES)
        elif module == "shared_experts" and has_shared and reader.has("--moe-shared-expert-overlap"):
            reader.megatron_refuses(f"{MODULES} has shared_experts with --moe-shared-expert-overlap", MODULES)
        elif module in absent:
            plan.ignore(f"{MODULES} {module}", "the model has no such module", reader.location(MODULES))
        elif keeps_gathered and module in ("layernorm", "mla_up_proj", "mlp"):
            plan.ignore(f"{MODULES} {module}", "pairs keep gathered inputs here", reader.location(MODULES))
        else:
            yield cast("RecomputeModule", module)
