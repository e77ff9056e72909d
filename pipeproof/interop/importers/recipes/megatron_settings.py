"""Settings of recipes for Megatron-Core, as arguments of Megatron-LM: names of attributes and keys, and their flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from pipeproof.interop.importers.megatron.flag_values import Setting
from pipeproof.interop.importers.model_parts import PART_NEGATED, PART_SETTINGS
from pipeproof.interop.importers.recipes.layered_yaml import Placed, Unknown, is_known

MODEL_FLAGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tensor_model_parallel_size": "--tensor-model-parallel-size",
        "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
        "context_parallel_size": "--context-parallel-size",
        "expert_model_parallel_size": "--expert-model-parallel-size",
        "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
        "sequence_parallel": "--sequence-parallel",
        "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
        "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
        "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
        "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
        "account_for_embedding_in_pipeline_split": "--account-for-embedding-in-pipeline-split",
        "account_for_loss_in_pipeline_split": "--account-for-loss-in-pipeline-split",
        "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
        "variable_seq_lengths": "--variable-seq-lengths",
        "num_layers": "--num-layers",
        "hidden_size": "--hidden-size",
        "ffn_hidden_size": "--ffn-hidden-size",
        "num_attention_heads": "--num-attention-heads",
        "kv_channels": "--kv-channels",
        "num_query_groups": "--num-query-groups",
        "seq_length": "--seq-length",
        "vocab_size": "--vocab-size",
        "normalization": "--normalization",
        **PART_SETTINGS,
        "position_embedding_type": "--position-embedding-type",
        "gated_linear_unit": "--swiglu",
        "multi_latent_attention": "--multi-latent-attention",
        "num_moe_experts": "--num-experts",
        "moe_router_topk": "--moe-router-topk",
        "moe_token_dispatcher_type": "--moe-token-dispatcher-type",
        "moe_ffn_hidden_size": "--moe-ffn-hidden-size",
        "moe_layer_freq": "--moe-layer-freq",
        "mtp_num_layers": "--mtp-num-layers",
        "attention_dropout": "--attention-dropout",
        "hidden_dropout": "--hidden-dropout",
        "recompute_granularity": "--recompute-granularity",
        "recompute_modules": "--recompute-modules",
        "recompute_method": "--recompute-method",
        "recompute_num_layers": "--recompute-num-layers",
        "calculate_per_token_loss": "--calculate-per-token-loss",
        "cross_entropy_loss_fusion": "--cross-entropy-loss-fusion",
        "cross_entropy_fusion_impl": "--cross-entropy-fusion-impl",
        "moe_shared_expert_overlap": "--moe-shared-expert-overlap",
        "hybrid_layer_pattern": "--hybrid-layer-pattern",
    }
)
"""Attributes of a model's configuration in Megatron-Core (TransformerConfig, ModelParallelConfig) and their flags."""

OVERLAP_FLAGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
        "delay_wgrad_compute": "--delay-wgrad-compute",
        "defer_embedding_wgrad_compute": "--defer-embedding-wgrad-compute",
        "overlap_param_gather_with_optimizer_step": "--overlap-param-gather-with-optimizer-step",
    }
)
NEGATED: Final[Mapping[str, str]] = MappingProxyType(
    {"add_bias_linear": PART_NEGATED["add_bias_linear"], "overlap_p2p_comm": "--no-overlap-p2p-communication"}
)
_DEFAULTS: Final = frozenset({("moe_layer_freq", "1")})
"""Values that change nothing, as launchers write them."""
_LETTERS: Final = MappingProxyType({"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"})

GROUPS: Final = "--num-query-groups"


def settings_of(values: Iterator[tuple[str, Placed]], names: Mapping[str, str], shown: str) -> Iterator[Setting]:
    """Yield the flags that attributes or keys with these values mean; ``shown`` is put before their names."""
    for name, placed in values:
        negated = NEGATED.get(name)
        if negated is not None and placed.value is False:
            yield Setting(negated, (), placed.location, placed.location)
        flag = names.get(name)
        if flag is not None and (name, str(placed.value)) not in _DEFAULTS:
            yield from _setting(flag, f"{shown}{name}", placed)


def plain_setting(flag: str, placed: Placed | None, name: str) -> Iterator[Setting]:
    """Yield a flag with the value of one attribute or key; nothing without one."""
    if placed is not None:
        yield from _setting(flag, name, placed)


def _setting(flag: str, name: str, placed: Placed) -> Iterator[Setting]:
    value, location = placed.value, placed.location
    if flag == "--pipeline-model-parallel-layout":
        value = layout_text(value)
    if not is_known(value):
        why = value.why if isinstance(value, Unknown) else "no plain value"
        yield Setting(flag, (None,), location, location, f"{why} (`{name}`)")
    elif value is None or value is False or value == []:
        return
    elif value is True:
        yield Setting(flag, (), location, location)
    else:
        yield Setting(flag, (str(value),), location, location)
        if flag == GROUPS:
            yield Setting("--group-query-attention", (), location, location)


def layout_text(value: Any) -> Any:
    """Return a layout as the string of Megatron-LM; lists of layers for each stage are joined."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not is_known(value):
        return value
    stages = [stage if isinstance(stage, list | tuple) else [stage] for stage in value]
    return "|".join("".join(_LETTERS.get(str(layer), str(layer)) for layer in stage) for stage in stages)
