"""Stages of an ``nn.Sequential``: consecutive modules of it, under the names that they have there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pipeproof.exec.train.torch.cut_sizes import chosen_sizes, shared_weights, stage_ranges
from pipeproof.exec.train.torch.model_stages import ModelStages


class SequentialStage(nn.Module):  # type: ignore[misc]  # torch is untyped
    """Consecutive modules of an ``nn.Sequential``. Names of parameters are those of the whole.

    The modules are called with one argument each, as ``nn.Sequential`` does. At a boundary, a tuple that the previous
    stage returned arrives as positional arguments and a dict as keyword arguments: the first module gets a tuple or a
    dict again.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *values: Any, **items: Any) -> Any:
        """The output of the last module; its input is one value, several values, or the items of a dict."""
        if items and values:
            message = f"an nn.Sequential takes one input, found {len(values)} and the keyword arguments {sorted(items)}"
            raise TypeError(message)
        value = items or (values[0] if len(values) == 1 else values)
        for module in self._modules.values():
            value = module(value)
        return value


def stages_of_sequential(
    sequential: nn.Sequential, num_stages: int, *, sizes: Sequence[int] | None = None
) -> ModelStages:
    """Cut an ``nn.Sequential`` into stages that hold its own modules.

    A parameter has the same name in its stage as in ``sequential``, so that state dicts of stages are parts of its
    state dict. ``sizes`` gives the number of modules of each stage. Without it they differ by one at most, and the
    first stages have more. Micro-batches pass between stages as its modules pass values, with one exception: a tuple of
    one tensor arrives as the tensor. Parameters that several stages share are listed in ``ModelStages.tied``.

    Raises:
        ValueError: It is no plain ``nn.Sequential``, its sizes do not fit, or stages would share a module with buffers.
    """
    if not isinstance(sequential, nn.Sequential) or type(sequential).forward is not nn.Sequential.forward:
        raise ValueError(
            f"{type(sequential).__name__} is no nn.Sequential with the forward of nn.Sequential: pass your own "
            "modules as stages"
        )
    modules = list(sequential._modules.items())  # noqa: SLF001 - ``named_children`` lists a repeated module once
    chosen = chosen_sizes(num_stages, sizes, argument="sizes")
    stages = []
    for numbers in stage_ranges(len(modules), chosen, argument="sizes", may_be_empty=False):
        stage = SequentialStage(dict(modules[numbers.start : numbers.stop]))
        stage.training = sequential.training
        stages.append(stage)
    _refuse_shared_buffers(stages)
    return ModelStages(stages, shared_weights(stages), sequential)


def _refuse_shared_buffers(stages: Sequence[nn.Module]) -> None:
    """Refuse a module with buffers, such as running statistics, that several stages would update on their own."""
    holder: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for name, buffer in stage.named_buffers():
            first, first_name = holder.setdefault(id(buffer), (number, name))
            if first != number:
                raise ValueError(
                    f"buffer {first_name} of stage {first} is also {name} of stage {number}: each rank would have a "
                    "copy of its own; repeat the module within one stage, or give each stage its own module"
                )
