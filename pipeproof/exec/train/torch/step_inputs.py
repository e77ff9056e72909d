"""The split of a step's arguments, target and example into micro-batches, by the same rules.

The rows of a step are known: the rows of a micro-batch times the number of micro-batches.

- A tensor whose first dim is the rows is split along it.
- A ``BlockMask`` of FlexAttention is split along its batch dim, or shared if that is 1.
- A scalar (a number, a text, None, a 0-dim tensor) is shared.
- A dict, list, tuple or pytree that is registered in ``torch.utils._pytree`` is split value by value.
- ``MicroBatches`` lists the values of all micro-batches.
- All else is refused, unless ``split_dims`` or ``same_kwargs`` names it.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from pipeproof.exec.store.train_errors import PipelineError
from pipeproof.exec.train.stage_boundaries import kind_text
from pipeproof.exec.train.torch.module_stage import StepData
from pipeproof.exec.train.torch.stage_keywords import AssignedInputs, StageKeywords, StepInputs
from pipeproof.exec.train.torch.stage_values import MicroBatches

SCALARS = (Number, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Values without rows."""


@dataclass(frozen=True, slots=True)
class SplitRules:
    """Exceptions by key path, such as ``position_ids`` or ``batch.masks.0``; a path also names all values inside of it.

    ``split_dims`` are dims whose size is the rows or a multiple of them; the values in ``same`` are not split.
    """

    split_dims: Mapping[str, int]
    same: frozenset[str]

    @property
    def content(self) -> dict[str, Any]:
        """The rules as JSON values."""
        return {"split_dims": dict(self.split_dims), "same_kwargs": sorted(self.same)}

    def require_valid(self, keywords: StageKeywords) -> None:
        """Refuse other values than dims, names that no stage has, and paths with two rules.

        Raises:
            PipelineError: names the path.
        """
        for path, dim in self.split_dims.items():
            if not isinstance(dim, int) or isinstance(dim, bool):
                raise PipelineError(f"split_dims has {dim!r} for {path!r}: give the dim of the rows, such as 1")
            if path in self.same:
                raise PipelineError(f"{path!r} is in split_dims and in same_kwargs: use one of them")
        keywords.require_named(self.split_dims, "split_dims")
        keywords.require_named(self.same, "same_kwargs")

    def dim_of(self, path: str) -> int | None:
        """The dim of the rows of a value; None without a rule."""
        return next((dim for key, dim in self.split_dims.items() if _is_within(path, key)), None)

    def is_same(self, path: str) -> bool:
        """True for a value that is not split."""
        return any(_is_within(path, key) for key in self.same)


