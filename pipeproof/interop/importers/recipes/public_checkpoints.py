"""Numbers of blocks of public checkpoints, by their names on Hugging Face, for recipes that name a checkpoint only.

Each number was compared with a second source: model definitions of torchtitan (b5bcd76), Megatron-Bridge (067f987) and
gemma_pytorch (014acb7), documentation of Megatron-Bridge and Automodel (36044ad), launch scripts of slime (624b824),
Pai-Megatron-Patch (a098ca5) and Megatron-LM (d98e8a6), the pull requests 5884 and 4604 of Megatron-Bridge, the card of
a cut of Kimi-K2.5, and of ERNIE a catalogue of models. Multimodal models have the number of their text part. Other
sizes change times and bytes alone, and ``--model-config`` supplies them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

NUM_LAYERS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "allenai/OLMoE-1B-7B": 16,
        "baidu/ERNIE-4.5-21B-A3B": 28,
        "baidu/ERNIE-4.5-300B-A47B": 54,
        "baidu/ERNIE-4.5-VL-28B-A3B": 28,
        "baidu/ERNIE-4.5-VL-424B-A47B": 54,
        "deepseek-ai/DeepSeek-V2": 60,
        "deepseek-ai/DeepSeek-V2-Lite": 27,
        "deepseek-ai/DeepSeek-V3": 61,
        "deepseek-ai/DeepSeek-V4-Flash": 43,
        "google/gemma-2-27b": 46,
        "google/gemma-2-2b": 26,
        "google/gemma-2-9b": 42,
        "meta-llama/Llama-2-7b": 32,
        "meta-llama/Llama-3.1-405B": 126,
        "meta-llama/Llama-3.1-70B": 80,
        "meta-llama/Llama-3.1-8B": 32,
        "meta-llama/Llama-3.2-1B": 16,
        "meta-llama/Llama-3.2-3B": 28,
        "meta-llama/Llama-3.3-70B": 80,
        "meta-llama/Meta-Llama-3-70B": 80,
        "meta-llama/Meta-Llama-3-8B": 32,
        "meta-llama/Meta-Llama-3.1-405B": 126,
        "meta-llama/Meta-Llama-3.1-70B": 80,
        "meta-llama/Meta-Llama-3.1-8B": 32,
        "MiniMaxAI/MiniMax-M3": 60,
        "mistralai/Mixtral-8x7B-v0.1": 32,
        "moonshotai/Kimi-K2": 61,
        "moonshotai/Kimi-K2.5": 61,
        "moonshotai/Kimi-K3": 93,
        "moonshotai/Moonlight-16B-A3B": 27,
        "openai/gpt-oss-120b": 36,
        "openai/gpt-oss-20b": 24,
        "Qwen/Qwen2-0.5B": 24,
        "Qwen/Qwen2-1.5B": 28,
        "Qwen/Qwen2-72B": 80,
        "Qwen/Qwen2-7B": 28,
        "Qwen/Qwen2.5-0.5B": 24,
        "Qwen/Qwen2.5-1.5B": 28,
        "Qwen/Qwen2.5-14B": 48,
        "Qwen/Qwen2.5-32B": 64,
        "Qwen/Qwen2.5-3B": 36,
        "Qwen/Qwen2.5-72B": 80,
        "Qwen/Qwen2.5-7B": 28,
        "Qwen/Qwen2.5-VL-32B": 64,
        "Qwen/Qwen2.5-VL-3B": 36,
        "Qwen/Qwen2.5-VL-72B": 80,
        "Qwen/Qwen2.5-VL-7B": 28,
        "Qwen/Qwen3-0.6B": 28,
        "Qwen/Qwen3-1.7B": 28,
        "Qwen/Qwen3-14B": 40,
        "Qwen/Qwen3-235B-A22B": 94,
        "Qwen/Qwen3-30B-A3B": 48,
        "Qwen/Qwen3-32B": 64,
        "Qwen/Qwen3-4B": 36,
        "Qwen/Qwen3-8B": 36,
        "Qwen/Qwen3-Next-80B-A3B": 48,
        "Qwen/Qwen3-VL-235B-A22B": 94,
        "Qwen/Qwen3-VL-2B": 28,
        "Qwen/Qwen3-VL-30B-A3B": 48,
        "Qwen/Qwen3-VL-32B": 64,
        "Qwen/Qwen3-VL-4B": 36,
        "Qwen/Qwen3-VL-8B": 36,
        "Qwen/Qwen3.5-0.8B": 24,
        "Qwen/Qwen3.5-122B-A10B": 48,
        "Qwen/Qwen3.5-27B": 64,
        "Qwen/Qwen3.5-35B-A3B": 40,
        "Qwen/Qwen3.5-397B-A17B": 60,
        "Qwen/Qwen3.5-4B": 32,
        "Qwen/Qwen3.5-9B": 32,
        "stepfun-ai/Step-3.5-Flash": 45,
        "stepfun-ai/Step-3.7-Flash": 45,
        "XiaomiMiMo/MiMo-7B-RL": 36,
        "zai-org/GLM-4.5": 92,
        "zai-org/GLM-4.5-Air": 46,
        "zai-org/GLM-4.7": 92,
        "zai-org/GLM-5": 78,
        "zai-org/GLM-5.1": 78,
        "zai-org/GLM-5.2": 78,
    }
)

_VARIANT: Final = re.compile(r"(?:-(?:Instruct|Base|Chat|Thinking|base|chat|it|hf|PT|Paddle|\d{4}))+/?$", re.ASCII)
"""Names of trainings of one architecture, at the end of a checkpoint's name."""


def depth_of(name: str) -> int | None:
    """Return the number of blocks of a public checkpoint, by its name or by a path that ends with it; else None.

    Variants that are trained further have as many blocks: their endings, such as ``-Instruct``, do not matter.
    """
    base = _VARIANT.sub("", name).rstrip("/")
    if base in NUM_LAYERS:
        return NUM_LAYERS[base]
    last = base.rpartition("/")[2]
    return next((depth for known, depth in NUM_LAYERS.items() if last and known.rpartition("/")[2] == last), None)


def is_public(name: str) -> bool:
    """Return True for the name of a public checkpoint itself, not of a directory."""
    return _VARIANT.sub("", name) in NUM_LAYERS
