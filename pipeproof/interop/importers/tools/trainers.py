"""A table for each trainer on Megatron-Core: how its files are known, and what its own names mean."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pipeproof.diagnostics.source import read_text
from pipeproof.interop.importers.imported import IgnoredSetting
from pipeproof.interop.importers.tools.job import BATCH, PP, Job
from pipeproof.interop.importers.tools.tool import Tool
from pipeproof.interop.importers.tree import Tree, read_tree

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
    known = [tree.number(name, default=_DEFAULT_LENGTH * (3 - len(lengths))) for name in lengths]
    if None not in known:
        job.default("--seq-length", sum(length or 0 for length in known))
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
    name="verl", kind="verl", names="verl", form="overrides",
    entry=re.compile(
        r".*\bactor_rollout_ref\.actor\.megatron\.\w*parallel_size=|\S*verl[./]\S* .*\bengine\.\w*parallel_size="
    ),
    marks=(_ACTOR, *(f"{_ENGINE}.{axis}_parallel_size" for axis in _AXES)), adapt=_adapt_verl,
    sections=tuple(f"{top}.{below}".strip(".") for top in (_ACTOR, _ENGINE) for below in ("", *_OVERRIDES)),
    switches=("--variable-seq-lengths",),
    models=("actor_rollout_ref.model.path", "model.path"),
    without=re.compile(r"use_\w+|\w*offload|dist_checkpointing_\w+|vanilla_mbridge|forward_only|strategy|\w*dtype"),
)  # fmt: skip


# ms-swift's Megatron trainer: ``megatron sft``, ``pt`` and ``rlhf`` (commit 3602360: megatron_args.py), and YAML.


def _adapt_ms_swift(job: Job) -> None:
    recompute = job.tree.get("recompute_granularity") or job.tree.get("train.recompute_granularity")
    if recompute is not None and recompute.value == "none":
        job.flags.pop("--recompute-granularity", None)
    else:
        job.default("--recompute-granularity", "selective")
    for name, flag in (("use_distributed_optimizer", "--use-distributed-optimizer"),
                       ("padding_free", "--variable-seq-lengths")):  # fmt: skip
        placed = job.tree.get(name) or job.tree.get("train", name)
        if placed is None or placed.value is not False:
            job.switch(flag)
    if "--fp16" not in job.flags:
        job.switch("--bf16")
    job.world_size = job.tree.number("train.gpus") or job.product(
        ("environment.NNODES", 1), ("environment.NPROC_PER_NODE", 1)
    )


MS_SWIFT: Final = Tool(
    name="ms-swift",
    kind="ms-swift",
    names="ms_swift",
    entry=re.compile(r"\S*\bmegatron (sft|pt|rlhf) |\S*cli/_megatron/(sft|pt|rlhf)\.py "),
    marks=("micro_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "train.gpus", "model"),
    sections=("", "train"),
    elsewhere=frozenset({"gpus"}),
    renamed=MappingProxyType({"max_length": "seq_length"}),
    defaults=MappingProxyType(
        {
            "--micro-batch-size": 1,
            "--global-batch-size": 16,
            "--attention-backend": "flash",
            "--expert-tensor-parallel-size": 1,
        }
    ),
    models=("model", "train.model", "mcore_model", "load"),
    without=re.compile(
        r"\w*(vllm|lora|offload|dataset|dataloader|streaming|packing|router|tuner|freeze|vit)\w*|deepspeed"
    ),
    adapt=_adapt_ms_swift,
)


# Tools on ROLL's mcore_adapter: LLaMA-Factory's YAML (commit ff6d4d1), and ROLL's ``megatron_train`` (8eb27cc).


def _accumulate(job: Job) -> None:
    job.accumulate("per_device_train_batch_size", "gradient_accumulation_steps", default_size=8)


LLAMA_FACTORY: Final = Tool(
    name="LLaMA-Factory",
    kind="llama-factory",
    names="llama_factory",
    entry=re.compile(r"\S*llamafactory-cli train "),
    form="file",
    marks=("finetuning_type", "cutoff_len"),
    renamed=MappingProxyType({"cutoff_len": "seq_length"}),
    models=("model_name_or_path",),
    decides=re.compile(r"additional_configs|extra_config|mixture_of_depths|use_mca|pure_bf16_pp"),
    without=re.compile(r"(?!additional_configs|extra_config)\w+"),
    adapt=_accumulate,
)


_ROLL: Final = "actor_train"
_ROLL_ARGUMENTS: Final = f"{_ROLL}.training_args"
_DEVICES: Final = re.compile(r"list\(range\((?:(\d{1,6}),\s*)?(\d{1,6})\)\)")


def _train_actor(job: Job) -> None:
    strategy = job.tree.get(_ROLL, "strategy_args.strategy_name")
    if strategy is None or strategy.value != "megatron_train":
        job.refuse(f"`{_ROLL}.strategy_args.strategy_name` is not megatron_train: the actor trains without a pipeline",
                   job.place(f"{_ROLL}.strategy_args.strategy_name"))  # fmt: skip
    job.accumulate(f"{_ROLL_ARGUMENTS}.per_device_train_batch_size", f"{_ROLL_ARGUMENTS}.gradient_accumulation_steps")
    lengths = [job.tree.number(name) for name in ("prompt_length", "response_length")]
    if None not in lengths:
        job.default("--seq-length", sum(length or 0 for length in lengths))
    devices = job.tree.value(_ROLL, "device_mapping")
    match = _DEVICES.fullmatch(str(devices).strip())
    if match is not None:
        job.world_size = int(match[2]) - int(match[1] or 0)
    elif isinstance(devices, list):
        job.world_size = len(devices)
    job.switch("--bf16", "--variable-seq-lengths")


ROLL: Final = Tool(
    name="ROLL",
    kind="roll",
    names="llama_factory",
    marks=(f"{_ROLL}.strategy_args",),
    sections=(f"{_ROLL}.strategy_args.strategy_config",),
    models=(f"{_ROLL}.model_args.model_name_or_path", "pretrain"),
    decides=re.compile(r"additional_configs"),
    without=re.compile(r"(?!additional_configs)\w*(moe|offload|recompute|dtype|batch|expert|checkpoint)\w*"),
    adapt=_train_actor,
)


# NeMo-RL: the training of the policy on Megatron-Core (commit 7ea279a: nemo_rl/models/megatron/setup.py).
#
# The processes that train are those of ``cluster`` without the nodes that generate, the reward model's and the
# teachers' (nemo_rl/algorithms/grpo.py).

_RESOURCES: Final = "policy.generation.colocated.resources"
_TEACHERS: Final = "on_policy_distillation.non_colocated_teachers"


def training_processes(job: Job) -> int | None:
    """Return the processes that train the policy; None if the file does not have their number.

    Raises:
        PlanFileError: PP170, no node is left for the training.
    """
    tree = job.tree
    nodes, gpus = tree.number("cluster.num_nodes"), tree.number("cluster.gpus_per_node")
    if nodes is None or gpus is None:
        return None
    reward = _reward_model(tree)
    if nodes > 1:
        nodes -= reward[0]
    else:
        gpus -= reward[1]
    nodes -= _teacher_nodes(tree)
    if tree.value("policy.generation.colocated.enabled") is False:
        if nodes == 1:
            gpus -= tree.number(_RESOURCES, "gpus_per_node") or 0
        else:
            nodes -= tree.number(_RESOURCES, "num_nodes") or 0
    if nodes < 1 or gpus < 1:
        job.refuse(
            f"no process is left for training: {max(nodes, 0)} nodes with {max(gpus, 0)} GPUs after those that "
            "generate and score", job.place("cluster.num_nodes"), "raise `cluster.num_nodes`, or give `--world-size N`",
        )  # fmt: skip
    return nodes * gpus


def _reward_model(tree: Tree) -> tuple[int, int]:
    """Return the nodes, and the GPUs of a node, of a reward model that is an environment of the data."""
    names = [tree.value("data", part, "env_name") for part in ("", "train", "default", "validation")]
    resources = "env.reward_model.resources"
    if "reward_model" not in names:
        return 0, 0
    return tree.number(resources, "num_nodes") or 0, tree.number(resources, "gpus_per_node") or 0


def _teacher_nodes(tree: Tree) -> int:
    """Return the nodes of teachers that do not share those of the policy; one checkpoint is one teacher."""
    if tree.value(_TEACHERS, "enabled") is not True:
        return 0
    named = tree.section("on_policy_distillation.teacher_model_by_agent_name")
    teachers = {model.value: alias for alias, model in named.items()}
    default = tree.number(_TEACHERS, "default_teacher_cfg.num_nodes", default=1)
    own = (
        tree.number(_TEACHERS, "teacher_overrides", alias, "num_nodes", default=default) for alias in teachers.values()
    )
    return sum(number or 1 for number in own)


_MEGATRON: Final = "policy.megatron_cfg"
_RECOMPUTE: Final = ("recompute_granularity", "recompute_modules")


def _adapt_nemo_rl(job: Job) -> None:
    tree = job.tree
    enabled, place = tree.get(_MEGATRON, "enabled"), job.place(f"{_MEGATRON}.enabled")
    if enabled is None or enabled.value is not True:
        job.refuse(f"`{_MEGATRON}.enabled` is not true: the policy trains without a pipeline", place)
    if tree.value(_MEGATRON, "activation_checkpointing") is True:
        job.read(_MEGATRON, values={key: v for key, v in tree.section(_MEGATRON).items() if key in _RECOMPUTE})
        job.default("--recompute-granularity", "full", job.place(f"{_MEGATRON}.activation_checkpointing"))
    for name in ("sequence_packing", "dynamic_batching"):
        if tree.value("policy", name, "enabled") is True:
            why = f"not the number of micro-batches: with `policy.{name}`, they depend on the data"
            job.unknown(BATCH, why, job.place(f"policy.{name}.enabled"))
    half = {"bfloat16": "--bf16", "float16": "--fp16"}.get(str(tree.value("policy", "precision")))
    job.switch(*([half] if half else []), "--calculate-per-token-loss")
    for name in ("value", "teacher"):
        pp = tree.get(name, "megatron_cfg.pipeline_model_parallel_size")
        if pp is not None and pp.value != 1 and tree.value(name, "megatron_cfg.enabled") is True:
            job.notes.append((f"the pipeline of `{name}` ({pp.value} ranks) is not checked", pp.location))
    if tree.value(_MEGATRON, "peft.enabled") is True:
        job.notes.append(("adapters are not described: all weights train here", job.place(f"{_MEGATRON}.peft.enabled")))
    job.world_size = training_processes(job)


NEMO_RL: Final = Tool(
    name="NeMo-RL", kind="nemo-rl", names="nemo_rl", marks=(_MEGATRON,),
    sections=(_MEGATRON, f"{_MEGATRON}.model_overrides"),
    elsewhere=frozenset({"enabled", "activation_checkpointing", *_RECOMPUTE}),
    values=MappingProxyType(
        {
            "policy.train_global_batch_size": BATCH,
            "policy.train_micro_batch_size": "--micro-batch-size",
            "policy.max_total_sequence_length": "--seq-length",
            f"{_MEGATRON}.optimizer.use_distributed_optimizer": "--use-distributed-optimizer",
            f"{_MEGATRON}.optimizer.clip_grad": "--clip-grad",
            f"{_MEGATRON}.distributed_data_parallel_config.overlap_grad_reduce": "--overlap-grad-reduce",
        }
    ),
    models=("policy.model_name",),
    without=re.compile(r"\w*(router|offload|checkpoint|dtype|empty_unused)\w*"),
    adapt=_adapt_nemo_rl,
)  # fmt: skip


# FlagScale: YAML of an experiment, and of its task with nested arguments (commit da4935e: examples/*/conf).

_FLAGSCALE_PARTS: Final = ("system", "model", "data")
_FLAGSCALE_ENTRY: Final = re.compile(r"^ +entrypoint: (\S+)", re.MULTILINE)
_FLAGSCALE_OTHERS: Final = re.compile(r"train_(?!gpt\b|aquila\b)\w+")


def _programs(job: Job) -> Iterator[str]:
    """Yield the program of the experiment; of a task alone, those of the experiments in the directory above."""
    program = job.tree.get("experiment.task.entrypoint")
    if program is not None:
        yield str(program.value)
        return
    file = Path(job.tree.source.file).resolve()
    for experiment in sorted(file.parents[1].glob("*.yaml")) if len(file.parents) > 1 else ():
        match = _FLAGSCALE_ENTRY.search(read_text(str(experiment)))
        if match is not None:
            yield match[1]


def _adapt_flagscale(job: Job) -> None:
    match = _FLAGSCALE_OTHERS.search(" ".join(_programs(job)))
    if match is not None:
        job.refuse(
            f"`{match[0]}.py` trains another model than GPT, which is not described",
            job.place("experiment.task.entrypoint"),
        )
    if any(job.tree.has(f"{section}.peft_type") for section in FLAGSCALE.sections):
        job.notes.append(("adapters are not described: all weights train here", job.top))
    if job.tree.has("experiment.auto_tuner"):
        job.notes.append(("the auto-tuner changes these settings", job.top))


FLAGSCALE: Final = Tool(
    name="FlagScale",
    kind="flagscale",
    names="flagscale",
    marks=("experiment.task", "system.precision", "system.checkpoint", "train.system"),
    sections=tuple(f"{top}{part}" for top in ("", "train.") for part in _FLAGSCALE_PARTS),
    is_nested=True,
    ranks=(("experiment.runner.nnodes", None), ("experiment.runner.nproc_per_node", None)),
    decides=re.compile(r"use_dualpipev|moe_fb_overlap|(enable_)?hetero\w*|\w*_per_process_mesh|standalone_embedding_stage"
                       r"|extra_model_\w+|\w*vision\w*|freeze_vit|freeze_ViT"),
    without=re.compile(r"(?!use_dualpipev|moe_fb_overlap|\w*hetero|\w*mesh|extra_model|\w*vision|freeze_[vV]i[tT])\w+"),
    adapt=_adapt_flagscale,
)  # fmt: skip


# Primus with Megatron-LM: the overrides of an experiment over its model (commit fd1eeab: primus/configs).

_PRIMUS: Final = "modules.pre_trainer"
_PRIMUS_MODELS: Final = "primus/configs/models/megatron"


def _adapt_primus(job: Job) -> None:
    framework = job.tree.get(_PRIMUS, "framework")
    if framework is None or framework.value != "megatron":
        job.refuse(
            f"`{_PRIMUS}.framework` is not megatron, whose pipelines are read", job.place(f"{_PRIMUS}.framework")
        )
    model = job.tree.get(_PRIMUS, "model")
    name = str(model.value) if model is not None else ""
    above = Path(job.tree.source.file).resolve().parents
    file = (
        next((found for folder in above if (found := folder / _PRIMUS_MODELS / name).is_file()), None) if name else None
    )
    if file is not None:
        own = dict(job.flags)
        job.read("", values=read_tree(file).section())
        job.flags.update(own)
    elif "--num-layers" not in job.flags:
        job.unread = (f"{_PRIMUS_MODELS}/{name}",)
    job.switch("--bf16")


PRIMUS: Final = Tool(
    name="Primus",
    kind="primus",
    names="primus",
    marks=("modules.pre_trainer", "modules.post_trainer"),
    sections=(f"{_PRIMUS}.overrides",),
    decides=re.compile(
        r"patch_zero_bubble|enable_zero_bubble|zero_bubble\w*|pp_algorithm|patch_primus_pipeline|\w*pipeline_(schedule|algo)\w*"
        r"|pp_max_mem|offload_\w*pipeline|dump_pp_data_schedule|decoder_pipeline_manual_split_list"
    ),
    without=re.compile(
        r"\w*(turbo|log|sink|stderr|profile|wandb|ckpt|router|recompute_layer_ids|fsdp|moe|trainable)\w*"
    ),
    adapt=_adapt_primus,
)


# Megatron-Bridge: a ``ConfigContainer``, in its process or as YAML (commit 067f987: training/config.py).
#
# Bridge writes the YAML with each checkpoint, as ``run_config.yaml``.


def _adapt_bridge(job: Job) -> None:
    job.take("--seq-length", "dataset.sequence_length")
    job.take("--seq-length", "dataset.seq_length")
    if job.tree.value("model.share_embeddings_and_output_weights") is False:
        job.switch("--untie-embeddings-and-output-weights")
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
    adapt=_adapt_slime,
)

FORKS: Final = (MINDSPEED, SLIME, PAI)
