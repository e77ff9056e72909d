"""Paddle's names of what an optimizer keeps, and ours.

Paddle's are the weight's name and a suffix (``OPTIMIZER_STATE_NAME`` in its
``flex_checkpoint/aoa/aoa_engine.py``), so that its tools, PaddleFormers'
among them, find what belongs together.
"""

from __future__ import annotations

from pipeproof.state.index import TensorEntry
from pipeproof.state.layout import moment_name

MAIN = ".w_0"
"""Behind the name of a weight: what the optimizer updates, where the model computes with a copy of fewer bits."""
_SLOTS = {"moment1": ".moment1_0", "moment2": ".moment2_0"}
_COUNTERS = {"beta1_power": ".beta1_pow_acc_0", "beta2_power": ".beta2_pow_acc_0"}
_BIAS = ".router.bias"
"""How names of routers' biases end, see ``stages.describe.balance.bias_name``."""


def key_of(tensor: str, entry: TensorEntry) -> str:
    """Paddle's name of a tensor of a state that Paddle made, whose weights are in the type that computes.

    >>> key_of("optimizer/moment1/head", TensorEntry(kind="moment", dtype="float32", shape=(2,), weight="head"))
    'head.moment1_0'
    """
    if entry.weight is None:
        return tensor
    return entry.weight + (_SLOTS | _COUNTERS)[tensor.removesuffix(f"/{entry.weight}").removeprefix("optimizer/")]


def stored_shape(entry: TensorEntry, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a part as Paddle keeps it: its optimizers' numbers have one dim."""
    return (1,) if entry.kind == "counter" else shape


def tensor_of(key: str, dtype: str, shape: tuple[int, ...]) -> tuple[str, TensorEntry]:
    """Our name of what Paddle calls ``key``, and what it is. A number has one dim there, and none with us."""
    for slot, suffix in _SLOTS.items():
        if key.endswith(suffix):
            weight = key.removesuffix(suffix)
            return moment_name(weight, slot), TensorEntry(kind="moment", dtype=dtype, shape=shape, weight=weight)
    for slot, suffix in _COUNTERS.items():
        if key.endswith(suffix) and shape in ((), (1,)):
            weight = key.removesuffix(suffix)
            return moment_name(weight, slot), TensorEntry(kind="counter", dtype=dtype, shape=(), weight=weight)
    if key.endswith(_BIAS):
        return key, TensorEntry(kind="expert_bias", dtype=dtype, shape=shape)
    return key.removesuffix(MAIN), TensorEntry(kind="weight", dtype=dtype, shape=shape)
