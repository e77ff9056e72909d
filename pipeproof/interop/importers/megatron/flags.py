"""Flags of Megatron-LM that affect a plan: those that are read, and reasons why others are not.

Names and defaults are from megatron/training/arguments.py and the
configurations that it makes flags from (Megatron-LM, commit d98e8a6), with the
older names that scripts still use. Flags are listed with hyphens; underscores
in a script mean the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from pipeproof.diagnostics.problems import KeyPath
from pipeproof.interop.importers.model_parts import PART_FLAGS, PART_NEGATED
from pipeproof.interop.importers.names import MEGATRON, names_of, plain

PLAN_KEYS: Final[Mapping[str, KeyPath]] = MappingProxyType(
    {
        "--num-layers": ("model", "num_layers"),
        "--hidden-size": ("model", "hidden_size"),
        "--num-attention-heads": ("model", "num_heads"),
        "--ffn-hidden-size": ("model", "ffn_size"),
        "--seq-length": ("model", "seq_length"),
        "--num-query-groups": ("model", "num_kv_heads"),
        "--kv-channels": ("model", "head_size"),
        "--q-lora-rank": ("model", "mla", "q_rank"),
        "--kv-lora-rank": ("model", "mla", "kv_rank"),
        "--qk-head-dim": ("model", "mla", "nope_head_size"),
        "--qk-pos-emb-head-dim": ("model", "mla", "rope_head_size"),
        "--v-head-dim": ("model", "mla", "value_head_size"),
        "--num-experts": ("model", "moe", "num_experts"),
        "--moe-router-topk": ("model", "moe", "top_k"),
        "--moe-ffn-hidden-size": ("model", "moe", "ffn_size"),
        "--moe-router-score-function": ("model", "moe", "score"),
        "--moe-router-topk-scaling-factor": ("model", "moe", "routed_scale"),
        "--moe-aux-loss-coeff": ("model", "moe", "aux_loss"),
        "--moe-z-loss-coeff": ("model", "moe", "z_loss"),
        "--mhc-num-residual-streams": ("model", "hyper_connections", "streams"),
        "--mhc-sinkhorn-iterations": ("model", "hyper_connections", "sinkhorn_iterations"),
        "--mtp-num-layers": ("model", "mtp", "num_modules"),
        "--mtp-loss-scaling-factor": ("model", "mtp", "loss_weight"),
        "--tensor-model-parallel-size": ("topology", "tp"),
        "--pipeline-model-parallel-size": ("topology", "pp"),
        "--context-parallel-size": ("topology", "cp"),
        "--expert-model-parallel-size": ("topology", "ep"),
        "--num-virtual-stages-per-pipeline-rank": ("schedule", "num_chunks"),
        "--microbatch-group-size-per-virtual-pipeline-stage": ("schedule", "micro_batch_group_size"),
        "--micro-batch-size": ("schedule", "micro_batch_size"),
        "--clip-grad": ("run", "clip_norm"),
    }
)
"""Flags whose value is the value of one key of a plan, and the key."""

FLAGS: Final = frozenset(
    [
        *PART_FLAGS,
        *PLAN_KEYS,
        "--decoder-num-layers",
        "--group-query-attention",
        "--vocab-size",
        "--padded-vocab-size",
        "--make-vocab-size-divisible-by",
        "--untie-embeddings-and-output-weights",
        "--no-rope-fusion",
        "--attention-dropout",
        "--hidden-dropout",
        "--multi-latent-attention",
        "--moe-token-dispatcher-type",
        "--moe-layer-freq",
        "--moe-shared-expert-intermediate-size",
        "--moe-router-load-balancing-type",
        "--moe-router-dtype",
        "--moe-router-enable-expert-bias",
        "--moe-router-bias-update-rate",
        "--enable-mhc-connections",
        "--expert-tensor-parallel-size",
        "--sequence-parallel",
        "--use-tp-pp-dp-mapping",
        "--num-layers-per-virtual-pipeline-stage",
        "--pipeline-model-parallel-layout",
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
        "--no-overlap-p2p-communication",
        "--variable-seq-lengths",
        "--scatter-gather-tensors-in-pipeline",
        "--no-scatter-gather-tensors-in-pipeline",
        "--global-batch-size",
        "--rampup-batch-size",
        "--step-batch-size-schedule",
        "--decrease-batch-size-if-needed",
        "--use-distributed-optimizer",
        "--recompute-activations",
        "--recompute-granularity",
        "--recompute-modules",
        "--moe-layer-recompute",
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--ddp-bucket-size",
        "--ddp-num-buckets",
        "--bf16",
        "--fp16",
        "--lr",
        "--optimizer",
        "--calculate-per-token-loss",
        "--attention-backend",
        "--transformer-impl",
        "--use-flash-attn",
        "--cross-entropy-loss-fusion",
        "--cross-entropy-fusion-impl",
        "--fp8-format",
        "--fp8-recipe",
        "--fp4-format",
        "--cpu-offloading-num-layers",
        "--use-precision-aware-optimizer",
        "--exp-avg-dtype",
        "--exp-avg-sq-dtype",
        "--main-params-dtype",
        "--no-store-param-remainders",
        "--tp-comm-overlap",
        "--cuda-graph-impl",
        "--moe-grouped-gemm",
        "--use-transformer-engine-op-fuser",
        "--cuda-graph-scope",
        "--cuda-graph-modules",
        "--delay-wgrad-compute",
        "--overlap-moe-expert-parallel-comm",
        "--seed",
    ]
)
"""Flags that are read and shown in the plan."""


def _of_kind(kind: str) -> frozenset[str]:
    return frozenset(flag for flag in FLAGS if names_of(MEGATRON).get(plain(flag), "").endswith(f" {kind}"))


SWITCHES: Final = _of_kind("switch") | {"--scatter-gather-tensors-in-pipeline"}
"""Flags that are read and have no value: from the list, and one that no version still has."""

SEVERAL_VALUES: Final = _of_kind("several") | {"--step-batch-size-schedule"}
"""Flags that are read and may have more than one value: one more is a text of pairs."""

NOT_SHOWN: Final[Mapping[str, str]] = MappingProxyType(
    {
        "--overlap-p2p-communication-warmup-flush": "the plan's transfers overlap as its schedule has them",
        "--defer-embedding-wgrad-compute": "the plan's backwards are whole",
        "--overlap-param-gather-with-optimizer-step": "the plan gathers parameters at the end of a step",
        "--use-torch-fsdp2": "sharded parameters are not described",
        "--use-megatron-fsdp": "sharded parameters are not described",
        "--hierarchical-context-parallel-sizes": "context parallelism is one axis here",
        "--recompute-method": "recomputation is of every block here",
        "--recompute-num-layers": "recomputation is of every block here",
        "--distribute-saved-activations": "saved activations are not sharded over ranks here",
        "--moe-expert-capacity-factor": "no token is dropped here",
        "--num-distributed-optimizer-instances": "the optimizer state is sharded over all dp ranks here",
        "--fp8-param-gather": "weights are gathered in their own type here",
        "--fp4-param-gather": "weights are gathered in their own type here",
        "--first-last-layers-bf16": "products of all blocks have one type here",
        "--no-fp8-wgrad": "products for gradients have the type of others here",
        "--grad-reduce-in-bf16": "gradients are summed in float32 here",
        "--main-grads-dtype": "gradients are summed in float32 here",
        "--fine-grained-activation-offloading": "activations of whole blocks are offloaded here, or none",
        "--optimizer-cpu-offload": "the state of the optimizer is on the device here",
        "--use-checkpoint-args": "sizes that a checkpoint has are not read",
        "--num-microbatches-with-partial-activation-checkpoints": "all micro-batches are recomputed here",
    }
)
"""Flags that change a pipeline, and the reason why a plan does not have them."""

NEGATED: Final[Mapping[str, str]] = MappingProxyType(
    {
        **PART_NEGATED,
        "overlap_p2p_comm": "--no-overlap-p2p-communication",
        "store_param_remainders": "--no-store-param-remainders",
        "fp8_wgrad": "--no-fp8-wgrad",
    }
)
"""Arguments that are true by default, and the flags that make them false."""

FLAGS_BY_NAME: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{flag[2:].replace("-", "_"): flag for flag in (*FLAGS, *NOT_SHOWN)},
        "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
        "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
        "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
        "fp8": "--fp8-format",
        "fp4": "--fp4-format",
        "num_layers_in_first_pipeline_stage": "--decoder-first-pipeline-num-layers",
        "num_layers_in_last_pipeline_stage": "--decoder-last-pipeline-num-layers",
        "gated_linear_unit": "--swiglu",
        "num_moe_experts": "--num-experts",
    }
)
"""Arguments of Megatron-LM and attributes of Megatron-Core, and the flags that are read for them."""

WITHOUT_BEARING: Final = re.compile(
    r"offload_modules|optimizer_offload_fraction|moe_(permute_fusion|router_(fusion|pre_softmax)"
    r"|router_(num_groups|group_topk|force_load_balancing|padding_for_\w+)|per_layer_logging|enable_deepep"
    r"|flex_dispatcher_backend|shared_expert_overlap|use_legacy_grouped_gemm|input_jitter_eps|pad_expert_input_\w+)"
    r"|(no_)?ckpt_fully_parallel_(save|load)|no_async_tensor_model_parallel_allreduce|cp_comm_type"
    r"|distributed_(backend|timeout_minutes)"
    r"|no_gradient_accumulation_fusion|tp_comm_overlap_cfg|no_persist_layer_norm|overlap_moe_comm"
    r"|eval_(global|micro)_batch_size|no_bias_swiglu_fusion|(no_)?pad_vocab_size"
)
"""Finds names that change neither order, nor matching, nor layouts, although they seem to."""

_OTHER_BLOCKS = "blocks other than attention with an MLP or experts are not described"
_ENCODER = "models with an encoder are not described"
DECIDES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "hybrid_layer_pattern": _OTHER_BLOCKS,
        "hybrid_override_pattern": _OTHER_BLOCKS,
        "mtp_hybrid_override_pattern": _OTHER_BLOCKS,
        "hybrid_attention_ratio": _OTHER_BLOCKS,
        "hybrid_mlp_ratio": _OTHER_BLOCKS,
        "is_hybrid_model": _OTHER_BLOCKS,
        "spec": "the blocks of another specification are not described",
        "heterogeneous_layers_config_path": "blocks of different sizes are not described",
        "heterogeneous_layers_config_encoded_json": "blocks of different sizes are not described",
        "linear_attention_freq": "linear attention is not described",
        "experimental_attention_variant": "other attention is not described",
        "retro_add_retriever": "retrieval is not described",
        "encoder_num_layers": _ENCODER,
        "encoder_tensor_model_parallel_size": _ENCODER,
        "encoder_pipeline_model_parallel_size": _ENCODER,
        "pipeline_model_parallel_split_rank": _ENCODER,
        "decoder_seq_length": _ENCODER,
        "language_model_type": _ENCODER,
        "vision_model_type": _ENCODER,
        "vision_pretraining": _ENCODER,
        "freeze_LM": "frozen parts are not described",
        "freeze_ViT": "frozen parts are not described",
        "standalone_embedding_stage": "a stage of the embedding alone is not read",
        "first_pipeline_num_layers": "the cut of this old flag is not read",
        "last_pipeline_num_layers": "the cut of this old flag is not read",
        "model_parallel_size": "this name had another meaning in each version",
        "use_ring_exchange_p2p": "ring exchange is not described",
        "use_mp_args_from_checkpoint_args": "degrees that a checkpoint has are not read",
    }
)
"""Arguments that decide order, cut or blocks, and the reason why a plan does not have them: the verdict is open."""

_CONCERNS: Final = re.compile(
    r"parallel|pipeline|virtual|stage|micro-?batch|p2p|layout|shard|fsdp|moe|expert|recompute|checkpoint-activations"
    r"|mtp|offload"
)


def concerns_parallelism(flag: str) -> bool:
    """Return True if the name of an unknown flag contains a term of parallelism."""
    return _CONCERNS.search(flag) is not None
