"""MindSpeed and MindSpeed-LLM: Megatron-LM on Ascend, with schedules, cuts and identities of its own."""

import re
from typing import Final

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
