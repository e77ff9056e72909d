"""A small Llama of Hugging Face with random weights, and rows of random tokens whose first labels do not count."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, SEQUENCE = 64, 16


def tiny_llama() -> LlamaForCausalLM:
    """Return the model with the same weights on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=SEQUENCE,
        )
    )


class Rows(Dataset):
    """Rows with other numbers of labels, as in instruction tuning."""

    def __init__(self, num_rows: int) -> None:
        self._tokens = torch.randint(VOCABULARY, (num_rows, SEQUENCE), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        labels = self._tokens[number].clone()
        labels[: number % SEQUENCE // 2] = -100
        return {"input_ids": self._tokens[number], "labels": labels}
