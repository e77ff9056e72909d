"""Compares PaddleFormers' losses with pipeproof's, for weights that ``reshard --names paddleformers`` wrote.

Needs PaddlePaddle and paddleformers 1.2.0, whose Python packages require numpy
below 2. Prints a line for each model; status 1 if a loss differs too much. Each
class is built on a CPU from the config.json that pipeproof writes, its
``state_dict()`` must have the file's names and shapes, and every tensor is set.

- Qwen2 and Qwen2-MoE have tensors that a plan's model lacks: biases of queries,
  keys and values, and one more shared expert. DeepSeek-V3's module has a bias of
  ``eh_proj``. These tensors are set to zero.
- Without such tensors, the class's own ``from_pretrained`` also reads the same
  weights from Hugging Face's names, and the bits must be equal.
- The classes of Qwen2, Qwen2-MoE and GLM are those with their own computation
  (``..Deprecated``). Their files import PaddleFleet, which has no package for
  CPUs: stubs replace the modules that these classes do not use.
  ``fuse_rms_norm`` is off, because its kernel is for GPUs.
- DeepSeek-V3's positions need a scaling factor: one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import paddle
import paddleformers
from paddleformers.utils.log import logger
from safetensors.numpy import load_file
from tried_models import MLA, MOE, SIGMOID, Array, Line, Trained, compare, cross_entropy, each

_BIASED = r"qkv_proj\.bias"


@dataclass(frozen=True, slots=True)
class LoadedClass:
    """Module and name of a class, the convention of its tensors, settings missing in config.json, zero tensors."""

    module: str
    name: str
    convention: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    zero: str | None = None


_LLAMA = LoadedClass("llama", "LlamaForCausalLM", "paddleformers-unfused")
_QWEN2 = LoadedClass("qwen2", "Qwen2ForCausalLMDeprecated", "paddleformers", zero=_BIASED)
_QWEN2_MOE = LoadedClass(
    "qwen2_moe",
    "Qwen2MoeForCausalLMDeprecated",
    "paddleformers",
    {
        "num_experts": MOE["num_experts"],
        "moe_intermediate_size": MOE["ffn_size"],
        "shared_expert_intermediate_size": 4,
        "norm_topk_prob": True,
    },
    rf"{_BIASED}|shared_expert",
)
_GLM = LoadedClass("glm4_moe", "Glm4MoeForCausalLMDeprecated", "paddleformers")
_DEEPSEEK = LoadedClass(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    "paddleformers-unfused",
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "factor": 1.0}},
)
_MODULE = replace(
    _DEEPSEEK, settings={**_DEEPSEEK.settings, "num_nextn_predict_layers": 1}, zero=r"eh_proj\.bias"
)  # fmt: skip

MODELS: Mapping[str, tuple[Mapping[str, Any], LoadedClass]] = {
    "dense": ({}, _LLAMA),
    "dense with grouped queries": ({"num_kv_heads": 3}, _LLAMA),
    "tied": ({"tied_embedding": True}, _LLAMA),
    "dense, fused": ({"num_kv_heads": 3}, _QWEN2),
    "dense, each head its own, fused": ({}, _QWEN2),
    "experts as Mixtral, fused": ({"num_kv_heads": 2, "moe": MOE}, _QWEN2_MOE),
    "experts with biases, fused": (
        {"num_kv_heads": 3, "moe": MOE | SIGMOID | {"dense_layers": 1, "num_shared_experts": 1}}, _GLM,
    ),
    "latent, dense": ({"mla": MLA | {"q_rank": 9}}, _DEEPSEEK),
    "latent, experts with biases": (
        {"mla": MLA | {"q_rank": 9}, "moe": MOE | SIGMOID | {"dense_layers": 1, "num_shared_experts": 1}}, _DEEPSEEK,
    ),
    "latent with a module": ({"mla": MLA | {"q_rank": 9}, "mtp": {"num_modules": 1}}, _MODULE),
}  # fmt: skip


def main() -> int:
    """Compare all models."""
    logger.set_level("ERROR")
    _install_stubs()
    print(f"PaddlePaddle {paddle.__version__}, PaddleFormers {paddleformers.__version__}")
    return compare("PaddleFormers", each({name: model for name, (model, _) in MODELS.items()}, "paddle", _tried))


def _install_stubs() -> None:
    """Install stubs of modules that the files of the classes import and the classes do not use."""
    provider = ModuleType("paddleformers.transformers.gpt_provider")
    provider.GPTModelProvider = type("GPTModelProvider", (), {"transform_rules": {}})  # type: ignore[attr-defined]
    kernels = ModuleType("paddlefleet_ops")
    kernels.is_deep_ep_available = lambda: False  # type: ignore[attr-defined]
    sys.modules |= {stub.__name__: stub for stub in (provider, kernels)}


def _tried(name: str, trained: Trained) -> Iterator[Line]:
    _, loaded_class = MODELS[name]
    kind = getattr(import_module(f"paddleformers.transformers.{loaded_class.module}.modeling"), loaded_class.name)
    directory = trained.named("huggingface", directory=True)
    named = load_file(trained.named(loaded_class.convention))
    network = kind(_config(kind, directory, loaded_class))
    zeros = _set(network, named, loaded_class)
    if not zeros:
        _check_from_pretrained(kind, directory, loaded_class, named)
    network.eval()

    def losses(tokens: Array, labels: Array) -> Array:
        with paddle.no_grad():
            found = network(paddle.to_tensor(tokens))
        logits = found[0] if isinstance(found, (tuple, list)) else found
        return cross_entropy(logits.numpy(), labels)

    shown = loaded_class.name.removesuffix("Deprecated").removesuffix("ForCausalLM")
    how = f"{zeros} zero" if zeros else "from_pretrained equal"
    loaded = f"{shown}: {len(named)} tensors, {how}"
    if not trained.module_losses:
        yield Line(name, loaded, trained.loss, trained.loss_by(losses))
        return
    for stream, ours in enumerate((trained.loss, *trained.module_losses)):
        theirs = trained.loss_by(partial(_of_stream, network, stream), stream)
        yield Line(name if stream == 0 else f"  its module {stream - 1}", loaded, ours, theirs)


def _of_stream(network: Any, stream: int, tokens: Array, labels: Array) -> Array:
    """Return the token losses of DeepSeek's main model or of an MTP module; each module reads one more token."""
    tokens = np.pad(tokens, ((0, 0), (0, network.config.num_nextn_predict_layers)))
    with paddle.no_grad():
        found = network.model(paddle.to_tensor(tokens), return_dict=True)
        hidden = found.last_hidden_state if stream == 0 else found.mtp_outputs[stream - 1]
        return cross_entropy(network.lm_head(hidden).numpy(), labels)


