"""Pai-Megatron-Patch: scripts of Megatron-LM with tokenizers, data and optimizers of their own."""

import re
from typing import Final

from pipeproof.interop.importers.tools.tool import Tool

PAI: Final = Tool(
    name="Pai-Megatron-Patch",
    names="pai",
    decides=re.compile(r"transformer_type|moe_layer_\w+|\w*expert_interval"),
    without=re.compile(
        r"(optimizer|\w*)offload\w*|train_mode|\w*batch_size|\w*recompute\w*|n_shared_experts|moe_\w+|num_fewshot"
    ),
)
