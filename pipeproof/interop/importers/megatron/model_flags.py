"""Section ``model`` of a plan, from the flags of Megatron-LM."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm
from types import MappingProxyType
from typing import Final

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import KeyPath
from pipeproof.diagnostics.source import PlanFileError, SourceMap
from pipeproof.interop.importers.import_codes import UNREADABLE
from pipeproof.interop.importers.imported import Flags
from pipeproof.interop.importers.megatron.flag_values import FlagReader
from pipeproof.interop.importers.megatron.flags import PLAN_KEYS
from pipeproof.interop.importers.megatron.layer_frequency import MAX_ITEMS, FrequencyError, layer_pattern
from pipeproof.interop.importers.model_parts import LLAMA, NO_BIAS, NORM, POSITIONS, QK_NORM, QKV_BIAS
from pipeproof.interop.importers.model_sizes import read_model_config
from pipeproof.interop.importers.plan_builder import PlanBuilder

_ASSUMED_VOCABULARY = 32768
_DROPOUT: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"--attention-dropout": ("attention",), "--hidden-dropout": ("hidden", "embedding")}
)


class UnknownDepthError(PlanFileError):
    """A pipeline of an unknown number of blocks."""


def import_model(reader: FlagReader, *, tp: int, pp: int) -> None:
    """Set the keys of ``model``; values that Megatron-LM reads from a checkpoint or a tokenizer are assumed.

    Raises:
        PlanFileError: a value cannot be read.
    """
    plan = reader.plan
    plan.set(("model", "kind"), "gpt", "a training of Megatron-LM")
    config = _model_config(reader)
    _require_layers(reader, config, pp)
    hidden = _size(reader, config, "--hidden-size", 128 * lcm(32, tp))
    heads = _size(reader, config, "--num-attention-heads", lcm(max(hidden // 128, 1), tp))
    _size(reader, config, "--num-layers", 4)
    _size(reader, config, "--seq-length", lcm(4096, 2 * tp * plan.number("topology", "cp")))
    _ffn(reader, config, hidden)
    _vocabulary(reader, config, tp)
    if ("model", "compressed_attention") in config:
        _import_deepseek_v4(reader, config)
        return
    if reader.has("--multi-latent-attention"):
        _latent_attention(reader)
    else:
        _heads(reader, hidden, heads)
    untied = "--untie-embeddings-and-output-weights"
    tied = not reader.has(untied)
    plan.set(("model", "tied_embedding"), tied, f"no {untied}" if tied else untied, reader.location(untied))
    for flag, keys in _DROPOUT.items():
        probability = reader.real(flag)
        for key in keys:
            reader.take(flag, ("model", "dropout", key), 0.1 if probability is None else probability)
    if reader.has("--num-experts"):
        import_experts(reader)
    if reader.has("--enable-mhc-connections"):
        _streams(reader, pp)
    _import_parts(reader, config)


_OF_DEEPSEEK_V4: Final = (
    "--num-experts", "--moe-router-topk", "--moe-ffn-hidden-size", "--moe-router-score-function",
    "--moe-router-topk-scaling-factor", "--mtp-num-layers", "--q-lora-rank", "--qk-pos-emb-head-dim", "--v-head-dim",
    "--mhc-num-residual-streams", "--mhc-sinkhorn-iterations",
)  # fmt: skip
"""Flags of parts that a configuration of DeepSeek-V4 has."""
_KEYS_OF_DEEPSEEK_V4: Final[Mapping[str, KeyPath]] = MappingProxyType(
    {
        "--q-lora-rank": ("model", "compressed_attention", "q_lora_rank"),
        "--qk-pos-emb-head-dim": ("model", "compressed_attention", "qk_rope_head_dim"),
        "--v-head-dim": ("model", "head_size"),
    }
)
"""Those that have another key there than for other models."""


def _import_deepseek_v4(reader: FlagReader, config: PlanBuilder) -> None:
    """Set the whole model from its configuration; flags add missing values.

    Raises:
        PlanFileError: PP170, a flag of a part has another value, or is for another attention.
    """
    for flag in _OF_DEEPSEEK_V4:
        text, location = reader.text(flag), reader.location(flag)
        config_value = config.get(*_KEYS_OF_DEEPSEEK_V4.get(flag, PLAN_KEYS[flag]), default=0)
        is_number = text is not None and not isinstance(config_value, str)
        if location is not None and text is not None and (reader.real(flag) if is_number else text) != config_value:
            message = f"{flag} is {text}, and the model's configuration has {config_value}"
            reader.refuse(message, location, "remove the flag, or give the configuration of the trained model")
    for flag in ("--group-query-attention", "--kv-lora-rank"):
        if (location := reader.location(flag)) is not None:
            message = f"{flag} is not for the attention of DeepSeek-V4, which the model's configuration has"
            reader.refuse(message, location, "remove the flag")
    reader.plan.adopt(config)
    if reader.has("--num-experts"):
        import_experts(reader)
    for flag, keys in _DROPOUT.items():
        for key in keys if reader.real(flag) is not None else ():
            reader.take(flag, ("model", "dropout", key), reader.real(flag))


def _streams(reader: FlagReader, pp: int) -> None:
    """``--enable-mhc-connections``; with the conditions of ``TransformerConfig``.

    Raises:
        PlanFileError: PP171.
    """
    flag = "--enable-mhc-connections"
    conditions = (
        (pp > 1, "stages exchange one stream"),
        (bool(reader.number("--mtp-num-layers", at_least=0)), "it is given with --mtp-num-layers"),
        (reader.text("--recompute-granularity") == "full", "it is given with --recompute-granularity full"),
    )
    for is_refused, why in conditions:
        if is_refused:
            reader.megatron_refuses(f"{flag}: {why}", flag)
    for name, default in (("--mhc-num-residual-streams", 4), ("--mhc-sinkhorn-iterations", 20)):
        reader.put(name, reader.number(name) or default)
    why = "it divides by sums of rows before sums of columns, here after; sizes and work are the same"
    reader.plan.ignore(flag, why, reader.location(flag))


def _model_config(reader: FlagReader) -> PlanBuilder:
    """Read ``--model-config``, which gives sizes that no flag gives."""
    config = PlanBuilder("model config", Flags())
    if reader.plan.flags.model_config is not None:
        read_model_config(config, reader.plan.flags.model_config)
    return config


def _size(reader: FlagReader, config: PlanBuilder, flag: str, default: int) -> int:
    """Return a size from its flag, from the model's configuration, or assumed."""
    number, key = reader.number(flag), PLAN_KEYS[flag]
    if number is not None:
        reader.put(flag, number)
    elif key in config:
        reader.plan.set(key, config.get(*key), f"{key[-1]} of the model's configuration")
    else:
        reader.plan.assume(key, default, _why(reader, flag), reader.location(flag))
    return reader.plan.number(*map(str, key))


