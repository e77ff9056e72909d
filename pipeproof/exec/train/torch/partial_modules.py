"""Modules of a stage in the place of modules that other stages hold, and the tensors that a stage receives and sends.

A stage runs the model's own forward. Where it calls a module of another stage, one of these answers: the last block
before the stage's own returns what the stage received, and the stage's last block leaves its output for the next stage.
Their other results are not used.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten


@dataclass
class Link:
    """Tensors of one forward of a stage: what the block before its own returned, and what its last block returns."""

    received: tuple[torch.Tensor, ...] = ()
    sent: tuple[torch.Tensor, ...] = ()
    num_reads: int = 0

    def begin(self, received: tuple[torch.Tensor, ...]) -> None:
        """Start a forward."""
        self.received, self.sent, self.num_reads = received, (), 0

    def read(self) -> tuple[torch.Tensor, ...]:
        """Return the received tensors, for the stage's first block."""
        self.num_reads += 1
        return self.received


@dataclass(frozen=True)
class BlockOutput:
    """The structure of a block's output. ``tensors`` are positions among its leaves, others are constants."""

    spec: TreeSpec
    leaves: tuple[Any, ...]
    tensors: tuple[int, ...]

    @classmethod
    def of(cls, output: Any) -> BlockOutput:
        """The structure of an output that was seen."""
        leaves, spec = tree_flatten(output)
        tensors = tuple(number for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        kept = [None if number in tensors else leaf for number, leaf in enumerate(leaves)]
        return cls(spec, tuple(kept), tensors)

    def tensors_of(self, output: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of an output of this structure."""
        leaves = tree_leaves(output)
        return tuple(leaves[number] for number in self.tensors)

    def output_of(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """An output with these tensors."""
        leaves = list(self.leaves)
        for number, tensor in zip(self.tensors, tensors, strict=True):
            leaves[number] = tensor
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Shape:
    """A shape in terms of another tensor's: each size is the size of one of its dims, or a number."""

    dims: tuple[tuple[int | None, int], ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, other: torch.Tensor, free: frozenset[int]) -> Shape:
        """The shape of ``tensor``, in which sizes ``free`` are rows and lengths, by the first dims of ``other``."""
        sizes = list(other.shape)
        dims = [(sizes.index(size) if size in free and size in sizes else None, size) for size in tensor.shape]
        return cls(tuple(dims), tensor.dtype)

    def like(self, other: torch.Tensor) -> torch.Tensor:
        """A tensor of this shape that takes no memory."""
        sizes = [size if dim is None else other.shape[dim] for dim, size in self.dims]
        return other.new_zeros((), dtype=self.dtype).expand(sizes)


class _Substitute(nn.Module):  # type: ignore[misc]  # torch is untyped
    """A module in the place of another one, ``_replaced``, with all other attributes of it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, value in vars(module).items():
            if name not in vars(self) and isinstance(value, bool | int | float | str):
                self.__dict__[name] = value  # found by compilers without __getattr__
        self.training = module.training

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_replaced":
                raise
            return getattr(self.__dict__["_replaced"], name)


class _Absent(_Substitute):
    """A module without weights."""

    def __init__(self, module: nn.Module, link: Link) -> None:
        super().__init__(module)
        self.__dict__["_replaced"], self.__dict__["_link"] = without_values(module), link


class AbsentBlock(_Absent):
    """A block of another stage. It returns its input, or what the stage received if ``is_entry``.

    With ``is_exit`` it is the model's first block, and its input is what the stage sends.
    """

    def __init__(self, block: nn.Module, output: BlockOutput, link: Link, *, is_entry: bool, is_exit: bool) -> None:
        super().__init__(block, link)
        self._output, self._is_entry, self._is_exit = output, is_entry, is_exit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run in the place of the module."""
        link = self.__dict__["_link"]
        if self._is_entry:
            return self._output.output_of(link.read())
        hidden = hidden_of(args, kwargs)
        if self._is_exit:
            link.sent = (hidden,)
        return self._output.output_of((hidden,) * len(self._output.tensors))


class AbsentModule(_Absent):
    """A module of another stage outside of the blocks. It returns zeros of the shape of its output, or its input."""

    def __init__(self, module: nn.Module, shapes: Any, link: Link) -> None:
        super().__init__(module, link)
        self._shapes = shapes

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run in the place of the module."""
        received = self.__dict__["_link"].received
        if self._shapes is None or not received:
            return hidden_of(args, kwargs)
        return tree_map(lambda shape: shape.like(received[0]) if isinstance(shape, Shape) else shape, self._shapes)


class EdgeBlock(_Substitute):
    """The first or last block of a stage. The block is not a submodule, or names would have one part more."""

    def __init__(self, block: nn.Module, output: BlockOutput | None, link: Link, *, is_entry: bool) -> None:
        super().__init__(block)
        self.hold(block)
        self._output, self._is_entry = output, is_entry
        self.__dict__["_link"] = link

    @property
    def block(self) -> nn.Module:
        """The block that it runs."""
        return self.__dict__["_replaced"]

    def hold(self, block: nn.Module) -> None:
        """Run this block from now on."""
        for name in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[name] = vars(block)[name]
        self.__dict__["_replaced"] = block
        self.training = block.training

    def train(self, mode: bool = True) -> EdgeBlock:  # noqa: FBT002 - as of nn.Module
        """Set the mode of the block, too."""
        self.block.train(mode)
        self.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run in the place of the module."""
        link, block = self.__dict__["_link"], self.block
        if self._is_entry:
            args, kwargs = _with_hidden(link.read()[0], args, kwargs)
        output = block(*args, **kwargs)
        if self._output is not None:
            link.sent = self._output.tensors_of(output)
        return output


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The first tensor among the arguments of a module."""
    return next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)


def _with_hidden(
    hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (hidden, *args[1:]), kwargs
    name = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
    return args, {**kwargs, name: hidden}


def with_children(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """A copy that shares parameters, buffers and submodules, with some submodules replaced.

    A name with dots replaces a submodule of a copy of a submodule.
    """
    result = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict | set):  # hooks of the copy, for example, are not hooks of the model
            vars(result)[name] = copy.copy(value)
    kept: dict[str, nn.Module | None] = dict(vars(module)["_modules"])
    deeper: dict[str, dict[str, nn.Module]] = {}
    for name, child in children.items():
        first, _, rest = name.partition(".")
        if rest:
            deeper.setdefault(first, {})[rest] = child
        else:
            kept[name] = child
    for name, replaced in deeper.items():
        kept[name] = with_children(getattr(module, name), replaced)
    vars(result)["_modules"] = kept
    vars(result).pop("_compiled_call_impl", None)  # of module.compile(): it runs the module that was copied
    return result


def with_same_values(module: nn.Module, children: Mapping[str, nn.Module]) -> nn.Module:
    """A copy, see ``with_children``; an attribute that is set in it, such as a submodule, is set in ``module``, too."""
    result = with_children(module, children)
    _share_values(module, result)
    return result


def _share_values(module: nn.Module, copied: nn.Module) -> None:
    for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
        vars(copied)[name] = vars(module)[name]
    own, others = vars(copied)["_modules"], vars(module)["_modules"]
    nested = {name for name, child in own.items() if others[name] is not child}
    for name in nested:
        if not isinstance(others[name], EdgeBlock):
            _share_values(others[name], own[name])
    vars(copied)["_modules"] = _SyncedModules(own, others, nested)


class _SyncedModules(dict[str, Any]):
    """Submodules of a copied module; assignments also go to the module itself, except for ``nested`` copies."""

    def __init__(self, modules: Mapping[str, Any], others: dict[str, Any], nested: set[str]) -> None:
        super().__init__(modules)
        self._others, self._nested = others, nested

    def __setitem__(self, name: str, module: Any) -> None:
        super().__setitem__(name, module)
        other = self._others.get(name)
        if isinstance(other, EdgeBlock) and isinstance(module, nn.Module):
            other.hold(module)
        elif name not in self._nested:
            self._others[name] = module


def without_values(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers are on the meta device: code may read their types and shapes."""
    result = with_children(module, {name: without_values(child) for name, child in module.named_children()})
    for kind in ("_parameters", "_buffers"):
        kept = vars(module)[kind]
        vars(result)[kind] = {
            name: None if tensor is None else torch.empty_like(tensor.detach(), device="meta")
            for name, tensor in kept.items()
        }
    return result
