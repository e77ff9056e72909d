"""A table for each trainer on Megatron-Core: how to recognise its files, and the meaning of its own names."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

from pipeproof.interop.importers.imported import IgnoredSetting
from pipeproof.interop.importers.names import other_parts
from pipeproof.interop.importers.tools.job import BATCH, PP, Job
from pipeproof.interop.importers.tools.tool import Tool

# verl with its Megatron backend: overrides such as ``a.b.c=value`` (verl, commit b178a3c: verl/trainer/config).

_ACTOR, _ENGINE, _MTP = "actor_rollout_ref.actor.megatron", "engine", "actor_rollout_ref.model.mtp.enable"
_OVERRIDES: Final = ("override_transformer_config", "override_ddp_config", "override_mcore_model_config")
_OTHER_MODELS: Final = ("actor_rollout_ref.ref.megatron", "critic.megatron")
_LENGTHS: Final = (("data.max_length",), ("data.max_prompt_length", "data.max_response_length"))
_DEFAULT_LENGTH, _DEFAULT_BATCH = 512, 256
_AXES: Final = ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor")


def _adapt_verl(job: Job) -> None:
    tree, is_actor = job.tree, job.tree.has(_ACTOR)
    section = _ACTOR if is_actor else _ENGINE
    job.switch("--fp16" if tree.value(section, "dtype") == "float16" else "--bf16")
    for name in ("sequence_parallel", "use_distributed_optimizer"):
        if not tree.has(f"{section}.{name}"):
            job.switch(f"--{name.replace('_', '-')}")
    lengths = _LENGTHS[is_actor]
    if is_actor:
        actor = "actor_rollout_ref.actor"
        size, dynamic = f"{actor}.ppo_mini_batch_size", f"{actor}.use_dynamic_bsz"
        batch = job.product((size, _DEFAULT_BATCH), ("actor_rollout_ref.rollout.n", 1))
        job.world_size = job.product(("trainer.nnodes", 1), ("trainer.n_gpus_per_node", 8))
        job.take("--micro-batch-size", f"{actor}.ppo_micro_batch_size_per_gpu")
    else:
        size, dynamic = "data.train_batch_size", "data.use_dynamic_bsz"
        batch = job.product((size, _DEFAULT_BATCH))
        job.world_size = job.product(("launcher.nnodes", 1), ("launcher.nproc_per_node", None))
        job.take("--micro-batch-size", "data.micro_batch_size_per_gpu")
    token_counts = [tree.number(name, default=_DEFAULT_LENGTH * (3 - len(lengths))) for name in lengths]
    if None not in token_counts:
        job.default("--seq-length", sum(length or 0 for length in token_counts))
    if tree.value(dynamic) is True:
        why = "not the number of micro-batches: with `use_dynamic_bsz`, it depends on the lengths of the data"
        job.unknown(BATCH, why, job.place(dynamic))
    elif batch:
        job.default(BATCH, batch, job.place(size))
    if tree.value(_MTP) is True:
        job.open.append(IgnoredSetting(_MTP, "multi-token prediction is not read", job.place(_MTP)))
    for other in _OTHER_MODELS:
        pp = tree.get(other, PP[2:].replace("-", "_"))
        if pp is not None and pp.value != 1:
            job.notes.append((f"the pipeline of `{other}` is not checked", pp.location))


VERL: Final = Tool(
    name="verl", kind="verl", names="verl",
    entry=re.compile(
        r".*\bactor_rollout_ref\.actor\.megatron\.\w*parallel_size=|\S*verl[./]\S* .*\bengine\.\w*parallel_size="
    ),
    marks=(_ACTOR, *(f"{_ENGINE}.{axis}_parallel_size" for axis in _AXES)), adapt=_adapt_verl,
    sections=tuple(f"{top}.{below}".strip(".") for top in (_ACTOR, _ENGINE) for below in ("", *_OVERRIDES)),
    switches=("--variable-seq-lengths",),
    models=("actor_rollout_ref.model.path", "model.path"),
    without=re.compile(r"use_\w+|\w*offload|dist_checkpointing_\w+|vanilla_mbridge|forward_only|strategy|\w*dtype"),
)  # fmt: skip


# Megatron-Bridge: a ``ConfigContainer``, in its process or as YAML (commit 067f987: training/config.py).
#
# Bridge writes the YAML with each checkpoint, as ``run_config.yaml``.


def _adapt_bridge(job: Job) -> None:
    job.take("--seq-length", "dataset.sequence_length")
    job.take("--seq-length", "dataset.seq_length")
    if job.tree.value("model.share_embeddings_and_output_weights") is False:
        job.switch("--untie-embeddings-and-output-weights")
    provider = job.tree.get("model", "_target_")
    other = other_parts(str(provider.value)) if provider is not None else None
    if provider is not None and other is not None:
        job.open.append(IgnoredSetting("model._target_", other, provider.location))
    precision, fp16 = job.tree.value("mixed_precision"), job.tree.value("mixed_precision.fp16")
    job.switch("--fp16" if fp16 is True or (isinstance(precision, str) and "fp16" in precision) else "--bf16")


BRIDGE: Final = Tool(
    name="Megatron-Bridge",
    kind="megatron-bridge",
    names="bridge",
    marks=("ddp._target_", "model._target_"),
    sections=("model", "comm_overlap"),
    elsewhere=frozenset({"bf16", "fp16", "share_embeddings_and_output_weights", "seq_length"}),
    values=MappingProxyType(
        {
            "model.seq_length": "--seq-length",
            "train.global_batch_size": BATCH,
            "train.micro_batch_size": "--micro-batch-size",
            "ddp.use_distributed_optimizer": "--use-distributed-optimizer",
            "ddp.overlap_grad_reduce": "--overlap-grad-reduce",
            "ddp.overlap_param_gather": "--overlap-param-gather",
            "ddp.bucket_size": "--ddp-bucket-size",
        }
    ),
    decides=re.compile(r"(megatron_)?mimo_\w+|vision_\w+|freeze_\w+"),
    without=re.compile(r"\w+"),
    adapt=_adapt_bridge,
)

# Forks, whose scripts have the flags of Megatron-LM and their own: MindSpeed and MindSpeed-LLM, on Ascend, have
# schedules, cuts and identities of their own; Pai-Megatron-Patch tokenizers, data and optimizers. slime is
# reinforcement learning (commit 624b824: slime/utils/arguments.py): a step trains on the samples of a rollout, and all
# nodes of the actor train.

MINDSPEED: Final = Tool(
    name="MindSpeed",
    names="mindspeed",
    entry=re.compile(r"(^|/)(pretrain_deepseek4|posttrain_gpt)\.py$"),
    blocks=re.compile(r"mindspeed_llm\.tasks\.models\.spec\.(qwen3|deepseek|bailing|phi35_moe|plm)_spec"),
    unnormed_modules="as in MindSpeed-LLM, which moves the last norm behind the modules, and has one more for each "
    "module's head; with MindSpeed alone they read after the norm",
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


def _adapt_slime(job: Job) -> None:
    if job.tree.has("actor_num_nodes") or job.tree.has("actor_num_gpus_per_node"):
        job.world_size = job.product(("actor_num_nodes", 1), ("actor_num_gpus_per_node", 8))
    steps = job.tree.number("num_steps_per_rollout", default=0)
    samples = job.product((_SAMPLES[0], 0), (_SAMPLES[1], 1))
    if steps is None or (steps and samples is None):
        job.unknown(BATCH, "set by a rollout, which only a run determines", job.place("num_steps_per_rollout"))
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
    adapt=_adapt_slime,
)

FORKS: Final = (MINDSPEED, SLIME, PAI)