class StepContract:
    """The rules for a step's arguments, and the stages that get them."""

    def __init__(self, keywords: StageKeywords, rules: SplitRules) -> None:
        self.keywords, self._rules = keywords, rules

    def sizes(self, inputs: StepInputs) -> tuple[int | None, int | None]:
        """The number of micro-batches that values of a step are listed for, and its rows; None where unknown.

        Raises:
            PipelineError: no stage accepts a value.
        """
        assigned = self.keywords.assigned(inputs)
        own = self.keywords.names_of(0, assigned.kwargs, assigned.args)
        named = {**assigned.args, **{name: assigned.kwargs[name] for name in own}, **assigned.stage_kwargs.get(0, {})}
        named = named or {**assigned.target, **assigned.kwargs}
        listed = {name: num for name, value in named.items() if (num := _num_listed(value)) is not None}
        if not listed:
            return None, _rows(named, self._rules, 0)
        num = next(iter(listed.values()))
        rows = [_rows({name: named[name] for name in listed}, self._rules, index) for index in range(num)]
        return num, None if None in rows else sum(each or 0 for each in rows)

    def step_data(
        self, inputs: StepInputs, num: int, rows: int | None, stages: Sequence[int], *, is_last: bool
    ) -> StepData:
        """Split a step of ``rows`` rows into ``num`` micro-batches, for some stages; None does not check the rows.

        Raises:
            PipelineError: a value that the rules do not split, or that no stage accepts.
        """
        assigned, is_first = self.keywords.assigned(inputs), 0 in stages
        if is_first and self.keywords.missing(assigned):
            raise PipelineError("this rank has the first stage: pass its arguments to step()")
        split = _Split(self._rules, num, rows, num)
        data = StepData(split.args(assigned) if is_first else (), self._stage_kwargs(split, assigned, stages))
        if is_last:
            data.targets = split.target(assigned)
            data.loss_kwargs = split.dicts(inputs.loss_kwargs)
        split.require_paths()
        return data

    def whole_data(self, inputs: StepInputs, num: int, rows: int | None) -> StepData:
        """Split a step of the unpartitioned module, which gets the keyword arguments of all stages (under 0).

        Raises:
            PipelineError: as ``step_data``; or stages get different values of one name.
        """
        assigned = self.keywords.assigned(inputs)
        kwargs = dict(assigned.kwargs)
        for number, named in assigned.stage_kwargs.items():
            for name, value in named.items():
                if kwargs.setdefault(name, value) is not value:
                    raise PipelineError(
                        f"compare() passes one {name!r} to the reference, and stage_kwargs has another for stage "
                        f"{number}"
                    )
        split = _Split(self._rules, num, rows, num)
        loss_kwargs = split.dicts(inputs.loss_kwargs)
        return StepData(split.args(assigned), {0: split.dicts(kwargs)}, split.target(assigned), loss_kwargs)

    def example_data(self, inputs: StepInputs, num: int, num_stages: int) -> tuple[StepData, int | None]:
        """The example of each of ``num`` micro-batches for all stages, and the rows of a micro-batch.

        ``MicroBatches`` lists their values; every micro-batch gets all other values. The rows are None if the first
        stage gets no tensor.

        Raises:
            PipelineError: as ``step_data``; or the rows of micro-batches differ.
        """
        assigned = self.keywords.assigned(inputs)
        own = self.keywords.names_of(0, assigned.kwargs, assigned.args)
        named = {**assigned.args, **{name: assigned.kwargs[name] for name in own}, **assigned.stage_kwargs.get(0, {})}
        rows = [_rows(named, self._rules, index) for index in range(num)]
        if len(set(rows)) > 1:
            raise PipelineError(f"the micro-batches of the example have {rows} rows: all need the same number")
        split = _Split(self._rules, num, rows[0], 1)
        data = StepData(split.args(assigned), self._stage_kwargs(split, assigned, range(num_stages)))
        split.require_paths()
        return data, rows[0]

    def _stage_kwargs(
        self, split: _Split, assigned: AssignedInputs, stages: Sequence[int]
    ) -> dict[int, list[dict[str, Any]]]:
        """The keyword arguments of stages by micro-batch; a value that several stages get is split once."""
        common: dict[str, list[Any]] = {}
        result = {}
        for number in stages:
            own = assigned.stage_kwargs.get(number, {})
            names = self.keywords.names_of(number, assigned.kwargs, assigned.args)
            for name in names:
                if name not in common and name not in own:
                    common[name] = split.parts(assigned.kwargs[name], name)
            columns = {name: common[name] for name in names if name not in own}
            columns |= {name: split.parts(value, name) for name, value in own.items()}
            if columns:
                result[number] = _by_index(columns, split.num)
        return result


