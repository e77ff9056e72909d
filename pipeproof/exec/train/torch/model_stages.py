"""All stages of a model that was cut; every rank keeps the stages that the schedule places on it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.plan_layers import Tie
from pipeproof.exec.train.torch.block_layers import CutLayers
from pipeproof.exec.train.torch.model_names import unwrapped
from pipeproof.exec.train.torch.stage_values import plain_leaves_of

_CUTS: WeakKeyDictionary[nn.Module, tuple[ref[nn.Module], tuple[dict[int, str], ...]]] = WeakKeyDictionary()
"""For each stage, the model that it was cut from, and the weights that stages of the cut share."""


class ModelStages(Mapping[int, nn.Module]):
    """The stages of a whole model by global stage number, and the weights that several of them use.

    Every rank makes all stages, on the meta device if the model is large; ``Pipeline`` keeps the stages of its rank.
    The stages were cut from ``model``.
    """

    def __init__(self, stages: Sequence[nn.Module], tied: Sequence[Tie] = (), model: nn.Module | None = None) -> None:
        self._stages = list(stages)
        self.tied = tuple(dict(names) for names in tied)
        if model is not None:
            _CUTS.update((stage, (ref(model), self.tied)) for stage in stages)

    def __getitem__(self, number: int) -> nn.Module:
        return self._stages[number]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._stages)))

    def __len__(self) -> int:
        return len(self._stages)


def cut_model(stage: nn.Module) -> nn.Module | None:
    """Return the model that a stage was cut from; None if it was made by hand, or the model is gone."""
    cut = _CUTS.get(stage)
    return None if cut is None else cut[0]()


def cut_ties(stage: nn.Module) -> tuple[dict[int, str], ...]:
    """Return the weights that the stages of the cut share; none for a stage that was made by hand."""
    cut = _CUTS.get(stage)
    return () if cut is None else cut[1]


class StaleModel:
    """Refuses the state dict of the model that ``stages`` were cut from, if other stages are trained on other ranks.

    From the first step on (``is_stale``), until a state dict is loaded into the model.
    """

    def __init__(self, stages: Mapping[int, nn.Module], num_stages: int) -> None:
        self.is_stale, self._message = False, ""
        self._hooks: list[Any] = []
        own = {id(weight) for stage in stages.values() for weight in stage.parameters()}
        model = next(filter(None, (cut_model(unwrapped(stage)) for stage in stages.values())), None)
        if model is None or len(stages) == num_stages:
            return
        save = (
            "`save_pretrained(pipe, directory)`"
            if hasattr(model, "save_pretrained")
            else "`save_dcp(directory, pipe.stages)`; `pipeproof state reshard directory -o model.safetensors` then "
            "makes one file"
        )
        self._message = (
            f"this {type(model).__name__} has old weights: the Pipeline trains stages {sorted(stages)} on this rank, "
            f"and stages {[n for n in range(num_stages) if n not in stages]} on other ranks. Call on every rank {save}"
        )
        for part in model.modules():
            if not all(id(weight) in own for weight in part.parameters()):
                self._hooks.append(part.register_state_dict_pre_hook(self))
        self._hooks.append(model.register_load_state_dict_post_hook(self._loaded))

    def forget(self) -> None:
        """Refuse nothing any more: the stages were run, but not trained."""
        for hook in self._hooks:
            hook.remove()

    def _loaded(self, *_: Any) -> None:
        self.is_stale = False

    def __call__(self, *_: Any) -> None:
        """Refuse a state dict, as its hook.

        Raises:
            PipelineError: a step has run.
        """
        if self.is_stale:
            raise PipelineError(self._message)

    def __deepcopy__(self, _: Any) -> StaleModel:
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to pickle a model that has this hook, as a state dict of it."""
        self()
        return self.__dict__


