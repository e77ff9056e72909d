"""Holds PaddleFormers' losses against pipeproof's, from weights that ``reshard --names paddleformers`` wrote.

Needs PaddlePaddle and paddleformers 1.2.0, whose Python packages want numpy
below 2; a line for each model, status 1 if one is too far off. Each class is
built on a CPU from the config.json that pipeproof writes, its ``state_dict()``
must have the file's names and shapes, and every tensor is set.

- Qwen2 and Qwen2-MoE have tensors besides, which a plan's model has not: biases
  of queries, keys and values, and one more shared expert. So has DeepSeek-V3's
  module: a bias of ``eh_proj``. They are zero here.
- Where a class has no such tensors, its own ``from_pretrained`` reads the same
  weights from Hugging Face's names, too, and must come to the same bits.
- The classes of Qwen2, Qwen2-MoE and GLM are those that compute by themselves
  (``..Deprecated``). The files that they stand in import PaddleFleet, of which
  there is no package for CPUs: stand-ins take the place of what these classes
  do not use. ``fuse_rms_norm`` is off, since its kernel is for GPUs.
- DeepSeek-V3's positions ask for a factor by which they are stretched: one.
"""  # noqa: INP001 - a directory of scripts, not a package

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
class Way:
    """Where a class stands, the convention of its tensors, what config.json does not say, what is zero."""

    module: str
    name: str
    convention: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    zero: str | None = None


_LLAMA = Way("llama", "LlamaForCausalLM", "paddleformers-unfused")
_QWEN2 = Way("qwen2", "Qwen2ForCausalLMDeprecated", "paddleformers", zero=_BIASED)
_QWEN2_MOE = Way(
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
_GLM = Way("glm4_moe", "Glm4MoeForCausalLMDeprecated", "paddleformers")
_DEEPSEEK = Way(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    "paddleformers-unfused",
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "factor": 1.0}},
)
_MODULE = replace(
    _DEEPSEEK, settings={**_DEEPSEEK.settings, "num_nextn_predict_layers": 1}, zero=r"eh_proj\.bias"
)  # fmt: skip

MODELS: Mapping[str, tuple[Mapping[str, Any], Way]] = {
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
    """Try all models."""
    logger.set_level("ERROR")
    _stand_in()
    print(f"PaddlePaddle {paddle.__version__}, PaddleFormers {paddleformers.__version__}")  # noqa: T201
    return compare("PaddleFormers", each({name: model for name, (model, _) in MODELS.items()}, "paddle", _tried))


def _stand_in() -> None:
    """Modules that are imported by files of the classes, and not used by these."""
    provider = ModuleType("paddleformers.transformers.gpt_provider")
    provider.GPTModelProvider = type("GPTModelProvider", (), {"transform_rules": {}})  # type: ignore[attr-defined]
    kernels = ModuleType("paddlefleet_ops")
    kernels.is_deep_ep_available = lambda: False  # type: ignore[attr-defined]
    sys.modules |= {stand_in.__name__: stand_in for stand_in in (provider, kernels)}


def _tried(name: str, trained: Trained) -> Iterator[Line]:
    _, way = MODELS[name]
    kind = getattr(import_module(f"paddleformers.transformers.{way.module}.modeling"), way.name)
    directory = trained.named("huggingface", directory=True)
    named = load_file(trained.named(way.convention))
    network = kind(_config(kind, directory, way))
    zeros = _set(network, named, way)
    if not zeros:
        _read_by_itself(kind, directory, way, named)
    network.eval()

    def losses(tokens: Array, labels: Array) -> Array:
        with paddle.no_grad():
            found = network(paddle.to_tensor(tokens))
        logits = found[0] if isinstance(found, (tuple, list)) else found
        return cross_entropy(logits.numpy(), labels)

    shown = way.name.removesuffix("Deprecated").removesuffix("ForCausalLM")
    how = f"{zeros} zero" if zeros else "from_pretrained equal"
    loaded = f"{shown}: {len(named)} tensors, {how}"
    if not trained.module_losses:
        yield Line(name, loaded, trained.loss, trained.loss_by(losses))
        return
    for lane, ours in enumerate((trained.loss, *trained.module_losses)):
        theirs = trained.loss_by(partial(_of_lane, network, lane), lane)
        yield Line(name if lane == 0 else f"  its module {lane - 1}", loaded, ours, theirs)


def _of_lane(network: Any, lane: int, tokens: Array, labels: Array) -> Array:
    """DeepSeek's main model, or a module of it: of these each reads one token more, and they are given besides."""
    tokens = np.pad(tokens, ((0, 0), (0, network.config.num_nextn_predict_layers)))
    with paddle.no_grad():
        found = network.model(paddle.to_tensor(tokens), return_dict=True)
        hidden = found.last_hidden_state if lane == 0 else found.mtp_outputs[lane - 1]
        return cross_entropy(network.lm_head(hidden).numpy(), labels)


def _config(kind: Any, directory: Path, way: Way) -> Any:
    config = kind.config_class.from_pretrained(str(directory))
    for key, value in {"fuse_rms_norm": False, **way.settings}.items():
        setattr(config, key, value)
    return config


def _set(network: Any, named: Mapping[str, Array], way: Way) -> int:
    """Set every tensor of the network, and say how many are zero, since no plan's model has them."""
    theirs = network.state_dict()
    beside = {name for name in theirs if way.zero is not None and re.search(way.zero, name)}
    if network.config.tie_word_embeddings:
        beside |= {"lm_head.weight"} & set(theirs)
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.items() if name not in beside}
    ours = {name: tensor.shape for name, tensor in named.items()}
    if shapes != ours:
        raise SystemExit(f"{way.name}: PaddleFormers and the file differ in {sorted(shapes.items() ^ ours.items())}")
    for name, tensor in theirs.items():
        tied = name == "lm_head.weight" and name in beside
        value = named["model.embed_tokens.weight" if tied else name] if tied or name in named else None
        tensor.set_value(np.zeros(tensor.shape, "float32") if value is None else value)
    return len(beside - {"lm_head.weight"})


def _read_by_itself(kind: Any, directory: Path, way: Way, named: Mapping[str, Array]) -> None:
    """Its own reading of the same weights, under Hugging Face's names, has the bits of the convention's file."""
    network = kind.from_pretrained(str(directory), config=_config(kind, directory, way), dtype="float32")
    theirs = network.state_dict()
    wrong = [name for name, tensor in named.items() if not np.array_equal(theirs[name].numpy(), tensor)]
    if wrong:
        raise SystemExit(f"{way.name}: from_pretrained has other numbers in {wrong}")


if __name__ == "__main__":
    sys.exit(main())
