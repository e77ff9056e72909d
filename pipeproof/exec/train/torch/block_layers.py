"""Layers of a stage that was cut from a model: their names in a plan, their weights, and their outputs in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from pipeproof.diagnostics.problems import grouped
from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.plan_layers import stage_name
from pipeproof.exec.train.stage_boundaries import LeafSpec
from pipeproof.exec.train.torch.model_names import unwrapped
from pipeproof.exec.train.torch.module_stage import trained
from pipeproof.exec.train.torch.partial_modules import hidden_of


@dataclass(frozen=True, slots=True)
class CutLayers:
    """The layers of one stage in execution order: blocks, and the modules before and after them.

    ``blocks`` are the modules that are layers of their own, by their names in the stage, as the stage calls them; the
    layer of the first one has the number ``first``, which is 1 where a layer for the modules before it comes first.
    ``late`` are names of modules that the stage runs after the blocks, where it has a layer for those before them, too.
    ``num_shared`` of the tensors that the stage receives cross all boundaries after it, before what blocks return.
    """

    names: tuple[str, ...]
    blocks: Sequence[tuple[str, nn.Module]]
    first: int = 0
    late: tuple[str, ...] = ()
    num_shared: int = 0

    def locate(self, name: str) -> tuple[int, str]:
        """The layer of a weight by its name in the stage, and the name in the layer."""
        for number, (block, _) in enumerate(self.blocks, self.first):
            if name.startswith(f"{block}."):
                return number, name.removeprefix(f"{block}.")
        is_late = not self.first or any(f"{name}.".startswith(f"{part}.") for part in self.late)
        return (len(self.names) - 1 if is_late else 0), name


@runtime_checkable
class CutStage(Protocol):
    """A stage that one of the cutters made."""

    def plan_layers(self) -> CutLayers | None:
        """The layers of the stage; None if it has no blocks, nor what is before or after them."""

    def boundary_of(self, position: int, output: Any) -> tuple[torch.Tensor, ...]:
        """The tensors that would cross a boundary after a block, by its position among the stage's blocks.

        Raises:
            PipelineError: the output cannot cross.
        """


def layers_of(stage: nn.Module) -> CutLayers | None:
    """The layers of a stage, which DDP or ``torch.compile`` may wrap; None for one that was made by hand."""
    inner = unwrapped(stage)
    return inner.plan_layers() if isinstance(inner, CutStage) else None


def layer_names(number: int, stage: nn.Module) -> list[str]:
    """The names of a stage's layers in a plan."""
    layers = layers_of(stage)
    return [stage_name(number)] if layers is None else [*layers.names]


def described_layers(
    number: int, stage: nn.Module, layers: CutLayers | None, *, is_frozen: bool = False
) -> list[dict[str, Any]]:
    """The layers of a stage with their kinds and trained weights: the first keys of ``LayerFacts``.

    A weight belongs to the first layer that uses it. Without ``layers`` the stage is one. With ``is_frozen`` it is of a
    frozen module, and all weights are listed.
    """
    listed = partial(trained, frozen=is_frozen)
    if layers is None:
        weights = {name: (name, weight) for name, weight in listed(stage).items()}
        return [_described(stage_name(number), type(unwrapped(stage)).__name__, weights)]
    users = grouped((id(weight), layers.locate(name)) for name, weight in listed(stage, repeats=True).items())
    owned: list[dict[str, tuple[str, nn.Parameter]]] = [{} for _ in layers.names]
    shared: list[list[str]] = [[] for _ in layers.names]
    for name, weight in listed(stage).items():
        owner, local = min(users[id(weight)], key=lambda each: each[0])
        owned[owner][name] = local, weight
        for other in sorted({number for number, _ in users[id(weight)]} - {owner}):
            shared[other].append(name)
    return [
        _described(name, kind, weights, others)
        for name, kind, weights, others in zip(layers.names, _kinds(stage, layers, owned), owned, shared, strict=True)
    ]


def _described(
    name: str, kind: str, weights: Mapping[str, tuple[str, nn.Parameter]], shared: Sequence[str] = ()
) -> dict[str, Any]:
    parameters = [{"name": local, "shape": list(weight.shape)} for local, weight in weights.values()]
    return {"name": name, "kind": kind, "parameters": parameters, "names": [*weights], "shared": [*shared]}


def _kinds(
    stage: nn.Module, layers: CutLayers, owned: Sequence[Mapping[str, tuple[str, nn.Parameter]]]
) -> Iterator[str]:
    """The class of each block; for the layers around the blocks, the classes of all their modules with weights."""
    classes: dict[int, str] = {}
    for part in stage.modules():
        classes |= {id(x): type(part).__name__ for x in part.parameters(recurse=False) if id(x) not in classes}
    for number, weights in enumerate(owned):
        position = number - layers.first
        if 0 <= position < len(layers.blocks):
            yield type(unwrapped(layers.blocks[position][1])).__name__
        else:
            yield "+".join(dict.fromkeys(classes[id(weight)] for _, weight in weights.values()))


def leaf_specs(leaves: Sequence[torch.Tensor]) -> tuple[LeafSpec, ...]:
    """Shapes and types of tensors that cross a boundary together."""
    is_frozen = not any(leaf.requires_grad for leaf in leaves)  # zeros come back then
    return tuple(
        LeafSpec.of(leaf, has_gradient=leaf.is_floating_point() if is_frozen else leaf.requires_grad) for leaf in leaves
    )


class LayerWatch:
    """One run of a stage: the layer that runs at present, and the outputs of its layers but the last.

    Their tensors are not held: hooks of the run's autograd graph refer to the watch, which would keep the graph alive.
    """

    def __init__(self, stage: nn.Module, layers: CutLayers | None) -> None:
        self._stage, self._layers = unwrapped(stage), layers
        self._num_calls, self.current = 0, 0
        self.outputs: tuple[tuple[LeafSpec, ...], ...] | None = None if layers is None else ()

    @contextmanager
    def watching(self, received: Sequence[Any]) -> Iterator[None]:
        """Watch the run in this block; ``received`` are the stage's positional arguments.

        ``outputs`` are None after it if blocks were called otherwise than once, in order, or an output cannot cross.
        """
        layers = self._layers
        if layers is None:
            yield
            return
        self._shared = tuple(received[: layers.num_shared])
        modules = {id(block): block for _, block in layers.blocks}
        handles = [block.register_forward_pre_hook(self._before, with_kwargs=True) for block in modules.values()]
        handles += [block.register_forward_hook(self._after) for block in modules.values()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if self._num_calls != len(layers.blocks):
            self.outputs = None

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        assert self._layers is not None
        position, blocks = self._num_calls, self._layers.blocks
        if position < len(blocks) and blocks[position][1] is module:
            if not position and self._layers.first:
                self._put(lambda: (hidden_of(args, dict(kwargs)),))
            self.current = position + self._layers.first

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        assert self._layers is not None
        position, self._num_calls = self._num_calls, self._num_calls + 1
        last = len(self._layers.names) - 1
        if position >= len(self._layers.blocks) or self._layers.blocks[position][1] is not module:
            self.outputs = None
        elif self.current < last:
            self._put(lambda: self._stage.boundary_of(position, output))
            self.current += 1

    def _put(self, tensors: Callable[[], tuple[Any, ...]]) -> None:
        if self.outputs is not None:
            try:
                self.outputs += (leaf_specs((*self._shared, *tensors())),)
            except PipelineError:
                self.outputs = None
