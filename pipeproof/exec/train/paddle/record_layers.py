"""``pipeproof.paddle.record_layers``: the values that the layers of any Paddle program compute."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import paddle
from paddle import nn
from paddle.nn.clip import ClipGradBase

from pipeproof.analysis.align.array_digests import Array
from pipeproof.analysis.align.record_format import WIDE, Layout
from pipeproof.exec.compare.layer_recorder import (
    Kept,
    LayerRecorder,
    WeightGradient,
    gradient_of,
    named_modules,
    program_header,
    trained_weights,
)
from pipeproof.exec.compare.tensor_layouts import Split, layout_at_boundary, split_layout


@contextmanager
def record_layers(
    model: nn.Layer | Sequence[nn.Layer] | Mapping[int, nn.Layer],
    directory: str | Path,
    *,
    names: Sequence[str] = (),
    ranks: Sequence[int] | None = None,
    largest: int = 0,
) -> Iterator[Callable[[], None]]:
    """Record the inputs and outputs of each layer; for the arguments see ``pipeproof.torch.record_layers``.

    Layouts come from Fleet's parallel layers. A forward that a backward recomputes is recorded as one more call.

    Raises:
        FileExistsError: the directory has a record of this rank.
        ValueError: two layers of different stages have one name.
    """
    rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    if ranks is not None and rank not in ranks:
        yield lambda: None
        return
    layers = named_modules(model, lambda layer: layer.named_children())
    parameters = trained_weights(layers, _trained)
    first = next((weight for _, _, weight, _ in parameters.values()), None)
    kept = Kept(tuple(names), largest)
    header = program_header("paddle", "float32" if first is None else _dtype(first), layers, kept)
    recorder = LayerRecorder(Path(directory), header, rank, PaddleTensors(), kept)
    clipped: dict[int, Any] = {}

    def end_step() -> None:
        recorder.finish(
            WeightGradient(name, layer, gradient, _parameter_layout(weight), _is_linear(name, module))
            for name, layer, weight, module in reversed(parameters.values())
            if (gradient := clipped.pop(id(weight), gradient_of(weight))) is not None
        )

    with ExitStack() as stack:
        for name, layer in layers.values():
            _hook(stack, recorder, name, layer)
        for each in _optimizers(paddle.optimizer.Optimizer):
            stack.enter_context(patch.object(each, "step", _ending(vars(each)["step"], end_step)))
        stack.enter_context(patch.object(ClipGradBase, "__call__", _keeping(ClipGradBase.__call__, clipped)))
        stack.callback(recorder.forget)
        stack.enter_context(patch.object(paddle.Tensor, "backward", _recorded_backward(recorder)))
        yield end_step
        end_step()


def _trained(layer: nn.Layer) -> Iterator[tuple[str, Any]]:
    own = layer.named_parameters(include_sublayers=False)
    return ((key, weight) for key, weight in own if not weight.stop_gradient)


def _is_linear(name: str, layer: nn.Layer) -> bool:
    """True for a weight that is [in, out]."""
    return name.rpartition(".")[2] == "weight" and "Linear" in type(layer).__name__


def _hook(stack: ExitStack, recorder: LayerRecorder, name: str, layer: nn.Layer) -> None:
    def before(_: nn.Layer, args: Any, kwargs: Any) -> None:
        with paddle.no_grad():
            recorder.entered(name, layer, (args, kwargs), is_again=False)

    def after(_: nn.Layer, args: Any, kwargs: Any, output: Any) -> None:
        with paddle.no_grad():
            recorder.left(name, layer, output, is_again=False)

    stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
    stack.callback(layer.register_forward_post_hook(after, with_kwargs=True, always_call=True).remove)


def _optimizers(base: type) -> Iterator[type]:
    """All optimizer classes that define their own ``step``."""
    if "step" in vars(base):
        yield base
    subclasses: list[type] = base.__subclasses__()
    for each in subclasses:
        yield from _optimizers(each)


def _ending(original: Callable[..., Any], end_step: Callable[[], None]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._grad_clip is None:
            end_step()
        outcome = original(self, *args, **kwargs)
        end_step()  # with clipped gradients, as the optimizer reads them; otherwise nothing has run since
        return outcome

    return step


def _keeping(original: Callable[..., Any], clipped: dict[int, Any]) -> Callable[..., Any]:
    def clip(self: Any, gradients: Any) -> Any:
        pairs = original(self, gradients)
        clipped.update((id(weight), gradient) for weight, gradient in pairs)
        return pairs

    return clip


def _recorded_backward(recorder: LayerRecorder) -> Callable[..., None]:
    original = paddle.Tensor.backward

    def backward(self: Any, grad_tensor: Any = None, *args: Any, **kwargs: Any) -> None:
        if grad_tensor is None and self.size == 1:
            recorder.scalar_backward(self.detach())
        original(self, grad_tensor, *args, **kwargs)

    return backward


def to_numpy(tensor: Any) -> tuple[Array, str]:
    """See ``Tensors.to_numpy``."""
    local = paddle.as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    dtype = _dtype(local)
    return (local.astype(WIDE[dtype]) if dtype in WIDE else local).numpy(), dtype


class PaddleTensors:
    """Paddle's tensors; a ``Tensors``."""

    def leaves(self, values: Any) -> list[Any]:
        """See ``Tensors``."""
        return [leaf for leaf in paddle.utils.flatten(values) if isinstance(leaf, paddle.Tensor) and leaf.is_dense()]

    to_numpy = staticmethod(to_numpy)

    def version(self, tensor: Any) -> int:
        """See ``Tensors``."""
        return int(tensor.inplace_version)

    def on_gradient(self, tensor: Any, call: Callable[[Any], None]) -> Any:
        """See ``Tensors``."""

        def hook(gradient: Any) -> None:
            with paddle.no_grad():
                call(gradient)

        return None if tensor.stop_gradient else tensor.register_hook(hook)

    def layout_of(self, tensor: Any, module: Any, side: Literal["input", "output"]) -> Layout | None:
        """See ``Tensors``."""
        weight = module._parameters.get("weight")  # noqa: SLF001 - ``getattr`` finds properties, too
        split = None if weight is None or "Embedding" in type(module).__name__ else _fleet_split(weight)
        if split is None:
            return None
        return layout_at_boundary(tuple(tensor.shape), tuple(weight.shape), split, side, out_dim=1)


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("paddle.")


def _parameter_layout(weight: Any) -> Layout | None:
    split = _fleet_split(weight)
    return None if split is None else split_layout(tuple(weight.shape), split)


def _fleet_split(weight: Any) -> Split | None:
    dim = getattr(weight, "split_axis", None)
    if dim is None or not getattr(weight, "is_distributed", False):
        return None
    group = paddle.distributed.fleet.get_hybrid_communicate_group()
    size, rank = group.get_model_parallel_world_size(), group.get_model_parallel_rank()
    return Split(dim, rank, size) if size > 1 else None
