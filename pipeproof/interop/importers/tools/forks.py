"""Tools whose scripts have the flags of Megatron-LM and their own.

MindSpeed and MindSpeed-LLM, on Ascend, have schedules, cuts and identities of their own; Pai-Megatron-Patch tokenizers,
data and optimizers. slime is reinforcement learning (commit 624b824: slime/utils/arguments.py): a step trains on the
samples of a rollout, and all nodes of the actor train.
"""

from __future__ import annotations

import re
from typing import Final

from pipeproof.interop.importers.tools.job import BATCH, Job
from pipeproof.interop.importers.tools.tool import Tool

MINDSPEED: Final = Tool(
    name="MindSpeed",
    names="mindspeed",
    entry=re.compile(r"(^|/)(pretrain_deepseek4|posttrain_gpt)\.py$"),
    blocks=re.compile(r"mindspeed_llm\.tasks\.models\.spec\.(qwen3|deepseek|bailing|phi35_moe|plm)_spec"),
    decides=re.compile(
        r"schedules_method|noop_layers|num_layer_list|pp_schedule_list|automated_pipeline(_perf)?|optimized_mbs_\w+"
        r"|mbs_idx|use_nanopipe\w*|use_multiparameter_pipeline_model_parallel|moe_fb_overlap|dualpipev_\w+|tp_2d|tp_[xy]"
        r"|layerwise_disaggregated_training|pipeline_num_transformer_layers|optimize(_vpp)?_send_recv_comm|layerzero\w*"
        r"|enable_zero3|num_zero_experts|n_hash_layers|enable_dsa_indexer|recompute_in_(bubble|advance)|mtp_spec"
        r"|expert_interval|moe_model_type|embed_layernorm|fsdp2_config_path"
    ),
    without=re.compile(
        r"moe_\w*(overlap_comm|mc2|drop|padding|sinkhorn|extend_ep|memory\w*|optim\w*|aux_loss_coeff|topk|async_comm)"
        r"|moe_(intermediate_size|train_capacity_factor|adaptive_recompute\w*|fb_\w+)|n_shared_experts"
        r"|context_parallel_\w+|use_cp_\w+|adaptive_\w+|coc_\w+|ampipe_\w+|\w*overlap_(ag|matmul)_with_\w+"
        r"|(swap|smart_swap|recompute|mla|balanced_moe|print_expert|\w*expert_placement)_?\w*|pipe_experts_\w+"
        r"|enable_recompute_layers_per_pp_rank|use_pipe_experts|use_fused_moe_\w+|virtual_optimizer|input_layernorm_\w+"
        r"|save_layer_by_layer|stage|inference_\w+|shared_expert_gate\w*|no_post_layer_norm|output_layer_slice_num"
        r"|add_output_layer_bias|\w*batch_size|index_share_\w+|mtp_mem_\w+|lu_lora_\w+|shuffle_minibatch|local_worker_num"
        r"|trans_hot_expert_group_num|worker_num|join|log_dir|cluster_time_out|bind_core|attention_mask_on_cpu"
    ),
)


PAI: Final = Tool(
    name="Pai-Megatron-Patch",
    names="pai",
    decides=re.compile(r"transformer_type|moe_layer_\w+|\w*expert_interval"),
    without=re.compile(
        r"(optimizer|\w*)offload\w*|train_mode|\w*batch_size|\w*recompute\w*|n_shared_experts|moe_\w+|num_fewshot"
    ),
)


_SAMPLES: Final = ("rollout_batch_size", "n_samples_per_prompt")


def _adapt(job: Job) -> None:
    if job.tree.has("actor_num_nodes") or job.tree.has("actor_num_gpus_per_node"):
        job.world_size = job.product(("actor_num_nodes", 1), ("actor_num_gpus_per_node", 8))
    steps = job.tree.number("num_steps_per_rollout", default=0)
    samples = job.product((_SAMPLES[0], 0), (_SAMPLES[1], 1))
    if steps is None or (steps and samples is None):
        job.unknown(BATCH, "that of a rollout, which only a run determines", job.place("num_steps_per_rollout"))
    elif steps and samples:
        job.flags.pop(BATCH, None)
        job.default(BATCH, samples // steps, job.place(*_SAMPLES))
    if job.tree.has("use_dynamic_batch_size"):
        why = "not the number of micro-batches: with --use-dynamic-batch-size, it depends on the lengths of the data"
        job.unknown(BATCH, why, job.place("use_dynamic_batch_size"))
    job.switch("--use-distributed-optimizer", "--variable-seq-lengths")
    if "--fp16" not in job.flags:
        job.switch("--bf16")
    if "--num-experts" in job.flags:
        job.default("--moe-token-dispatcher-type", "alltoall")
    job.default("--seq-length", 4096)
    job.public_depth("hf_checkpoint")


SLIME: Final = Tool(
    name="slime",
    names="slime",
    entry=re.compile(r"(^|/)train(_async)?\.py$"),
    decides=re.compile(r"megatron_config_path|custom_megatron_\w+|custom_model_provider_path|spec|train_backend"),
    without=re.compile(
        r"(no_)?sglang_\w+|rollout_\w+|actor_\w+|critic_\w+|ref_\w+|over_sampling_\w+|(no_)?offload_\w+|\w*batch_size"
        r"|use_dynamic_batch_size|(log_probs_)?max_tokens_per_gpu|micro_\w+|\w*_path|\w*layernorm\w*|mtp_\w*|\w*routing\w*"
        r"|only_train_params_\w+|freeze_\w+|enable_mtp_training|num_gpus\w*"
    ),
    adapt=_adapt,
)

FORKS: Final = (MINDSPEED, SLIME, PAI)