def stage_ranges(num_blocks: int, sizes: int | Sequence[int], *, argument: str, may_be_empty: bool) -> list[range]:
    """The block numbers of each stage: ``sizes`` is the number of stages, or the number of blocks of each.

    A number of stages makes sizes that differ by one at most, the larger ones first. ``argument`` is the name of the
    sizes in messages. ``may_be_empty`` allows stages without blocks: they hold something else, or pass their input on.

    Raises:
        ValueError: There are no stages, fewer blocks than stages, or sizes that do not fit the number of blocks.
    """
    if isinstance(sizes, int):
        if not 1 <= sizes <= num_blocks:
            hint = f" ({argument} can leave stages without blocks)" if may_be_empty else ""
            raise ValueError(f"num_stages must be from 1 to {num_blocks}, the number of blocks, found {sizes}{hint}")
        sizes = [num_blocks // sizes + (number < num_blocks % sizes) for number in range(sizes)]
    if sum(sizes) != num_blocks:
        raise ValueError(f"{argument} {list(sizes)} adds up to {sum(sizes)}, and the model has {num_blocks} blocks")
    for number, size in enumerate(sizes):
        if size < (0 if may_be_empty else 1):
            least = "0 or more" if may_be_empty else "at least one"
            raise ValueError(f"{argument} {list(sizes)} leaves stage {number} {size} blocks: give it {least}")
    return [range(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]


def chosen_sizes(num_stages: int, sizes: Sequence[int] | str | None, *, argument: str) -> int | Sequence[int]:
    """``sizes`` where they are given, else ``num_stages``, as for ``even``.

    Raises:
        ValueError: There are more or fewer sizes than stages, or another word.
    """
    if sizes is None or sizes == "even":
        return num_stages
    if isinstance(sizes, str):
        message = f"{argument} is {sizes!r}: give 'even', or the size of each stage"
        raise ValueError(message)  # noqa: TRY004 - a text may be right
    if len(sizes) != num_stages:
        raise ValueError(f"{argument} has {len(sizes)} sizes, and num_stages is {num_stages}: give one for each stage")
    return sizes


def shared_weights(stages: Sequence[nn.Module]) -> list[dict[int, str]]:
    """The parameters that are the same object in several stages: their names in ``named_parameters`` of each stage."""
    return shared_objects({number: dict(stage.named_parameters()) for number, stage in enumerate(stages)})


def shared_objects(named: Mapping[int, Mapping[str, nn.Parameter]]) -> list[dict[int, str]]:
    """The parameters that are one object in several stages, as names by stage; ``named`` has all of each stage."""
    names: dict[int, dict[int, str]] = {}
    for number, parameters in named.items():
        for name, parameter in parameters.items():
            names.setdefault(id(parameter), {})[number] = name
    return [by_stage for by_stage in names.values() if len(by_stage) > 1]


class SequentialStage(nn.Module):  # type: ignore[misc]  # torch is untyped
    """Consecutive modules of an ``nn.Sequential``. Parameters have the names of the whole.

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

    def plan_layers(self) -> CutLayers | None:
        """Each module as a layer of a plan; None if a plan cannot have its name."""
        blocks = [*self._modules.items()]
        if not all(re.fullmatch(r"[\w-]+", name, re.ASCII) for name, _ in blocks):
            return None
        return CutLayers(tuple(f"layer.{name}" for name, _ in blocks), blocks)

    def boundary_of(self, position: int, output: Any) -> tuple[torch.Tensor, ...]:
        """The tensors that cross after a module, see ``CutStage``."""
        return plain_leaves_of(output, f"module {position}")[1]


def stages_of_sequential(
    sequential: nn.Sequential, num_stages: int, *, sizes: Sequence[int] | None = None
) -> ModelStages:
    """Cut an ``nn.Sequential`` into stages that hold its own modules.

    A parameter has the same name in its stage as in ``sequential``: state dicts of stages are parts of its state dict.
    ``sizes`` gives the number of modules of each stage. By default the numbers differ by one at most, and the first
    stages have more. Micro-batches pass between stages as its modules pass values, with one exception: a tuple of one
    tensor arrives as the tensor. Parameters that several stages share are listed in ``ModelStages.tied``.

    Raises:
        ValueError: It is not a plain ``nn.Sequential``, its sizes do not fit, or stages would share a module with
            buffers.
    """
    if not isinstance(sequential, nn.Sequential) or type(sequential).forward is not nn.Sequential.forward:
        raise ValueError(
            f"{type(sequential).__name__} is not an nn.Sequential with the forward of nn.Sequential: pass your own "
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
