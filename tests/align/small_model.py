"""Sizes, weights and tokens of the small models."""

import numpy as np

BATCH, SEQUENCE, HIDDEN, HEADS, VOCAB, MICRO_BATCHES = 2, 6, 16, 2, 40, 2


def weights():
    """By name as in PyTorch, matrices [out, in]."""
    random = np.random.default_rng(0)
    shapes = {"embed.weight": (VOCAB, HIDDEN), "norm.weight": (HIDDEN,), "norm.bias": (HIDDEN,),
              "head.weight": (VOCAB, HIDDEN)}  # fmt: skip
    for number in range(2):
        for name, shape in {
            "norm1": (HIDDEN,), "attn.qkv": (3 * HIDDEN, HIDDEN), "attn.out": (HIDDEN, HIDDEN), "norm2": (HIDDEN,),
            "mlp.up": (4 * HIDDEN, HIDDEN), "mlp.down": (HIDDEN, 4 * HIDDEN),
        }.items():  # fmt: skip
            shapes[f"blocks.{number}.{name}.weight"] = shape
            shapes[f"blocks.{number}.{name}.bias"] = shape[:1]
    return {
        name: (random.normal(size=shape) * 0.3 + ("norm" in name and name.endswith("weight"))).astype("f4")
        for name, shape in shapes.items()
    }


def tokens(step, micro_batch):
    random = np.random.default_rng([step, micro_batch])
    return tuple(random.integers(VOCAB, size=(BATCH, SEQUENCE)) for _ in range(2))
