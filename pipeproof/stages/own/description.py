"""Layers as people list them: ready layers, functions, and Fleet's descriptions of layers that are yet to be built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import paddle
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc

from pipeproof.specs.problems import describe_value
from pipeproof.stages.own.codes import cannot_build


@dataclass(frozen=True, slots=True)
class Item:
    """One layer: what is called on its input, and the ``paddle.nn.Layer`` behind it, None for a plain function.

    ``call`` takes the layer first, so that it can be given another instance of it.
    ``name`` is what it would be called, where nobody says otherwise; ``kind`` its class, or the function.
    """

    name: str
    kind: str
    module: paddle.nn.Layer | None
    call: Callable[[Any, Any], Any]
    shared: frozenset[str] | None = None
    """Of a layer that Fleet shares between stages, the names of the weights that it shares; None of any other."""


@contextmanager
def described_only() -> Iterator[None]:
    """Within, a Fleet ``PipelineLayer`` keeps its description and builds nothing: it needs no process group."""
    original = PipelineLayer.__init__
    PipelineLayer.__init__ = _keep_description
    try:
        yield
    finally:
        PipelineLayer.__init__ = original


def _keep_description(self: Any, layers: Any, *_: Any, loss_fn: Any = None, **__: Any) -> None:
    paddle.nn.Layer.__init__(self)
    self.described_layers, self.described_loss = list(layers), loss_fn


def items_of(layers: Any) -> list[Item]:
    """The layers of a list, or of a ``PipelineLayer`` that was made within ``described_only``.

    Raises:
        BadPlanError: PP911, something in it is no layer.
    """
    listed = layers.described_layers if isinstance(layers, PipelineLayer) else layers
    if not isinstance(listed, list | tuple) or not listed:
        found = "an empty list" if isinstance(listed, list | tuple) else describe_value(listed)
        raise cannot_build(f"the layers that were returned are {found}", "return a list of one or more layers")
    shared: dict[str, paddle.nn.Layer] = {}
    return [_item(one, number, shared) for number, one in enumerate(listed)]


def loss_of(layers: Any) -> Any:
    """The loss function of a ``PipelineLayer``; None for a list."""
    return layers.described_loss if isinstance(layers, PipelineLayer) else None


def _item(one: Any, number: int, shared: dict[str, paddle.nn.Layer]) -> Item:
    if isinstance(one, SharedLayerDesc):
        module = shared.get(one.layer_name)
        if module is None:
            module = shared[one.layer_name] = one.build_layer()
        call = _plain if one.forward_func is None else _with(one.forward_func)
        return _named(type(module).__name__, number, module, call, _shared(module, one.shared_weight_attr))
    if isinstance(one, LayerDesc):
        one = one.build_layer()
    if isinstance(one, paddle.nn.Layer):
        return _named(type(one).__name__, number, one, _plain)
    if callable(one):
        kind = getattr(one, "__name__", "").strip("_") or "function"  # Paddle's tanh is `_tanh` inside
        return _named(kind, number, None, lambda _, value: one(value))
    message = f"item {number} of the layers is {describe_value(one)}"
    raise cannot_build(message, "list paddle.nn.Layer objects, functions of one value, or Fleet's LayerDesc")


def _named(
    kind: str,
    number: int,
    module: paddle.nn.Layer | None,
    call: Callable[[Any, Any], Any],
    shared: frozenset[str] | None = None,
) -> Item:
    return Item(_name(kind, number), kind, module, call, shared)


def _shared(module: paddle.nn.Layer, attributes: list[str]) -> frozenset[str]:
    """The names of the weights that these attributes lead to, which may be properties, or of a layer inside."""
    found = {id(reduce(getattr, attribute.split("."), module)) for attribute in attributes}
    return frozenset(name for name, weight in trained(module).items() if id(weight) in found)


def _name(kind: str, number: int) -> str:
    word = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in kind).strip("_").lower()
    return f"{word or 'function'}.{number}" if not word[:1].isdigit() else f"layer_{word}.{number}"


def _plain(module: Any, value: Any) -> Any:
    return module(value)


def _with(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda module, value: function(module, value)


def trained(module: paddle.nn.Layer | None) -> Mapping[str, paddle.Tensor]:
    """The weights of a layer that an optimizer updates, by their names in it."""
    if module is None:
        return {}
    return {name: weight for name, weight in module.named_parameters() if not weight.stop_gradient}


def untrained(module: paddle.nn.Layer | None) -> Mapping[str, paddle.Tensor]:
    """What a layer has beside these, by names in it: buffers, saved with it or not, and frozen weights.

    Paddle's batch norms have their running statistics as frozen weights.
    """
    if module is None:
        return {}
    frozen = {name: weight for name, weight in module.named_parameters() if weight.stop_gradient}
    return {**frozen, **dict(module.named_buffers())}
