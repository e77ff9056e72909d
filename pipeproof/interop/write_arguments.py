"""Launch arguments of a plan, proved by importing them again.

Arguments whose import differs from the plan are not written: the error names the keys
without an argument of the framework.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from pipeproof.analysis.tune.tune_result import TuneRow
from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.interop.importers.check_imported import load_imported
from pipeproof.interop.importers.import_kinds import import_files
from pipeproof.interop.importers.imported import Flags
from pipeproof.interop.importers.megatron.flags import PLAN_KEYS
from pipeproof.interop.importers.model_parts import flags_of_parts, type_of_parts
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.plan import PlanSpec
from pipeproof.stages.describe.model_family import stage_layers
from pipeproof.state.names.config_names import named_values


def paddle_arguments(spec: PlanSpec) -> str:
    """The arguments as YAML; keys without a setting of the trainer are left out, which its import shows."""
    topology, schedule = spec.topology, spec.schedule
    replicas = topology.dp * topology.ep
    settings: dict[str, Any] = {
        **model_config(spec),
        "max_seq_len": spec.gpt.seq_length,
        "tensor_model_parallel_size": topology.tp,
        "pipeline_model_parallel_size": topology.pp,
        "context_parallel_size": topology.cp,
        "expert_model_parallel_size": topology.ep,
        "sharding_parallel_size": replicas if spec.memory.shard_optimizer == "dp" else 1,
        "data_parallel_size": 1 if spec.memory.shard_optimizer == "dp" else replicas,
        "hybrid_parallel_topo_order": "pp_first",
        "sequence_parallel": topology.sequence_parallel,
        "gradient_accumulation_steps": schedule.num_micro_batches,
        "per_device_train_batch_size": schedule.micro_batch_size,
        "bf16": True,
        "overlap_p2p_comm": True,
        "partial_send_recv": False,
    }
    if spec.memory.shard_optimizer == "dp":
        number = 1 + (spec.memory.shard_gradients == "dp") + (spec.memory.shard_weights == "dp")
        settings["sharding"] = f"stage{number if topology.pp == 1 else 1}"
    if spec.gpt.mtp is not None and spec.gpt.mtp.magic_send:
        settings["enable_mtp_magic_send"] = True
    if spec.memory.recompute == "full":
        settings["recompute_granularity"] = "full"
    if schedule.kind == "dualpipe_v":
        settings["use_dualpipev"] = True
    elif schedule.num_chunks > 1:
        settings["virtual_pipeline_model_parallel_size"] = schedule.num_chunks
        settings["best_unbalanced_scheduler"] = schedule.variant == "fleet_balanced"
    return yaml.safe_dump(settings, sort_keys=False)


_NOT_LAUNCHED = ("pipeproof", "cost", "suppress", "buffers")
"""Sections that a launch does not need."""

_NOT_IN_MEMORY = (
    "budget_gib", "overhead_gib", "dtype", "attention", "gradient_dtype", "optimizer_bytes", "optimizer_ranks",
    "offload_blocks", "product_inputs", "fragmentation", "sequence_parallel_activations",
)  # fmt: skip
"""Keys of ``memory`` that a simulation needs and a launch does not, or that no argument changes: Megatron-LM always
gathers sequence-parallel activations again."""


class NoArgumentsError(ValueError):
    """A framework has no arguments for some keys of a plan; the message has the keys."""


@dataclass(frozen=True)
class Launch:
    """The files that launch a plan, by name; the first one is the file to import."""

    kind: str
    files: Mapping[str, str]


def launch_of(spec: PlanSpec, framework: str, name: str) -> Launch:
    """The files that launch a plan; ``name`` begins their names. Importing them gives the same plan.

    Raises:
        NoArgumentsError: the framework has no arguments for a key of the plan.
    """
    if framework == "megatron":
        launch = Launch("megatron", {f"{name}.sh": megatron_script(spec)})
    elif framework == "torch":
        raise NoArgumentsError("`pipeproof.torch.Pipeline` trains by the plan itself")
    else:
        launch = Launch("paddleformers", {f"{name}.args.yaml": paddle_arguments(spec)})
    differing = [*differences(spec, imported_again(launch, spec.topology.num_ranks))]
    if differing:
        raise NoArgumentsError(f"no arguments of {launch.kind} give {', '.join(differing)}")
    return launch


def imported_again(launch: Launch, world_size: int) -> PlanSpec:
    """The plan that the importer reads from the files of a launch.

    Raises:
        NoArgumentsError: the importer refuses the files.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for name, text in launch.files.items():
            paths.append(Path(folder) / name)
            paths[-1].write_text(text, encoding="utf-8")
        try:
            return load_imported(import_files(launch.kind, paths[:1], Flags(world_size=world_size))).spec
        except BadPlanError as error:
            raise NoArgumentsError(f"{launch.kind} refuses it: {error.findings[0].message}") from error