class _Split:
    """The split of the values of one step into ``num`` micro-batches.

    Tensors of ``rows`` rows are cut into ``num_parts``: ``num``, or 1 for an example, which every micro-batch gets
    whole. Rows are not checked if they are None.
    """

    def __init__(self, rules: SplitRules, num: int, rows: int | None, num_parts: int) -> None:
        self.num, self._rules, self._rows, self._num_parts = num, rules, rows, num_parts
        self._roots: list[str] = []
        self._paths: list[str] = []
        """Paths of values that were not split further."""

    def args(self, assigned: AssignedInputs) -> list[tuple[Any, ...]]:
        """The positional arguments of the first stage by micro-batch."""
        columns = [self.parts(value, name) for name, value in assigned.args.items()]
        return [tuple(column[index] for column in columns) for index in range(self.num)]

    def dicts(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Named values by micro-batch."""
        return _by_index({name: self.parts(value, name) for name, value in values.items()}, self.num)

    def target(self, assigned: AssignedInputs) -> list[Any] | None:
        """The target by micro-batch."""
        return next((self.parts(value, name) for name, value in assigned.target.items()), None)

    def parts(self, value: Any, name: str) -> list[Any]:
        """One argument by micro-batch."""
        self._roots.append(name)
        return self._parts(value, name)

    def require_paths(self) -> None:
        """Refuse rules for values that the arguments do not have."""
        for argument, keys in (("split_dims", self._rules.split_dims), ("same_kwargs", self._rules.same)):
            for key in keys:
                if any(_is_within(key, root) for root in self._roots) and not any(
                    _is_within(path, key) or _is_within(key, path) for path in self._paths
                ):
                    raise PipelineError(f"{argument} names {key!r}, and the argument has no such value")

    def _parts(self, value: Any, path: str) -> list[Any]:
        if not isinstance(value, MicroBatches) and not self._rules.is_same(path):
            children = _children(value, path)
            if children is not None:
                return self._container(value, path, children)
        self._paths.append(path)
        if isinstance(value, MicroBatches):
            value.require_num(self.num, path)
            return list(value)
        if (
            self._rules.is_same(path)
            or isinstance(value, SCALARS)
            or (isinstance(value, torch.Tensor) and not value.dim())
        ):
            return [value] * self.num
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if _is_block_mask(value):
            return self._block_mask(value, path)
        raise PipelineError(f"{self._what(path)} is {kind_text(value)}, {_leaf_fix(value, path)}")

    def _container(self, value: Any, path: str, children: _Children) -> list[Any]:
        is_sequence = isinstance(value, tuple | list | deque) and not hasattr(value, "_fields")
        if is_sequence and value and not any(map(_has_rows, tree_leaves(value, is_leaf=_has_rows))):
            self._paths.append(path)
            return self._values(value, path)
        columns = [self._parts(child, child_path) for child_path, child in children.items]
        return [tree_unflatten([column[index] for column in columns], children.spec) for index in range(self.num)]

    def _values(self, values: Sequence[Any], path: str) -> list[Any]:
        """Values without tensors, which may be one for each row."""
        dim = self._rules.dim_of(path)
        if dim is None:
            raise PipelineError(
                f"{self._what(path)} is {kind_text(values)} of {len(values)} values without tensors, which may be rows "
                f"or not: write split_dims={{{path!r}: 0}} if they are one for each row, {_common_fix(path)}"
            )
        self._require_dim(path, (len(values),), dim)
        kind: Callable[[list[Any]], Any] = type(values)
        whole, size = list(values), len(values) // self._num_parts
        parts = [kind(whole[start : start + size]) for start in range(0, len(whole), size)]
        return parts * (self.num // self._num_parts)

    def _tensor(self, value: torch.Tensor, path: str) -> list[Any]:
        dim, shape = self._rules.dim_of(path), tuple(value.shape)
        if dim is not None:
            self._require_dim(path, shape, dim)
        elif self._rows is not None and (shape[0] != self._rows or self._is_ambiguous(value, path)):
            raise self._other_rows(shape, path)
        if self._num_parts == 1:
            return [value] * self.num
        dim = dim or 0
        if value.layout is torch.jagged and dim == 0:
            return list(value.chunk(self._num_parts))
        if value.layout is not torch.strided or value.is_nested:
            raise PipelineError(f"{self._what(path)} is a tensor of layout {value.layout}, {_common_fix(path)}")
        return list(value.split(shape[dim] // self._num_parts, dim))

    def _block_mask(self, mask: Any, path: str) -> list[Any]:
        """A mask of FlexAttention; a mask with one row is for all rows."""
        size = mask.kv_num_blocks.shape[0]
        if size == 1:
            return [mask] * self.num
        if self._rows is not None and size != self._rows:
            raise PipelineError(f"{self._what(path)} is a BlockMask of {size} rows, {self._has()}, {_common_fix(path)}")
        if self._num_parts == 1:
            return [mask] * self.num
        size //= self._num_parts
        return [_mask_part(mask, start, size) for start in range(0, mask.kv_num_blocks.shape[0], size)]

    def _require_dim(self, path: str, shape: tuple[int, ...], dim: int) -> None:
        if not -len(shape) <= dim < len(shape):
            raise PipelineError(f"split_dims has {dim} for {path!r}, whose shape is {list(shape)}")
        if self._rows is not None and (not shape[dim] or shape[dim] % self._rows):
            raise PipelineError(
                f"{self._what(path)} has the size {shape[dim]} in dim {dim} of split_dims, {self._has()}: give a "
                "multiple of the rows, or MicroBatches([..]) with a value for each micro-batch"
            )

    def _is_ambiguous(self, value: torch.Tensor, path: str) -> bool:
        """True for offsets, and for position ids with as many axes as rows: their first dim is the rows by chance."""
        if self.num == 1:
            return False
        is_integer = not value.is_floating_point() and value.dtype is not torch.bool
        return _is_offsets(path) or (is_integer and value.dim() == 3 and value.shape[0] == value.shape[1])

    def _other_rows(self, shape: tuple[int, ...], path: str) -> PipelineError:
        dims = [dim for dim, size in enumerate(shape) if size == self._rows]
        fixes = [f"split_dims={{{path!r}: {dim}}} for the rows in dim {dim}" for dim in dims]
        rule, action = "tensors are split along their first dim", f"Pass {self._rows} rows, or write"
        if _is_offsets(path):
            fixes, rule, action = ["packed(..)"], "offsets of documents are not rows", "Write"
        elif len(dims) > 1 and not dims[0]:
            rule, action = f"dims {dims} may be the rows", "Write"
        elif shape[0] == 1:
            fixes.append("packed(..) for documents in one row")
        return PipelineError(
            f"{self._what(path)} has {shape[0]} rows (shape {list(shape)}), {self._has()}; {rule}. "
            f"{action} {', '.join([*fixes, _common_fix(path)])}"
        )

    def _what(self, path: str) -> str:
        return f"{path} of the example" if self._num_parts < self.num else path

    def _has(self) -> str:
        if self._num_parts < self.num:
            return f"and its micro-batch has {self._rows}"
        of_each = (self._rows or 0) // self.num
        return f"and the step has {self._rows}: {self.num} micro-batches of {of_each}"


@dataclass(frozen=True, slots=True)
class _Children:
    """The values in a container, with their paths."""

    items: list[tuple[str, Any]]
    spec: TreeSpec


def _children(value: Any, path: str) -> _Children | None:
    """The values in a container; None for any other value."""
    if isinstance(value, torch.Tensor | MicroBatches | str) or _is_block_mask(value):
        return None
    children, spec = tree_flatten(value, is_leaf=lambda inner: inner is not value)
    if len(children) == 1 and children[0] is value:
        return None
    keys: Sequence[Any] = list(value) if isinstance(value, dict) else getattr(value, "_fields", range(len(children)))
    return _Children([(f"{path}.{key}", child) for key, child in zip(keys, children, strict=True)], spec)


def _rows(named: Mapping[str, Any], rules: SplitRules, index: int) -> int | None:
    """The rows of a micro-batch: of the first tensor without a rule, else of the first one in ``split_dims``."""
    by_rule = None
    for name, value in named.items():
        for path, leaf in _leaves(value, name, index):
            if isinstance(leaf, torch.Tensor) and leaf.dim() and not rules.is_same(path):
                dim = rules.dim_of(path)
                if dim is None:
                    return int(leaf.shape[0])
                if by_rule is None and dim < leaf.dim():
                    by_rule = int(leaf.shape[dim])
    return by_rule


def _num_listed(value: Any) -> int | None:
    """The number of values of the first ``MicroBatches`` in a value."""
    leaves = tree_leaves(value, is_leaf=lambda inner: isinstance(inner, MicroBatches))
    return next((len(leaf) for leaf in leaves if isinstance(leaf, MicroBatches)), None)


def _leaves(value: Any, path: str, index: int) -> Iterator[tuple[str, Any]]:
    """The values of one micro-batch that are not containers, with their paths."""
    if isinstance(value, MicroBatches):
        yield from _leaves(value[min(index, len(value) - 1)], path, index) if value else ()
        return
    children = _children(value, path)
    if children is None:
        yield path, value
        return
    for child_path, child in children.items:
        yield from _leaves(child, child_path, index)


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | MicroBatches) or _is_block_mask(leaf)


def _is_block_mask(value: Any) -> bool:
    flex_attention = sys.modules.get("torch.nn.attention.flex_attention")  # without it nobody has made one
    return flex_attention is not None and isinstance(value, flex_attention.BlockMask)


def _is_offsets(path: str) -> bool:
    """True for what FlashAttention and Hugging Face call offsets of documents: ``cu_seqlens``, ``cu_seq_lens_q``."""
    return path.rpartition(".")[2].startswith("cu_seq")


def _mask_part(mask: Any, start: int, size: int) -> Any:
    """Some rows of a ``BlockMask``; its ``mask_mod`` gets their numbers in the whole mask."""
    num_rows, part = mask.kv_num_blocks.shape[0], copy.copy(mask)
    for name, value in vars(mask).items():
        if isinstance(value, torch.Tensor) and value.shape[:1] == (num_rows,):
            setattr(part, name, value[start : start + size])
    first = torch.full((), start, dtype=torch.int32, device=mask.kv_num_blocks.device)
    part.mask_mod = _with_rows_from(mask.mask_mod, first)
    return part


def _with_rows_from(mask_mod: Callable[..., torch.Tensor], first: torch.Tensor) -> Callable[..., torch.Tensor]:
    """A ``mask_mod`` for later rows; ``first`` is a tensor: all micro-batches then share one compiled kernel."""

    def mask_of_rows(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return mask_mod(row + first, head, query, key)

    return mask_of_rows


def _is_within(path: str, key: str) -> bool:
    return path == key or path.startswith(f"{key}.")


def _by_index(columns: Mapping[str, Sequence[Any]], num: int) -> list[dict[str, Any]]:
    return [{name: column[index] for name, column in columns.items()} for index in range(num)]


def _common_fix(path: str) -> str:
    return f"same_kwargs=[{path!r}] if each micro-batch gets it whole, or MicroBatches([..]) with a value for each"


def _leaf_fix(value: Any, path: str) -> str:
    if type(value).__module__ == "numpy":
        return f"which is not split: pass torch.from_numpy(..), {_common_fix(path)}"
    if isinstance(value, Mapping):
        return f"which is not split: pass dict(..), {_common_fix(path)}"
    return (
        "whose rows are not known: tensors, numbers, texts, and dicts, lists, tuples and registered pytrees of them "
        f"are split. Write {_common_fix(path)}; torch.utils._pytree.register_pytree_node registers a class with tensors"
    )
