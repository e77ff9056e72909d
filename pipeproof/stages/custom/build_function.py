"""The user's ``build`` function, and the layers that it lists: ready layers, functions, and Fleet's layer descriptions.

Errors in the user's file are reported with their line.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import paddle
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc

from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.diagnostics.problems import describe_value
from pipeproof.specs.custom_layers import CustomModelSpec
from pipeproof.stages.custom.custom_codes import cannot_build

_EXPECTED = "return `layers, loss, data`: a list of layers, and two functions"


@dataclass(frozen=True, slots=True)
class Built:
    """The result of ``build``: the listed layers, ``loss(output, labels)`` and ``data(step, index, rng)``.

    ``file`` is the user's file.
    """

    file: Path
    layers: Any
    loss: Callable[[Any, Any], Any] | None
    data: Callable[[int, int, Any], Any]


def call_build(model: CustomModelSpec) -> Built:
    """Load the file of a model and call its function. The file's folder is added to the import path.

    Raises:
        BadPlanError: PP911, the file or function does not exist, it raises, or it returns something else.
    """
    assert model.build is not None, "``absolute_build`` refuses such a plan"
    name, _, function_name = model.build.rpartition(":")
    file = Path(name).resolve()
    if not file.is_file():
        raise cannot_build(f"there is no file `{name}`", "the path is relative to the plan file")
    spec = importlib.util.spec_from_file_location(f"pipeproof_own_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import does: pickle and dataclasses look there
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    with user_code_errors(file, f"loading `{name}`"):
        spec.loader.exec_module(module)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise cannot_build(
            f"`{name}` has no function `{function_name}`", f"define `def {function_name}():` in it, at the top level"
        )
    with user_code_errors(file, f"`{function_name}()`"):
        result = function()
    if not isinstance(result, tuple | list) or len(result) != 3:
        returned = f"{len(result)} things" if isinstance(result, tuple | list) else describe_value(result)
        raise cannot_build(f"`{function_name}()` returned {returned} instead of three", _EXPECTED)
    layers, loss, data = result
    if loss is not None and not callable(loss):
        raise cannot_build(f"the loss that `{function_name}()` returned is {describe_value(loss)}", _EXPECTED)
    if not callable(data):
        raise cannot_build(f"the data that `{function_name}()` returned is {describe_value(data)}", _EXPECTED)
    return Built(file, layers, loss, data)


@contextmanager
def user_code_errors(file: Path, action: str) -> Iterator[None]:
    """Convert exceptions of user code to PP911, with the line of the user's file.

    Raises:
        BadPlanError: in place of any other exception.
    """
    try:
        yield
    except BadPlanError:
        raise
    except (Exception, SystemExit) as error:
        text = str(error).strip().splitlines()
        summary = f"{type(error).__name__}: {text[-1] if text else ''}".rstrip(": ")
        raise cannot_build(f"{action} raised {summary}", _line_of(error, file)) from error


def _line_of(error: BaseException, file: Path) -> str:
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{Path(error.filename).name}:{error.lineno}: {(error.text or '').strip()}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    if not frames:
        return f"the traceback has no line of {file.name}"
    last = frames[-1]
    return f"{file.name}:{last.lineno}, in {last.name}: {last.line}"


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """One listed layer: its ``paddle.nn.Layer`` (None for a plain function) and the call on its input.

    ``call`` takes the layer as its first argument, so that it also works with a copy. ``name`` is the default name;
    ``kind`` the name of the class or function.
    """

    name: str
    kind: str
    module: paddle.nn.Layer | None
    call: Callable[[Any, Any], Any]
    shared: frozenset[str] | None = None
    """Names of the shared weights of a layer that Fleet shares between stages; None for other layers."""


@contextmanager
def described_only() -> Iterator[None]:
    """In this context a Fleet ``PipelineLayer`` stores its description and builds nothing, without a process group."""
    original = PipelineLayer.__init__
    PipelineLayer.__init__ = _keep_description
    try:
        yield
    finally:
        PipelineLayer.__init__ = original


def _keep_description(self: Any, layers: Any, *_: Any, loss_fn: Any = None, **__: Any) -> None:
    paddle.nn.Layer.__init__(self)
    self.described_layers, self.described_loss = list(layers), loss_fn


def layer_entries(layers: Any) -> list[LayerEntry]:
    """The layers of a list, or of a ``PipelineLayer`` that was constructed in ``described_only``.

    Raises:
        BadPlanError: PP911, an entry is not a layer.
    """
    listed = layers.described_layers if isinstance(layers, PipelineLayer) else layers
    if not isinstance(listed, list | tuple) or not listed:
        returned = "an empty list" if isinstance(listed, list | tuple) else describe_value(listed)
        raise cannot_build(f"the returned layers are {returned}", "return a list of one or more layers")
    shared: dict[str, paddle.nn.Layer] = {}
    return [_entry(layer, number, shared) for number, layer in enumerate(listed)]


def pipeline_loss(layers: Any) -> Any:
    """The loss function of a ``PipelineLayer``; None for a list."""
    return layers.described_loss if isinstance(layers, PipelineLayer) else None


def _entry(layer: Any, number: int, shared: dict[str, paddle.nn.Layer]) -> LayerEntry:
    if isinstance(layer, SharedLayerDesc):
        module = shared.get(layer.layer_name)
        if module is None:
            module = shared[layer.layer_name] = layer.build_layer()
        call = _plain if layer.forward_func is None else _with(layer.forward_func)
        return _named(type(module).__name__, number, module, call, _shared(module, layer.shared_weight_attr))
    if isinstance(layer, LayerDesc):
        layer = layer.build_layer()
    if isinstance(layer, paddle.nn.Layer):
        return _named(type(layer).__name__, number, layer, _plain)
    if callable(layer):
        kind = getattr(layer, "__name__", "").strip("_") or "function"  # Paddle's tanh is `_tanh` inside
        return _named(kind, number, None, lambda _, value: layer(value))
    message = f"item {number} of the layers is {describe_value(layer)}"
    raise cannot_build(message, "list paddle.nn.Layer objects, functions of layer value, or Fleet's LayerDesc")


def _named(
    kind: str,
    number: int,
    module: paddle.nn.Layer | None,
    call: Callable[[Any, Any], Any],
    shared: frozenset[str] | None = None,
) -> LayerEntry:
    return LayerEntry(_name(kind, number), kind, module, call, shared)


def _shared(module: paddle.nn.Layer, attributes: list[str]) -> frozenset[str]:
    """The names of the weights of these attributes, which may be properties, or attributes of a sublayer."""
    ids = {id(reduce(getattr, attribute.split("."), module)) for attribute in attributes}
    return frozenset(name for name, weight in trained(module).items() if id(weight) in ids)


def _name(kind: str, number: int) -> str:
    word = "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in kind).strip("_").lower()
    return f"{word or 'function'}.{number}" if not word[:1].isdigit() else f"layer_{word}.{number}"


def _plain(module: Any, value: Any) -> Any:
    return module(value)


def _with(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda module, value: function(module, value)


def trained(module: paddle.nn.Layer | None) -> Mapping[str, paddle.Tensor]:
    """The weights of a layer that the optimizer updates, by their names in the layer."""
    if module is None:
        return {}
    return {name: weight for name, weight in module.named_parameters() if not weight.stop_gradient}


def untrained(module: paddle.nn.Layer | None) -> Mapping[str, paddle.Tensor]:
    """The other tensors of a layer, by their names in it: buffers, persistable or not, and frozen weights.

    The running statistics of Paddle's batch norms are frozen weights.
    """
    if module is None:
        return {}
    frozen = {name: weight for name, weight in module.named_parameters() if weight.stop_gradient}
    return {**frozen, **dict(module.named_buffers())}