def differences(spec: PlanSpec, other: PlanSpec) -> Iterator[str]:
    """Yield the keys in which two plans differ as launches, with both values; cuts are compared by their layers."""
    yield from _differing("", _launched(spec), _launched(other))


def _launched(spec: PlanSpec) -> dict[str, Any]:
    data = {key: value for key, value in spec.model_dump(mode="json").items() if key not in _NOT_LAUNCHED}
    data["memory"] = {key: value for key, value in data["memory"].items() if key not in _NOT_IN_MEMORY}
    if data["transport"]["connections"] == "per_pair":  # without a flag, Megatron-LM has it for interleaved stages
        data["transport"]["connections"] = "lazy"
    data["schedule"].pop("framework")  # only `tune` reads it
    data["stages"] = [list(names) for names in stage_layers(spec)]
    model = data["model"]
    (model["moe"] or {}).pop("combine", None)  # an order of sums, without a flag in any framework
    if model["dropout"] is None:
        model["dropout"] = {"embedding": 0.0, "attention": 0.0, "hidden": 0.0}
    return data


def _differing(path: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one | other:
            yield from _differing(f"{path}.{key}" if path else str(key), one.get(key), other.get(key))
    elif one != other:
        yield f"`{path}: {_short(one)}` (they give {_short(other)})"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def launch_of_row(row: TuneRow, framework: str) -> Launch:
    """The files that launch a row, whose names begin with its number.

    Raises:
        NoArgumentsError: the framework has no arguments for a key of the plan.
    """
    return launch_of(plan_from_dict(row.plan).spec, framework, f"{row.rank:02d}")


def plan_file(row: TuneRow) -> dict[str, str]:
    """The plan file of a row, by its name."""
    return {f"{row.rank:02d}.yaml": yaml.safe_dump(dict(row.plan), sort_keys=False)}


_MODERN = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "head_dim", "tie_word_embeddings", "num_nextn_predict_layers", "n_routed_experts", "num_experts_per_tok",
    "moe_intermediate_size", "n_shared_experts", "first_k_dense_replace", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
)  # fmt: skip
"""One name for each key of a plan's model."""


def model_config(spec: PlanSpec) -> dict[str, Any]:
    """The sizes, and a type of model that has the plan's norms, positions and biases; "llama" if there is none."""
    values = {name: value for name, value in named_values(spec.gpt, *_MODERN).items() if value not in (None, 0)}
    return {"model_type": type_of_parts(spec.gpt), **values}


# --- A shell script that starts Megatron-LM with the arguments of a plan ---


_LETTERS = {"embed": "E", "layer": "t", "mtp": "m", "head": "L"}
_RANKS_PER_NODE = 8


def megatron_script(spec: PlanSpec) -> str:
    """The script; keys without an argument of Megatron-LM are left out, which its import shows."""
    world = spec.topology.num_ranks
    per_node = min(world, _RANKS_PER_NODE)
    groups = (_model(spec), _parallelism(spec), _schedule(spec), _training(spec))
    lines = [" ".join(shlex.quote(word) for word in flag) for group in groups for flag in group]
    head = f"torchrun --nproc-per-node {per_node} --nnodes {world // per_node} pretrain_gpt.py"
    return "#!/bin/sh\n" + " \\\n    ".join([head, *lines]) + "\n"


