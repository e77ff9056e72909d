"""The section ``model`` from the flags of Megatron-LM."""

from __future__ import annotations

import re

from pipeproof.interop.counts import count
from pipeproof.interop.draft import Draft
from pipeproof.interop.imported import Flags
from pipeproof.interop.megatron.given import Given
from pipeproof.interop.model_sizes import read_model_config

_ASSUMED_VOCABULARY = 32768
_FREQUENCY = re.compile(r"\(?\[0\]\*(\d+)\+\[1\]\*(\d+)\)?", re.ASCII)


def import_model(given: Given, *, tp: int, pp: int) -> None:
    """Set the keys of ``model``; what Megatron-LM takes from a checkpoint or a tokenizer is assumed.

    Raises:
        PlanFileError: a value cannot be read.
    """
    draft = given.draft
    draft.set(("model", "kind"), "gpt", "a training of Megatron-LM")
    config = _model_config(given)
    hidden = _size(given, config, "--hidden-size", "hidden_size", 4096)
    heads = _size(given, config, "--num-attention-heads", "num_heads", max(hidden // 128, 1))
    _size(given, config, "--num-layers", "num_layers", 4 * pp)
    _size(given, config, "--seq-length", "seq_length", 4096)
    _ffn(given, config, hidden)
    _vocabulary(given, config, tp)
    if given.has("--multi-latent-attention"):
        _latent_attention(given)
    else:
        _heads(given, hidden, heads)
    tied = not given.has("--untie-embeddings-and-output-weights")
    untied = "--untie-embeddings-and-output-weights"
    draft.set(("model", "tied_embedding"), tied, f"no {untied}" if tied else untied, given.place(untied))
    for flag, keys in (("--attention-dropout", ("attention",)), ("--hidden-dropout", ("hidden", "embedding"))):
        share = given.real(flag)
        for key in keys:
            draft.set(("model", "dropout", key), 0.1 if share is None else share, given.shown(flag), given.place(flag))
    if not given.has("--swiglu") and not given.has("--quick-geglu"):
        draft.ignore(
            "an MLP without --swiglu", "blocks have a SwiGLU MLP here: half more weights in it, all else alike"
        )
    if given.has("--num-experts"):
        import_experts(given)


def _model_config(given: Given) -> Draft:
    """What ``--model-config`` says, which fills in what no flag gives."""
    config = Draft("model config", Flags())
    if given.draft.flags.model_config is not None:
        read_model_config(config, given.draft.flags.model_config)
    return config


def _size(given: Given, config: Draft, flag: str, key: str, otherwise: int) -> int:
    """A size from its flag, from the model's configuration, or assumed."""
    number = given.number(flag)
    if number is not None:
        given.take(flag, ("model", key), number)
    elif ("model", key) in config:
        given.draft.set(("model", key), config.get("model", key), f"{key} of the model's configuration")
    else:
        given.draft.assume(("model", key), otherwise, _why(given, flag), given.place(flag))
    return count(given.draft, "model", key)


def _why(given: Given, flag: str) -> str:
    setting = given.setting(flag)
    return f"no {flag} is given" if setting is None else f"the value of {flag} is {setting.why}"


def _ffn(given: Given, config: Draft, hidden: int) -> None:
    default = hidden * 8 // 3 // 64 * 64 if given.has("--swiglu") else 4 * hidden
    flag = "--ffn-hidden-size"
    if given.has(flag) or ("model", "ffn_size") in config:
        _size(given, config, flag, "ffn_size", default)
    else:
        given.draft.set(("model", "ffn_size"), default, f"no {flag}")


def _vocabulary(given: Given, config: Draft, tp: int) -> None:
    """Megatron-LM pads the vocabulary to a multiple of a number and tp; the plan says how large it was, where known."""
    draft, key = given.draft, ("model", "vocab_size")
    unpadded = "model", "unpadded_vocab_size"
    multiple = (given.number("--make-vocab-size-divisible-by") or 128) * tp
    padded, size = given.number("--padded-vocab-size"), given.number("--vocab-size")
    if padded is not None:
        given.take("--padded-vocab-size", key, padded)
    elif size is not None:
        given.take("--vocab-size", key, -(-size // multiple) * multiple)
    elif key in config:
        of_config = int(config.get(*key))
        draft.set(key, -(-of_config // multiple) * multiple, "vocab_size of the model's configuration")
        if of_config % multiple:
            draft.set(unpadded, of_config, "vocab_size of the model's configuration")
    else:
        why = "the tokenizer has the size of the vocabulary"
        draft.assume(key, -(-_ASSUMED_VOCABULARY // multiple) * multiple, why, given.place("--tokenizer-model"))
    if size is not None and (padded > size if padded is not None else size % multiple):
        given.take("--vocab-size", unpadded, size)


def _heads(given: Given, hidden: int, heads: int) -> None:
    if given.has("--group-query-attention"):
        groups = given.number("--num-query-groups")
        given.take("--num-query-groups", ("model", "num_kv_heads"), 1 if groups is None else groups)
    channels = given.number("--kv-channels")
    if channels is not None and channels * heads != hidden:
        given.take("--kv-channels", ("model", "head_size"), channels)


def _latent_attention(given: Given) -> None:
    if given.has("--q-lora-rank"):
        given.take("--q-lora-rank", ("model", "mla", "q_rank"), given.number("--q-lora-rank"))
    for flag, key, otherwise in (
        ("--kv-lora-rank", "kv_rank", 32),
        ("--qk-head-dim", "nope_head_size", 128),
        ("--qk-pos-emb-head-dim", "rope_head_size", 64),
        ("--v-head-dim", "value_head_size", 128),
    ):
        given.take(flag, ("model", "mla", key), given.number(flag) or otherwise)


def import_experts(given: Given) -> None:
    """Set the keys of ``model.moe``.

    Raises:
        PlanFileError: a value cannot be read.
    """
    draft = given.draft
    experts = given.number("--num-experts", at_least=2)
    if experts is None:
        given.draft.assume(
            ("model", "moe", "num_experts"), 8, _why(given, "--num-experts"), given.place("--num-experts")
        )
    else:
        given.take("--num-experts", ("model", "moe", "num_experts"), experts)
    given.take("--moe-router-topk", ("model", "moe", "top_k"), given.number("--moe-router-topk") or 2)
    size = given.number("--moe-ffn-hidden-size")
    inner = count(draft, "model", "ffn_size") if size is None else size
    given.take("--moe-ffn-hidden-size", ("model", "moe", "ffn_size"), inner)
    shared = given.number("--moe-shared-expert-intermediate-size", at_least=0)
    if shared:
        given.take(
            "--moe-shared-expert-intermediate-size",
            ("model", "moe", "num_shared_experts"),
            max(round(shared / inner), 1),
        )
        if shared % inner:
            why = f"shared experts have a multiple of the size of others, {inner}, here"
            flag = "--moe-shared-expert-intermediate-size"
            draft.ignore(flag, why, given.place(flag))
    _dense_layers(given)
    if (given.text("--moe-router-score-function") or "softmax") == "sigmoid":
        given.take("--moe-router-score-function", ("model", "moe", "score"), "sigmoid")
    for flag, key in (("--moe-aux-loss-coeff", "aux_loss"), ("--moe-z-loss-coeff", "z_loss")):
        factor = given.real(flag)
        if factor is not None:
            given.take(flag, ("model", "moe", key), factor)
    if given.has("--moe-router-enable-expert-bias"):
        rate = given.real("--moe-router-bias-update-rate")
        if rate is None or rate > 0:
            given.take("--moe-router-enable-expert-bias", ("model", "moe", "expert_bias_rate"), rate or 1e-3)


def _dense_layers(given: Given) -> None:
    """``--moe-layer-freq``: 1, or a list that begins with dense layers; other patterns are not described."""
    flag = "--moe-layer-freq"
    text = given.text(flag)
    if text is None or text == "1":
        return
    match = _FREQUENCY.fullmatch(text.replace(" ", ""))
    if match is not None:
        given.take(flag, ("model", "moe", "dense_layers"), int(match.group(1)))
    else:
        given.draft.ignore(flag, "all blocks behind the first few have experts here", given.place(flag))
