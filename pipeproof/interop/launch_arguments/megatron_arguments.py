"""A shell script that starts Megatron-LM with the arguments of a plan."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from pipeproof.interop.importers.model_parts import flags_of_parts
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.model_family import stage_layers

_LETTERS = {"embed": "E", "layer": "t", "mtp": "m", "head": "L"}
_RANKS_PER_NODE = 8


def megatron_script(spec: PlanSpec) -> str:
    """The script; what Megatron-LM has no arguments for is left out, which its import shows."""
    world = spec.topology.num_ranks
    per_node = min(world, _RANKS_PER_NODE)
    groups = (_model(spec), _parallelism(spec), _schedule(spec), _training(spec))
    lines = [" ".join(shlex.quote(word) for word in flag) for group in groups for flag in group]
    head = f"torchrun --nproc-per-node {per_node} --nnodes {world // per_node} pretrain_gpt.py"
    return "#!/bin/sh\n" + " \\\n    ".join([head, *lines]) + "\n"


def _model(spec: PlanSpec) -> Iterator[Sequence[str]]:
    model = spec.gpt
    yield "--num-layers", str(model.num_layers)
    yield "--hidden-size", str(model.hidden_size)
    yield "--num-attention-heads", str(model.num_heads)
    yield "--ffn-hidden-size", str(model.ffn_size)
    yield "--seq-length", str(model.seq_length)
    yield "--max-position-embeddings", str(model.seq_length)
    if model.unpadded_vocab_size is None:
        yield "--vocab-size", str(model.vocab_size), "--make-vocab-size-divisible-by", "1"
    else:
        yield "--vocab-size", str(model.unpadded_vocab_size), "--padded-vocab-size", str(model.vocab_size)
    if model.num_kv_heads is not None:
        yield "--group-query-attention", "--num-query-groups", str(model.num_kv_heads)
    if model.head_size is not None:
        yield "--kv-channels", str(model.head_size)
    if model.mla is not None:
        yield from _latent_attention(spec)
    if not model.tied_embedding:
        yield ("--untie-embeddings-and-output-weights",)
    yield from flags_of_parts(model)
    dropout = model.dropout
    yield "--attention-dropout", f"{0.0 if dropout is None else dropout.attention:g}"
    yield "--hidden-dropout", f"{0.0 if dropout is None else dropout.hidden:g}"
    if model.moe is not None:
        yield from _experts(spec)
    if model.mtp is not None:
        yield "--mtp-num-layers", str(model.mtp.num_modules)
        yield "--mtp-loss-scaling-factor", f"{model.mtp.loss_weight:g}"


def _latent_attention(spec: PlanSpec) -> Iterator[Sequence[str]]:
    mla = spec.gpt.mla
    assert mla is not None
    yield ("--multi-latent-attention",)
    if mla.q_rank is not None:
        yield "--q-lora-rank", str(mla.q_rank)
    yield "--kv-lora-rank", str(mla.kv_rank)
    yield "--qk-head-dim", str(mla.nope_head_size)
    yield "--qk-pos-emb-head-dim", str(mla.rope_head_size)
    yield "--v-head-dim", str(mla.value_head_size)


def _experts(spec: PlanSpec) -> Iterator[Sequence[str]]:
    moe = spec.gpt.moe
    assert moe is not None
    yield "--num-experts", str(moe.num_experts)
    yield "--moe-router-topk", str(moe.top_k)
    yield "--moe-ffn-hidden-size", str(moe.ffn_size)
    yield "--moe-token-dispatcher-type", {"all_to_all": "alltoall", "all_gather": "allgather"}[moe.dispatcher]
    if moe.num_shared_experts:
        yield "--moe-shared-expert-intermediate-size", str(moe.num_shared_experts * moe.ffn_size)
    if moe.dense_layers:
        yield "--moe-layer-freq", f"([0]*{moe.dense_layers}+[1]*{spec.gpt.num_layers - moe.dense_layers})"
    if moe.score == "sigmoid":
        yield "--moe-router-score-function", "sigmoid"
    if moe.aux_loss:
        yield "--moe-aux-loss-coeff", f"{moe.aux_loss:g}"
    if moe.z_loss:
        yield "--moe-z-loss-coeff", f"{moe.z_loss:g}"
    if moe.expert_bias_rate is not None:
        yield "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", f"{moe.expert_bias_rate:g}"


def _parallelism(spec: PlanSpec) -> Iterator[Sequence[str]]:
    topology = spec.topology
    yield "--tensor-model-parallel-size", str(topology.tp)
    if topology.sequence_parallel:
        yield ("--sequence-parallel",)
    yield "--pipeline-model-parallel-size", str(topology.pp)
    if topology.cp > 1:
        yield "--context-parallel-size", str(topology.cp)
    if topology.ep > 1:
        yield "--expert-model-parallel-size", str(topology.ep)
        yield "--expert-tensor-parallel-size", str(topology.tp)
    if topology.order == ("tp", "cp", "pp", "ep", "dp"):
        yield ("--use-tp-pp-dp-mapping",)
    if spec.memory.shard_optimizer == "dp":
        yield ("--use-distributed-optimizer",)


def _schedule(spec: PlanSpec) -> Iterator[Sequence[str]]:
    schedule, topology = spec.schedule, spec.topology
    if spec.stages is not None and spec.num_stages > 1:
        yield "--pipeline-model-parallel-layout", layout_string(stage_layers(spec))
    elif schedule.num_chunks > 1:
        yield "--num-virtual-stages-per-pipeline-rank", str(schedule.num_chunks)
    if schedule.micro_batch_group_size is not None:
        yield "--microbatch-group-size-per-virtual-pipeline-stage", str(schedule.micro_batch_group_size)
    batch = topology.dp * topology.ep * schedule.num_micro_batches * schedule.micro_batch_size
    yield "--micro-batch-size", str(schedule.micro_batch_size)
    yield "--global-batch-size", str(batch)
    if schedule.reduce_gradients == "when_ready":
        yield ("--overlap-grad-reduce",)
    if schedule.overlap == "pairs":
        yield ("--overlap-moe-expert-parallel-comm",)
        yield ("--delay-wgrad-compute",)


def layout_string(stages: Sequence[Sequence[str]]) -> str:
    """The argument of ``--pipeline-model-parallel-layout`` for the layers of each stage; a norm is part of the loss."""
    texts = []
    for names in stages:
        letters = [_LETTERS[name.partition(".")[0]] for name in names if name != "norm"]
        blocks = letters.count("t")
        run = f"t*{blocks}" if blocks > 1 else "t" * blocks
        texts.append("".join(letters).replace("t" * blocks, run, 1) if blocks else "".join(letters))
    return "|".join(texts)


def _training(spec: PlanSpec) -> Iterator[Sequence[str]]:
    run, memory = spec.run, spec.memory
    if run.dtype in ("bfloat16", "float16"):
        yield ({"bfloat16": "--bf16", "float16": "--fp16"}[run.dtype],)
    yield "--clip-grad", f"{run.clip_norm or 0:g}"
    if spec.loss.normalization == "global_tokens":
        yield ("--calculate-per-token-loss",)
    if memory.recompute == "selective":
        yield "--recompute-granularity", "selective"
        if memory.recompute_modules != ("core_attn",):
            yield "--recompute-modules", *memory.recompute_modules
    elif memory.recompute == "full":
        yield "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"
    if memory.attention == "unfused":
        yield "--attention-backend", "unfused"
    if memory.cross_entropy == "fused":
        yield "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"
    elif memory.cross_entropy == "compiled":
        yield ("--cross-entropy-loss-fusion",)