def _model(spec: PlanSpec) -> Iterator[Sequence[str]]:
    model = spec.gpt
    yield from _given(
        spec, "--num-layers", "--hidden-size", "--num-attention-heads", "--ffn-hidden-size", "--seq-length"
    )
    yield "--max-position-embeddings", str(model.seq_length)
    if model.unpadded_vocab_size is None:
        yield "--vocab-size", str(model.vocab_size), "--make-vocab-size-divisible-by", "1"
    else:
        yield "--vocab-size", str(model.unpadded_vocab_size), "--padded-vocab-size", str(model.vocab_size)
    if model.num_kv_heads is not None:
        yield "--group-query-attention", "--num-query-groups", str(model.num_kv_heads)
    yield from _given(spec, "--kv-channels")
    if model.mla is not None:
        yield ("--multi-latent-attention",)
        yield from _given(
            spec, "--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim"
        )
    if not model.tied_embedding:
        yield ("--untie-embeddings-and-output-weights",)
    yield from flags_of_parts(model)
    dropout = model.dropout
    yield "--attention-dropout", f"{0.0 if dropout is None else dropout.attention:g}"
    yield "--hidden-dropout", f"{0.0 if dropout is None else dropout.hidden:g}"
    if model.moe is not None:
        yield from _experts(spec)
    if model.mtp is not None:
        yield from _given(spec, "--mtp-num-layers", "--mtp-loss-scaling-factor")


def _given(spec: PlanSpec, *flags: str) -> Iterator[Sequence[str]]:
    """Yield flags with the values of their keys; keys that are null are left out."""
    for flag in flags:
        value = reduce(getattr, map(str, PLAN_KEYS[flag]), spec)
        if value is not None:
            yield flag, f"{value:g}" if isinstance(value, float) else str(value)


def _experts(spec: PlanSpec) -> Iterator[Sequence[str]]:
    moe = spec.gpt.moe
    assert moe is not None
    yield from _given(spec, "--num-experts", "--moe-router-topk", "--moe-ffn-hidden-size")
    yield "--moe-token-dispatcher-type", {"all_to_all": "alltoall", "all_gather": "allgather"}[moe.dispatcher]
    if moe.num_shared_experts:
        yield "--moe-shared-expert-intermediate-size", str(moe.num_shared_experts * moe.ffn_size)
    if moe.dense_layers:
        yield "--moe-layer-freq", f"([0]*{moe.dense_layers}+[1]*{spec.gpt.num_layers - moe.dense_layers})"
    if moe.router_dtype is not None:
        yield "--moe-router-dtype", moe.router_dtype.replace("float", "fp")
    if moe.score != "softmax":
        yield from _given(spec, "--moe-router-score-function")
    if moe.routed_scale != 1.0:
        yield from _given(spec, "--moe-router-topk-scaling-factor")
    if moe.aux_loss:
        yield from _given(spec, "--moe-aux-loss-coeff")
    if moe.z_loss:
        yield from _given(spec, "--moe-z-loss-coeff")
    if moe.expert_bias_rate is not None:
        yield "--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", f"{moe.expert_bias_rate:g}"


def _parallelism(spec: PlanSpec) -> Iterator[Sequence[str]]:
    topology = spec.topology
    yield from _given(spec, "--tensor-model-parallel-size")
    if topology.sequence_parallel:
        yield ("--sequence-parallel",)
    yield from _given(spec, "--pipeline-model-parallel-size")
    if topology.cp > 1:
        yield from _given(spec, "--context-parallel-size")
    if topology.ep > 1:
        yield from _given(spec, "--expert-model-parallel-size")
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
        yield from _given(spec, "--num-virtual-stages-per-pipeline-rank")
    yield from _given(spec, "--microbatch-group-size-per-virtual-pipeline-stage", "--micro-batch-size")
    batch = topology.dp * topology.ep * schedule.num_micro_batches * schedule.micro_batch_size
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
