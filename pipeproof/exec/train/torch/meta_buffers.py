"""Buffers that no state dict has, such as rotary frequencies, of modules that get memory after the meta device.

``to_empty`` gives them memory without values, and no load of a state dict writes them: a training would be wrong
without an error. So each is noted until something computes it. ``Pipeline`` refuses buffers without values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from pipeproof.exec.store.train_errors import PipelineError

_WITHOUT_VALUES: Mapping[torch.Tensor, int] = WeakIdKeyDictionary()
"""Buffers that ``to_empty`` made, with their version: a write in place raises it."""


def note_empty_buffers() -> None:
    """Have ``nn.Module`` note the buffers that it makes without values; its results are unchanged.

    PyTorch has no hook for this. A buffer that another ``to`` copies stays noted.
    """
    to_empty, apply = nn.Module.to_empty, nn.Module._apply  # noqa: SLF001 - every conversion passes through it
    if getattr(to_empty, "__module__", "") == __name__:
        return

    @wraps(to_empty, assigned=("__name__", "__qualname__", "__doc__"))
    def noting_to_empty(self: nn.Module, *, device: Any, recurse: bool = True) -> nn.Module:
        result = to_empty(self, device=device, recurse=recurse)
        for _, buffer in _buffers_outside_of_states(self, recurse=recurse):
            _note(buffer)
        return result

    @wraps(apply, assigned=("__name__", "__qualname__", "__doc__"))
    def noting_apply(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        own = _buffers_outside_of_states(self, recurse=False)
        noted = [name for name, buffer in own if is_without_values(buffer)]
        result = apply(self, *args, **kwargs)
        for name in noted:
            _note(self._buffers[name])
        return result

    nn.Module.to_empty, nn.Module._apply = noting_to_empty, noting_apply  # noqa: SLF001


def _note(buffer: torch.Tensor) -> None:
    if not buffer.is_meta and buffer.numel() and not buffer.is_inference():
        _WITHOUT_VALUES[buffer] = buffer._version  # type: ignore[index]  # noqa: SLF001


def is_without_values(buffer: torch.Tensor) -> bool:
    """Return True if ``to_empty`` made the buffer, and nothing has written to it since."""
    version = _WITHOUT_VALUES.get(buffer)
    return version is not None and version == buffer._version  # noqa: SLF001


def _buffers_outside_of_states(module: nn.Module, *, recurse: bool = True) -> list[tuple[str, torch.Tensor]]:
    """The buffers that no state dict has, by their names."""
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, part in (module.named_modules() if recurse else [("", module)])
        for name, buffer in part._buffers.items()  # noqa: SLF001
        if buffer is not None and name in part._non_persistent_buffers_set  # noqa: SLF001
    ]


def require_computed_buffers(stages: Mapping[int, nn.Module]) -> None:
    """Refuse stages with a buffer that got memory and no values.

    Raises:
        PipelineError: names the stage and the buffers.
    """
    for number, stage in stages.items():
        names = [name for name, buffer in stage.named_buffers() if is_without_values(buffer)]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise PipelineError(
                f"stage {number}: buffer {names[0]}{more} has no values: it was on the meta device, and no state dict "
                "has it. After `to_empty`, compute it as the constructor of its module does, and assign it or write it "
                "with `copy_`. Stages of `stages_of_transformers` compute theirs in `stage.to_empty`"
            )


def give_memory(module: nn.Module, device: torch.device | str) -> set[str]:
    """Give memory to tensors on the meta device, and return their names; buffers are noted as without values."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    made = {name for name, tensor in tensors if tensor.is_meta}
    module._apply(lambda x: torch.empty_like(x, device=device) if x.is_meta else x)  # noqa: SLF001 - as ``to_empty``
    for name, buffer in module.named_buffers():
        if name in made:
            _note(buffer)
    return made


def compute_buffers(model: Any, loaded: Iterable[torch.Tensor]) -> None:
    """Initialise a ``PreTrainedModel`` by the library's own code, except the tensors ``loaded``.

    Those are all that state dicts have, as in ``from_pretrained``, which builds every model on the meta device.
    """
    marked = {id(x): x for x in loaded}
    for tensor in (*marked.values(), *model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = id(tensor) in marked  # noqa: SLF001 - the library's mark
    for part in model.modules():
        part._is_hf_initialized = False  # noqa: SLF001
    model.initialize_weights()


@contextmanager
def kept_ties(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep a Parameter with several names one object: conversions from the meta device make one for each name."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in {id(part): part for module in modules for part in module.modules()}.values():
        for name, parameter in part._parameters.items():  # noqa: SLF001
            if parameter is not None:
                places.setdefault(id(parameter), []).append((part, name))
    yield
    for (first, first_name), *others in places.values():
        for part, name in others:
            part._parameters[name] = first._parameters[first_name]  # noqa: SLF001


@contextmanager
def with_memory(modules: Sequence[nn.Module], device: torch.device) -> Iterator[None]:
    """Give tensors on the meta device memory with random values for this block, and take it back."""
    parts = {id(part): part for module in modules for part in module.modules()}.values()
    kept = [
        (tensors, name, tensor)
        for part in parts for tensors in (part._parameters, part._buffers)  # noqa: SLF001
        for name, tensor in tensors.items() if tensor is not None and tensor.is_meta
    ]  # fmt: skip
    with kept_ties(modules):
        for module in modules:
            give_memory(module, device)
    with torch.no_grad():
        for tensors, name, old in kept:
            if isinstance(old, nn.Parameter) and old.is_floating_point():
                tensors[name].normal_(0.0, 0.02)
            else:
                tensors[name].fill_(1 if old.is_floating_point() else 0)  # ones: a variance is above 0
    try:
        yield
    finally:
        for tensors, name, old in kept:
            tensors[name].grad = None
            tensors[name].untyped_storage().resize_(0)  # compiled graphs may keep the tensor itself
            tensors[name] = old