def _require_layers(reader: FlagReader, config: PlanBuilder, pp: int) -> None:
    """Refuse a pipeline of an unknown number of blocks: whether they divide, and how, decides the stages."""
    flag, key, arguments = "--num-layers", ("model", "num_layers"), reader.arguments
    setting = reader.setting(flag)
    if pp == 1 or key in reader.plan or key in config or (setting is not None and setting.value is not None):
        return
    name, origin = arguments.checkpoint or ("", None)
    why = f": {', '.join(arguments.unread)} is not next to it" if arguments.unread else ""
    why = f": the value of {flag} is {setting.why}" if setting is not None else why
    location = reader.location(flag) or origin or reader.location("--pipeline-model-parallel-size")
    message = f"the number of blocks {f'of `{name}` ' if name else ''}is not in the file, and decides the stages{why}"
    fix = "give it with `--set model.num_layers=N`, or `--model-config FILE`"
    finding = UNREADABLE.finding(message, location or Location(arguments.file), fix)
    raise UnknownDepthError(finding, source=SourceMap(arguments.file, arguments.lines))


def _why(reader: FlagReader, flag: str) -> str:
    setting = reader.setting(flag)
    return f"no {flag} is given" if setting is None else f"the value of {flag} is {setting.why}"


def _ffn(reader: FlagReader, config: PlanBuilder, hidden: int) -> None:
    default = hidden * 8 // 3 // 64 * 64 if reader.has("--swiglu") else 4 * hidden
    flag = "--ffn-hidden-size"
    if reader.has(flag) or ("model", "ffn_size") in config:
        _size(reader, config, flag, default)
    else:
        reader.plan.set(("model", "ffn_size"), default, f"no {flag}")


