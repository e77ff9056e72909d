"""Parts of the model: norms, positions, activation, biases.

They come from a model's configuration, by its ``model_type``, or from the flags of Megatron-LM. Its defaults are those
of GPT-3: LayerNorm, learned positions, an MLP with GELU, and a bias in every product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.problems import KeyPath
from pipeproof.interop.importers.draft import Draft, count
from pipeproof.specs.model import ModelSpec

_GPT = {"norm": "layer", "positions": "learned", "biases": "all"}
_PARTS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "gpt": _GPT,  # PaddleNLP's GPT-3
        "gpt2": _GPT,
        "qwen2": {"biases": "qkv"},
        "qwen2_moe": {"biases": "qkv"},
        "qwen3": {"qk_norm": True},
        "qwen3_moe": {"qk_norm": True},
        "stablelm": {"norm": "layer"},
        "starcoder2": {"norm": "layer"},
    }
)
"""Values that follow from the type alone, in Hugging Face's and Paddle's libraries; other types have a Llama's."""

_TANH = frozenset({"gelu_new", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_fast"})

PART_NAMES = (
    "model_type", "activation_function", "hidden_act", "use_qk_norm", "use_bias", "attention_bias", "use_qkv_bias",
    "mlp_bias", "mlp_only_layers",
)  # fmt: skip
"""Names that a configuration has for parts."""

_TYPE, _NORM, _QK = "--position-embedding-type", "--normalization", "--qk-layernorm"
_NO_BIAS, _QKV_BIAS = "--disable-bias-linear", "--add-qkv-bias"
PART_SETTINGS: Mapping[str, str] = MappingProxyType({"qk_layernorm": _QK})
"""Attributes of Megatron-Core's configuration that switch a part, and their flags."""
PART_NEGATED: Mapping[str, str] = MappingProxyType(
    {
        "add_bias_linear": _NO_BIAS,
        "bias_gelu_fusion": "--no-bias-gelu-fusion",
        "add_position_embedding": "--no-position-embedding",
    }
)
"""Arguments of Megatron-LM for parts that are true by default, and the flags that make them false."""
PART_SWITCHES = (
    "--swiglu", "--quick-geglu", "--squared-relu", "--openai-gelu", "--no-bias-gelu-fusion", _QK,
    "--use-rotary-position-embeddings", "--no-position-embedding", _NO_BIAS, _QKV_BIAS,
)  # fmt: skip
"""Flags of Megatron-LM for parts that have no value."""
PART_FLAGS = (*PART_SWITCHES, _NORM, _TYPE, "--max-position-embeddings")
"""Flags of Megatron-LM for parts."""

_LLAMA = {"norm": "rms", "positions": "rotary", "mlp": "swiglu", "biases": "none"}


def flags_of_parts(model: ModelSpec) -> Iterator[Sequence[str]]:
    """Yield the arguments of Megatron-LM for the parts of a model."""
    yield _NORM, {"rms": "RMSNorm", "layer": "LayerNorm"}[model.norm]
    if model.qk_norm:
        yield (_QK,)
    yield _TYPE, {"rotary": "rope", "learned": "learned_absolute"}[model.positions]
    yield from {"swiglu": [("--swiglu",)], "gelu_tanh": [("--openai-gelu",)], "gelu": [("--no-bias-gelu-fusion",)]}[
        model.mlp
    ]
    if model.biases != "all":
        yield (_NO_BIAS,)
    if model.biases == "qkv":
        yield (_QKV_BIAS,)


def type_of_parts(model: ModelSpec) -> str:
    """Return a ``model_type`` whose models have these norms, positions and biases; "llama" without one."""
    has_experts = model.moe is not None
    if model.norm == "layer":
        return "gpt" if model.positions == "learned" else "stablelm"
    if model.qk_norm:
        return "qwen3_moe" if has_experts else "qwen3"
    if model.biases == "qkv":
        return "qwen2_moe" if has_experts else "qwen2"
    return "deepseek_v3" if model.mla is not None else "llama"


def take_parts(draft: Draft, values: Mapping[str, tuple[Any, Location | None]]) -> None:
    """Set the parts that a configuration's type and switches name; the sizes are set before."""
    kind, location = values.get("model_type", ("", None))
    take_parts_of_type(draft, str(kind), f"model_type {kind}", location)
    if kind in ("gpt", "gpt2") and "tie_word_embeddings" not in values:
        draft.set(("model", "tied_embedding"), value=True, setting=f"model_type {kind}", location=location)
    if kind == "gpt2" and ("model", "hidden_size") in draft:
        draft.set(("model", "ffn_size"), 4 * count(draft, "model", "hidden_size"), f"model_type {kind}", location)
    if kind in ("gpt", "gpt2", "starcoder2"):
        name = "activation_function" if "activation_function" in values else "hidden_act"
        _take_activation(draft, str(kind), name, *values.get(name, ("gelu_new", location)))
    dense, location = values.get("mlp_only_layers", (None, None))
    if dense and isinstance(dense, list) and dense == list(range(len(dense))):
        draft.set(("model", "moe", "dense_layers"), len(dense), "mlp_only_layers", location)
    elif dense:
        draft.ignore("mlp_only_layers", "all blocks after the first few have experts here", location)
    _take_switches(draft, str(kind), {name: location for name, (value, location) in values.items() if value is True})


def take_parts_of_type(draft: Draft, kind: str, setting: str, location: Location | None) -> None:
    """Set the parts that a ``setting`` with the type of the model implies."""
    for key, value in _PARTS.get(kind, {}).items():
        draft.set(("model", key), value, setting, location)


def _take_activation(draft: Draft, kind: str, name: str, activation: object, location: Location | None) -> None:
    exact = activation == "gelu" and kind != "gpt"  # PaddleNLP's `gelu` is the approximation
    draft.set(("model", "mlp"), "gelu" if exact else "gelu_tanh", name, location)
    if activation != "gelu" and str(activation) not in _TANH:
        draft.ignore(name, f"MLPs without a gate have GELU here, and not {activation}", location)


def _take_switches(draft: Draft, kind: str, switches: Mapping[str, Location | None]) -> None:
    is_latent = ("model", "mla") in draft
    if "use_qk_norm" in switches and is_latent:
        draft.ignore("use_qk_norm", "latent attention has norms of its own", switches["use_qk_norm"])
    elif "use_qk_norm" in switches:
        draft.set(("model", "qk_norm"), value=True, setting="use_qk_norm", location=switches["use_qk_norm"])
    name = next((name for name in ("use_bias", "attention_bias", "use_qkv_bias", "mlp_bias") if name in switches), "")
    biases: str | None = "all" if name == "use_bias" or {"attention_bias", "mlp_bias"} <= switches.keys() else "qkv"
    if is_latent or name == "mlp_bias":
        biases = None
    elif ("model", "moe") in draft:
        biases = "qkv"
    if name and biases is not None:
        draft.set(("model", "biases"), biases, name, switches[name])
    if name and biases != "all" and name != "use_qkv_bias" and kind != "glm4_moe":
        described = "those of queries, keys and values" if biases == "qkv" else "none"
        draft.ignore(name, f"of these biases, {described} can be described here", switches[name])


class PartFlags(Protocol):
    """The methods of ``FlagReader`` that parts need."""

    draft: Draft

    def has(self, flag: str) -> bool:
        """Return True if the flag is in the script."""
        ...

    def location(self, flag: str) -> Location | None:
        """Return the location of a flag."""
        ...

    def shown(self, flag: str) -> str:
        """Return the flag with its value, for messages."""
        ...

    def text(self, flag: str) -> str | None:
        """Return the value of a flag."""
        ...

    def number(self, flag: str, *, at_least: int = 1) -> int | None:
        """Return the value as an integer."""
        ...

    def take(self, flag: str, key: KeyPath, value: object) -> None:
        """Set a plan value from the flag."""
        ...

    def megatron_refuses(self, message: str, flag: str, help: str | None = None) -> NoReturn:
        """End the import because Megatron-LM would refuse the settings."""
        ...


def import_flags_of_parts(reader: PartFlags, config: Draft) -> None:
    """Set the parts of the model that differ from a Llama's; sizes, experts and latent attention are set before.

    A script without --hidden-size has its model elsewhere: in another file, or in a checkpoint. Its missing flags mean
    nothing, and the parts are those of ``config``, or assumed.

    Raises:
        PlanFileError: PP170 or PP171, a value cannot be read, or Megatron-LM refuses it.
    """
    if not reader.has("--hidden-size"):
        for key, value in _LLAMA.items():
            if ("model", key) in config:
                reader.draft.set(("model", key), config.get("model", key), f"{key} of the model's configuration")
            elif reader.draft.flags.model_config is None:
                reader.draft.assume(("model", key), value, "no --hidden-size is given: the model is not in this script")
        if config.get("model", "qk_norm"):
            reader.draft.set(("model", "qk_norm"), value=True, setting="the model's configuration")
        return
    is_latent, has_experts = ("model", "mla") in reader.draft, ("model", "moe") in reader.draft
    _norms(reader, is_latent=is_latent)
    _positions(reader, is_latent=is_latent)
    _activation(reader, has_experts=has_experts)
    _biases(reader, is_latent=is_latent, has_experts=has_experts)


def _norms(reader: PartFlags, *, is_latent: bool) -> None:
    norm = reader.text(_NORM)
    if norm not in (None, "LayerNorm", "RMSNorm"):
        reader.megatron_refuses(f"{_NORM} must be LayerNorm or RMSNorm, found `{norm}`", _NORM)
    if norm == "LayerNorm" or not reader.has(_NORM):
        _default(reader, "norm", "layer", _NORM)
    if reader.has(_QK) and not is_latent:  # the norms of latent attention are part of it here
        reader.take(_QK, ("model", "qk_norm"), value=True)


def _positions(reader: PartFlags, *, is_latent: bool) -> None:
    draft, kind = reader.draft, reader.text(_TYPE)
    old, without = "--use-rotary-position-embeddings", "--no-position-embedding"
    if reader.has(old) or (reader.has(_TYPE) and kind is None) or kind in ("rope", "mrope", "yarn"):
        return
    if reader.has(without) or kind in ("none", "relative"):
        flag = without if kind is None else _TYPE
        draft.ignore(reader.shown(flag), "queries and keys are rotated by their position here", reader.location(flag))
        return
    if is_latent or reader.number("--mtp-num-layers", at_least=0):
        part = "latent attention" if is_latent else "multi-token prediction"
        draft.ignore("learned positions", f"with {part}, positions are rotary here", reader.location(_TYPE))
        return
    _default(reader, "positions", "learned", _TYPE)
    flag = "--max-position-embeddings"
    rows, length = reader.number(flag), count(draft, "model", "seq_length")
    if rows is not None and rows != length:
        draft.ignore(
            reader.shown(flag), f"the table has a row for each of {length} positions here", reader.location(flag)
        )


def _activation(reader: PartFlags, *, has_experts: bool) -> None:
    """Set ``model.mlp``; Megatron-LM's fusion of bias and GELU, on by default, is the approximation with tanh."""
    if reader.has("--swiglu") or reader.has("--quick-geglu"):
        return
    if has_experts:
        reader.draft.ignore(
            "experts without --swiglu",
            "experts and MLPs are SwiGLU here: their weights are 1.5 times as many, all else is equal",
        )
        return
    relu = "--squared-relu"
    if reader.has(relu):
        reader.draft.ignore(relu, "the function is GELU here, all else is equal", reader.location(relu))
    is_fused = not reader.has(_NO_BIAS) and not reader.has("--no-bias-gelu-fusion")
    is_tanh = (is_fused or reader.has("--openai-gelu")) and not reader.has(relu)
    flag = next((name for name in (relu, "--openai-gelu", "--no-bias-gelu-fusion") if reader.has(name)), "--swiglu")
    _default(reader, "mlp", "gelu_tanh" if is_tanh else "gelu", flag)


def _biases(reader: PartFlags, *, is_latent: bool, has_experts: bool) -> None:
    draft, on = reader.draft, not reader.has(_NO_BIAS)
    if on and is_latent:
        draft.ignore(f"no {_NO_BIAS}", "a model with latent attention has no biases here")
    elif on and has_experts:
        draft.ignore(f"no {_NO_BIAS}", "with experts, only queries, keys and values have biases here")
        _default(reader, "biases", "qkv", _NO_BIAS)
    elif on:
        _default(reader, "biases", "all", _NO_BIAS)
    elif reader.has(_QKV_BIAS) and not is_latent:
        reader.take(_QKV_BIAS, ("model", "biases"), "qkv")


def _default(reader: PartFlags, key: str, value: str, flag: str) -> None:
    """Set a value that a flag has, or that Megatron-LM has without the flag."""
    setting = reader.shown(flag) if reader.has(flag) else f"no {flag}"
    reader.draft.set(("model", key), value, setting, reader.location(flag))
