"""Models of the benchmarks on GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Size:
    """A GPT with heads of 128 and an MLP four times as wide; ``num_layers`` blocks on each rank, one row each time."""

    hidden: int
    seq_length: int
    num_layers: int
    num_micro_batches: int
    vocab_size: int = 4096
    dtype: torch.dtype = torch.bfloat16
    activation_order: str = "bsh"
    moe: Mapping[str, Any] | None = None
    """The model section of a plan."""

    @classmethod
    def read(cls, text: str) -> Size:
        """From ``hidden,sequence,layers,micro-batches``."""
        return cls(*map(int, text.split(",")))

    @property
    def num_heads(self) -> int:
        """Attention heads."""
        return self.hidden // 128

    @property
    def ffn(self) -> int:
        """Inner size of the MLP."""
        return 4 * self.hidden

    def chunks(self, kind: str) -> int:
        """Stages on each rank."""
        return 1 if kind in ("gpipe", "1f1b", "zb_h1") else 2

    def plan(self, kind: str, num_ranks: int, **topology: Any) -> dict[str, Any]:
        """The plan, as data, for ``num_ranks`` stages times what the topology adds to them."""
        schedule = {"kind": kind, "num_micro_batches": self.num_micro_batches, "micro_batch_size": 1}
        return {
            "pipeproof": 1,
            "model": {
                "kind": "gpt",
                "num_layers": self.num_layers * num_ranks,
                "hidden_size": self.hidden,
                "num_heads": self.num_heads,
                "ffn_size": self.ffn,
                "vocab_size": self.vocab_size,
                "seq_length": self.seq_length,
                "activation_order": self.activation_order,
                **({} if self.moe is None else {"moe": dict(self.moe)}),
            },
            "topology": {"pp": num_ranks, **topology},
            "schedule": schedule | ({"num_chunks": self.chunks(kind)} if self.chunks(kind) > 1 else {}),
            "run": {"backend": "torch", "device": "gpu", "dtype": str(self.dtype).removeprefix("torch.")},
        }