def _vocabulary(reader: FlagReader, config: PlanBuilder, tp: int) -> None:
    """Set the vocabulary, padded to a multiple of a number and tp as in Megatron-LM, and its unpadded size if known."""
    plan, key = reader.plan, ("model", "vocab_size")
    unpadded = "model", "unpadded_vocab_size"
    multiple = (reader.number("--make-vocab-size-divisible-by") or 128) * tp
    padded, size = reader.number("--padded-vocab-size"), reader.number("--vocab-size")
    if padded is not None:
        reader.take("--padded-vocab-size", key, padded)
    elif size is not None:
        reader.take("--vocab-size", key, -(-size // multiple) * multiple)
    elif key in config:
        of_config = int(config.get(*key))
        plan.set(key, -(-of_config // multiple) * multiple, "vocab_size of the model's configuration")
        if of_config % multiple:
            plan.set(unpadded, of_config, "vocab_size of the model's configuration")
    else:
        why = "the tokenizer has the size of the vocabulary"
        plan.assume(key, -(-_ASSUMED_VOCABULARY // multiple) * multiple, why, reader.location("--tokenizer-model"))
    if size is not None and (padded > size if padded is not None else size % multiple):
        reader.take("--vocab-size", unpadded, size)


def _heads(reader: FlagReader, hidden: int, heads: int) -> None:
    if reader.has("--group-query-attention"):
        reader.put("--num-query-groups", reader.number("--num-query-groups") or 1)
    channels = reader.number("--kv-channels")
    if channels is not None and channels * heads != hidden:
        reader.put("--kv-channels", channels)


def _latent_attention(reader: FlagReader) -> None:
    if reader.has("--q-lora-rank"):
        reader.put("--q-lora-rank", reader.number("--q-lora-rank"))
    defaults = {"--kv-lora-rank": 32, "--qk-head-dim": 128, "--qk-pos-emb-head-dim": 64, "--v-head-dim": 128}
    for flag, default in defaults.items():
        reader.put(flag, reader.number(flag) or default)


def import_experts(reader: FlagReader) -> None:
    """Set the keys of ``model.moe``.

    Raises:
        PlanFileError: a value cannot be read.
    """
    plan, flag = reader.plan, "--num-experts"
    location, experts = reader.location(flag), reader.number(flag, at_least=2)
    if experts is None:
        fewest = lcm(8, reader.number("--expert-model-parallel-size") or 1)
        plan.assume(PLAN_KEYS[flag], fewest, _why(reader, flag), location)
    else:
        reader.put(flag, experts)
    reader.put("--moe-router-topk", reader.number("--moe-router-topk") or 2)
    inner = reader.number("--moe-ffn-hidden-size") or plan.number("model", "ffn_size")
    reader.put("--moe-ffn-hidden-size", inner)
    flag = "--moe-shared-expert-intermediate-size"
    shared = reader.number(flag, at_least=0)
    if shared:
        reader.take(flag, ("model", "moe", "num_shared_experts"), max(round(shared / inner), 1))
        if shared % inner:
            why = f"shared experts have a multiple of the size of others, {inner}, here"
            plan.ignore(flag, why, reader.location(flag))
    _dense_layers(reader)
    dispatcher = dispatcher_of(reader)
    if dispatcher == "allgather":
        flag = "--moe-token-dispatcher-type"
        setting = reader.shown(flag) if reader.has(flag) else f"no {flag}: Megatron-LM gathers all tokens"
        plan.set(("model", "moe", "dispatcher"), "all_gather", setting, reader.location(flag))
    plan.set(("model", "moe", "combine"), "expert", "Megatron-LM sorts tokens by expert", location)
    dtype, flag = reader.text("--moe-router-dtype"), "--moe-router-dtype"
    if dtype is not None and dispatcher == "allgather":
        reader.ignore(flag, "gathered outputs of a router have the usual type here")
    elif dtype is not None:
        reader.take(flag, ("model", "moe", "router_dtype"), {"fp32": "float32", "fp64": "float64"}[dtype])
    score = reader.text("--moe-router-score-function") or "softmax"
    if score != "softmax":
        reader.put("--moe-router-score-function", score)
    for flag in ("--moe-aux-loss-coeff", "--moe-z-loss-coeff", "--moe-router-topk-scaling-factor"):
        factor = reader.real(flag)
        if factor is not None:
            reader.put(flag, factor)
    if reader.has("--moe-router-enable-expert-bias"):
        rate = reader.real("--moe-router-bias-update-rate")
        if rate is None or rate > 0:
            reader.take("--moe-router-enable-expert-bias", ("model", "moe", "expert_bias_rate"), rate or 1e-3)


def dispatcher_of(reader: FlagReader) -> str | None:
    """Return the dispatcher of tokens: the flag's, or Megatron-LM's default; None if it is not known.

    A script without --hidden-size has its model elsewhere, with a dispatcher of its own.
    """
    flag = "--moe-token-dispatcher-type"
    if reader.has(flag):
        return reader.text(flag)
    return "allgather" if reader.has("--num-experts") and reader.has("--hidden-size") else None


def _dense_layers(reader: FlagReader) -> None:
    """``--moe-layer-freq``: the blocks with experts; a plan has those after its first few blocks."""
    flag, num_layers = "--moe-layer-freq", reader.plan.number("model", "num_layers")
    setting, text = reader.setting(flag), reader.text(flag)
    if setting is None or text is None:
        return
    try:
        pattern = layer_pattern(text, min(num_layers, MAX_ITEMS))
    except FrequencyError as error:
        reader.refuse(f"{flag}: {error}", setting.value_location)
    if 1 not in pattern:
        reader.refuse(f"{flag} leaves no block for experts", setting.value_location, "remove --num-experts")
    first = pattern.index(1)
    if first:
        reader.take(flag, ("model", "moe", "dense_layers"), first)
    if 0 in pattern[first:]:
        why = f"{pattern[first:].count(0)} later blocks without experts have them here"
        reader.plan.ignore(reader.shown(flag), why, setting.location)


# --- parts ---


def _import_parts(reader: FlagReader, config: PlanBuilder) -> None:
    """Set the parts of the model that differ from a Llama's; sizes, experts and latent attention are set before.

    A script without --hidden-size has its model elsewhere: in another file, or in a checkpoint. Its missing flags mean
    nothing, and the parts are from ``config``, or assumed.
    """
    if not reader.has("--hidden-size"):
        for key, value in LLAMA.items():
            if ("model", key) in config:
                reader.plan.set(("model", key), config.get("model", key), f"{key} of the model's configuration")
            elif reader.plan.flags.model_config is None:
                reader.plan.assume(("model", key), value, "no --hidden-size is given: the model is not in this script")
        if config.get("model", "qk_norm"):
            reader.plan.set(("model", "qk_norm"), value=True, setting="the model's configuration")
        return
    is_latent, has_experts = ("model", "mla") in reader.plan, ("model", "moe") in reader.plan
    _norms(reader, is_latent=is_latent)
    _positions(reader, is_latent=is_latent)
    _activation(reader, has_experts=has_experts)
    _biases(reader, is_latent=is_latent, has_experts=has_experts)


def _norms(reader: FlagReader, *, is_latent: bool) -> None:
    norm = reader.text(NORM)
    if norm not in (None, "LayerNorm", "RMSNorm"):
        reader.megatron_refuses(f"{NORM} must be LayerNorm or RMSNorm, found `{norm}`", NORM)
    if norm == "LayerNorm" or not reader.has(NORM):
        _default(reader, "norm", "layer", NORM)
    if reader.has(QK_NORM) and not is_latent:  # the norms of latent attention are part of it here
        reader.take(QK_NORM, ("model", "qk_norm"), value=True)


def _positions(reader: FlagReader, *, is_latent: bool) -> None:
    plan, kind = reader.plan, reader.text(POSITIONS)
    old, without = "--use-rotary-position-embeddings", "--no-position-embedding"
    if reader.has(old) or (reader.has(POSITIONS) and kind is None) or kind in ("rope", "mrope", "yarn"):
        return
    if reader.has(without) or kind in ("none", "relative"):
        flag = without if kind is None else POSITIONS
        reader.ignore(flag, "queries and keys are rotated by their position here")
        return
    if is_latent or reader.number("--mtp-num-layers", at_least=0):
        part = "latent attention" if is_latent else "multi-token prediction"
        plan.ignore("learned positions", f"with {part}, positions are rotary here", reader.location(POSITIONS))
        return
    _default(reader, "positions", "learned", POSITIONS)
    flag = "--max-position-embeddings"
    rows, length = reader.number(flag), plan.number("model", "seq_length")
    if rows is not None and rows != length:
        reader.ignore(flag, f"the table has a row for each of {length} positions here")


def _activation(reader: FlagReader, *, has_experts: bool) -> None:
    """Set ``model.mlp``; Megatron-LM's fusion of bias and GELU, on by default, is the approximation with tanh."""
    if reader.has("--swiglu") or reader.has("--quick-geglu"):
        return
    if has_experts:
        why = "experts and MLPs are SwiGLU here: their weights are 1.5 times as many, all else is equal"
        reader.plan.ignore("experts without --swiglu", why)
        return
    relu = "--squared-relu"
    if reader.has(relu):
        reader.plan.ignore(relu, "the function is GELU here, all else is equal", reader.location(relu))
    is_fused = not reader.has(NO_BIAS) and not reader.has("--no-bias-gelu-fusion")
    is_tanh = (is_fused or reader.has("--openai-gelu")) and not reader.has(relu)
    flag = next((name for name in (relu, "--openai-gelu", "--no-bias-gelu-fusion") if reader.has(name)), "--swiglu")
    _default(reader, "mlp", "gelu_tanh" if is_tanh else "gelu", flag)


def _biases(reader: FlagReader, *, is_latent: bool, has_experts: bool) -> None:
    plan, on = reader.plan, not reader.has(NO_BIAS)
    if on and is_latent:
        plan.ignore(f"no {NO_BIAS}", "a model with latent attention has no biases here")
    elif on and has_experts:
        plan.ignore(f"no {NO_BIAS}", "with experts, only queries, keys and values have biases here")
        _default(reader, "biases", "qkv", NO_BIAS)
    elif on:
        _default(reader, "biases", "all", NO_BIAS)
    elif reader.has(QKV_BIAS) and not is_latent:
        reader.take(QKV_BIAS, ("model", "biases"), "qkv")


def _default(reader: FlagReader, key: str, value: str, flag: str) -> None:
    """Set a value that a flag has, or that Megatron-LM has without the flag."""
    setting = reader.shown(flag) if reader.has(flag) else f"no {flag}"
    reader.plan.set(("model", key), value, setting, reader.location(flag))