def _config(kind: Any, directory: Path, loaded_class: LoadedClass) -> Any:
    config = kind.config_class.from_pretrained(str(directory))
    for key, value in {"fuse_rms_norm": False, **loaded_class.settings}.items():
        setattr(config, key, value)
    return config


def _set(network: Any, named: Mapping[str, Array], loaded_class: LoadedClass) -> int:
    """Set every tensor of the network; return the number of zero tensors, which no plan's model has."""
    theirs = network.state_dict()
    extra = {name for name in theirs if loaded_class.zero is not None and re.search(loaded_class.zero, name)}
    if network.config.tie_word_embeddings:
        extra |= {"lm_head.weight"} & set(theirs)
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.items() if name not in extra}
    ours = {name: tensor.shape for name, tensor in named.items()}
    if shapes != ours:
        raise SystemExit(
            f"{loaded_class.name}: PaddleFormers and the file differ in {sorted(shapes.items() ^ ours.items())}"
        )
    for name, tensor in theirs.items():
        tied = name == "lm_head.weight" and name in extra
        value = named["model.embed_tokens.weight" if tied else name] if tied or name in named else None
        tensor.set_value(np.zeros(tensor.shape, "float32") if value is None else value)
    return len(extra - {"lm_head.weight"})


def _check_from_pretrained(kind: Any, directory: Path, loaded_class: LoadedClass, named: Mapping[str, Array]) -> None:
    """Require that ``from_pretrained`` with Hugging Face's names gives the bits of the convention's file."""
    network = kind.from_pretrained(str(directory), config=_config(kind, directory, loaded_class), dtype="float32")
    theirs = network.state_dict()
    wrong = [name for name, tensor in named.items() if not np.array_equal(theirs[name].numpy(), tensor)]
    if wrong:
        raise SystemExit(f"{loaded_class.name}: from_pretrained has other numbers in {wrong}")


if __name__ == "__main__":
    sys.exit(main())
