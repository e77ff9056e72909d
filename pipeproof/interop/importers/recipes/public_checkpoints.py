"""Numbers of blocks of public checkpoints, by their names on Hugging Face, for recipes that name a checkpoint only.

``num_hidden_layers`` of the ``config.json`` of each (of the text part of a multimodal model). Other sizes change times
and bytes alone, and ``--model-config`` supplies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

NUM_LAYERS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "allenai/OLMoE-1B-7B-0924": 16,
        "deepseek-ai/DeepSeek-V2": 60,
        "deepseek-ai/DeepSeek-V2-Lite": 27,
        "deepseek-ai/DeepSeek-V3": 61,
        "deepseek-ai/DeepSeek-V3-Base": 61,
        "google/gemma-2-27b": 46,
        "google/gemma-2-2b": 26,
        "google/gemma-2-9b": 42,
        "meta-llama/Llama-2-7b-hf": 32,
        "meta-llama/Llama-3.1-405B": 126,
        "meta-llama/Llama-3.1-70B": 80,
        "meta-llama/Llama-3.1-70B-Instruct": 80,
        "meta-llama/Llama-3.1-8B": 32,
        "meta-llama/Llama-3.1-8B-Instruct": 32,
        "meta-llama/Llama-3.2-1B": 16,
        "meta-llama/Llama-3.2-3B": 28,
        "meta-llama/Llama-3.3-70B-Instruct": 80,
        "meta-llama/Meta-Llama-3-70B": 80,
        "meta-llama/Meta-Llama-3-8B": 32,
        "meta-llama/Meta-Llama-3.1-405B": 126,
        "meta-llama/Meta-Llama-3.1-70B": 80,
        "meta-llama/Meta-Llama-3.1-8B": 32,
        "mistralai/Mixtral-8x22B-v0.1": 56,
        "mistralai/Mixtral-8x7B-v0.1": 32,
        "moonshotai/Kimi-K2-Base": 61,
        "moonshotai/Kimi-K2-Instruct": 61,
        "moonshotai/Kimi-K2.5": 61,
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
        "Qwen/Qwen2.5-32B-Instruct": 64,
        "Qwen/Qwen2.5-72B": 80,
        "Qwen/Qwen2.5-72B-Instruct": 80,
        "Qwen/Qwen2.5-7B": 28,
        "Qwen/Qwen2.5-7B-Instruct": 28,
        "Qwen/Qwen2.5-VL-32B-Instruct": 64,
        "Qwen/Qwen2.5-VL-3B-Instruct": 36,
        "Qwen/Qwen2.5-VL-72B-Instruct": 80,
        "Qwen/Qwen2.5-VL-7B-Instruct": 28,
        "Qwen/Qwen3-0.6B": 28,
        "Qwen/Qwen3-1.7B": 28,
        "Qwen/Qwen3-14B": 40,
        "Qwen/Qwen3-235B-A22B": 94,
        "Qwen/Qwen3-30B-A3B": 48,
        "Qwen/Qwen3-32B": 64,
        "Qwen/Qwen3-4B": 36,
        "Qwen/Qwen3-8B": 36,
        "Qwen/Qwen3-Next-80B-A3B-Instruct": 48,
        "Qwen/Qwen3-VL-235B-A22B-Instruct": 94,
        "Qwen/Qwen3-VL-30B-A3B-Instruct": 48,
        "Qwen/Qwen3-VL-8B-Instruct": 36,
        "Qwen/Qwen3.5-35B-A3B": 40,
        "Qwen/Qwen3.5-397B-A17B": 60,
        "zai-org/GLM-4.5": 92,
        "zai-org/GLM-4.5-Air": 46,
    }
)
