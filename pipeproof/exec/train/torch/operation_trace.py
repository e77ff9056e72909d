"""Digests of tensors: of the operation that made each, and of the digests of the tensors that the operation read.

Two runs give tensors of one digest exactly if they apply the same operations to the same weights and inputs. Values do
not matter, so that this works on the meta device, with zeros among the weights, and with dropout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

_OF_THE_FORM = {
    "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like",
    "zeros_like",
}  # fmt: skip
"""Operations that read shape and type of their first argument alone."""


class OperationTrace(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped
    """A mode in which each tensor gets a digest. ``named`` are weights and inputs, which have the same in all runs."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._digests = WeakTensorKeyDictionary()
        self._written: dict[int, tuple[torch.UntypedStorage, str]] = {}
        """Memory that operations wrote to, with the digest of all writes."""
        for name, tensor in named.items():
            self._digests.setdefault(tensor, _digest("named", name))

    def digest_of(self, tensor: torch.Tensor) -> str:
        """The digest of a tensor; a constant of the code has that of its values."""
        digest = self._digests.get(tensor)
        if digest is None:
            values = None if tensor.is_meta else tensor.detach().cpu().flatten().tolist()
            digest = self._digests[tensor] = _digest("constant", tensor.dtype, tuple(tensor.shape), values)
        written = self._written.get(tensor.untyped_storage()._cdata)  # noqa: SLF001 - identity of the memory
        return digest if written is None else _digest(digest, written[1])

    def digests_of(self, value: Any) -> list[str]:
        """The digests of all tensors in a value."""
        return [self.digest_of(leaf) for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read: Any = tree_map(self._described, (args, kwargs))
        if func.__name__.split(".")[0] in _OF_THE_FORM:
            read = (tuple(args[0].shape), args[0].dtype, read[0][1:], read[1])
        digest = _digest(func, read)
        result = func(*args, **kwargs)
        before = {id(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        for position, leaf in enumerate(tree_leaves(result)):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in before:
                self._digests[leaf] = _digest(digest, position)
        for argument, value in zip(func._schema.arguments, args, strict=False):  # noqa: SLF001 - no public query
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._write(value, digest)
        for argument in func._schema.arguments:  # noqa: SLF001
            if argument.name in kwargs and argument.alias_info is not None and argument.alias_info.is_write:
                self._write(kwargs[argument.name], digest)
        return result

    def _described(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.digest_of(leaf)
        return "generator" if isinstance(leaf, torch.Generator) else leaf

    def _write(self, value: Any, digest: str) -> None:
        for tensor in tree_leaves(value):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                earlier = self._written.get(storage._cdata, (storage, ""))[1]  # noqa: SLF001
                self._written[storage._cdata] = storage, _digest(earlier, digest)  # noqa: SLF001


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
