"""Public names of ``stages.common`` and ``stages.paddle`` that are operations and so need a row."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import pipeproof.stages.common
import pipeproof.stages.paddle

EXCUSED: Mapping[str, str] = MappingProxyType(
    {
        "ExpertRegion.counts": "exchanges integers",
        "GatheredInput.take": "the tensor of a forward again",
        "widened": "a cast, whose backward is the cast back: the router's products have rows",
        "SplitWeights.fixed": "a constant; no gradient flows through it",
        "TensorParallelRegion.max": "no gradient flows through it",
        "TensorParallelRegion.spread": "autograd does not see it: enter and leave have rows",
        "TensorParallelRegion.reduce": "autograd does not see it: enter and leave have rows",
        "RouterBalance.enter": "adds the gradient of losses that it does not return: a test of its own",
        "Balance.enter": "called by RouterBalance.enter",
        "PaddleBalance.load": "counts",
        "PaddleBalance.bias": "no gradient flows through it",
        "Positions.tables": "rows of constants; no gradient flows through it",
        "Stage.forward": "a whole stage: its gradients are compared with the slopes of the loss",
        "ShardedOptimizer.to_scatter": "moves gradients; none flows through it",
        "ShardedOptimizer.to_gather": "moves weights; no gradient flows through it",
        "StageOptimizer.state": "saved state of an optimizer; no gradient flows through it",
        "ShardedOptimizer.state": "saved state of an optimizer; no gradient flows through it",
    }
)
"""Names without a row, and why."""


def operations() -> set[str]:
    """Public functions and methods that make tensors, as their annotations say; protocols have no code."""
    return set(_operations())


def _operations() -> Iterator[str]:
    packages = pipeproof.stages.common, pipeproof.stages.paddle
    modules = [
        f"{package.__name__}.{one.name}" for package in packages for one in pkgutil.iter_modules(package.__path__)
    ]
    for module in map(importlib.import_module, modules):
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(value) and _makes_tensors(value):
                yield name
            elif inspect.isclass(value) and not getattr(value, "_is_protocol", False):
                methods = ((key, method) for key, method in vars(value).items() if inspect.isfunction(method))
                yield from (f"{name}.{key}" for key, method in methods if key[0] != "_" and _makes_tensors(method))


def _makes_tensors(function: object) -> bool:
    assert callable(function)
    return "Tensor" in str(inspect.signature(function).return_annotation)
