"""Record of one rank of any program: inputs and outputs of its modules, forward and backward, and weight gradients.

A framework calls ``entered`` and ``left`` around each module, ``scalar_backward`` for each loss, and ``finish`` at the
end of a step. A tensor that passes several modules unchanged is read once, and so is its gradient, which is the sum
over all its readers.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from pipeproof.analysis.align.array_digests import Array, fast_digest, md5_of
from pipeproof.analysis.align.record_format import (
    DECIMALS,
    WHOLE,
    Header,
    Index,
    Layout,
    OtherRecorded,
    Recorded,
    RecordedStep,
    Shard,
    value_name,
)
from pipeproof.exec.compare.run_record import RecordWriter
from pipeproof.version import __version__


class Tensors(Protocol):
    """A framework's tensors."""

    def leaves(self, values: Any) -> list[Any]:
        """All tensors in nested values, in order."""
        ...

    def to_numpy(self, tensor: Any) -> tuple[Array, str]:
        """The elements of this rank, which may share memory, and their type; 16-bit types are given as float32."""
        ...

    def version(self, tensor: Any) -> int:
        """A number that increases with each change in place."""
        ...

    def on_gradient(self, tensor: Any, call: Callable[[Any], None]) -> Any:
        """Call with the gradient when a backward has it; return a handle with ``remove()``, None without gradient."""
        ...

    def layout_of(self, tensor: Any, module: Any, side: Literal["input", "output"]) -> Layout | None:
        """Layout of a module's input or output; None if neither is marked as a part."""
        ...


class WeightGradient(NamedTuple):
    """A parameter's gradient as the optimizer reads it; ``in_first``: a matrix is [in, out]."""

    name: str
    layer: str
    value: Any
    layout: Layout | None
    in_first: bool = False


class _Label(NamedTuple):
    """An input or output of a module that a tensor passes."""

    layer: str
    direction: Literal["forward", "backward"]
    side: Literal["input", "output"]
    micro_batch: int
    piece: int
    layout: Layout | None


class _Content(NamedTuple):
    """Digest and form of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    digest: str
    norm: float


@dataclass(slots=True)
class _Passing:
    """A tensor that passes inputs and outputs of modules."""

    ref: weakref.ref[Any]
    version: int
    content: _Content
    labels: list[_Label]
    has_hook: bool = False
    is_done: bool = False
    """True once the gradient of all labels is recorded; a leaf may pass again in the next micro-batch."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The tensors whose values are kept: with a name that matches a pattern, or with at most ``largest`` bytes."""

    names: Sequence[str] = ()
    largest: int = 0

    def has(self, name: str, num_bytes: int) -> bool:
        """True if a tensor is kept."""
        return num_bytes <= self.largest or any(fnmatchcase(name, pattern) for pattern in self.names)

    def __bool__(self) -> bool:
        return bool(self.names or self.largest)


@dataclass(slots=True)
class _Step:
    """The lines of a step so far, and the counts that name them."""

    lines: list[Recorded] = field(default_factory=list)
    values: dict[str, Array] = field(default_factory=dict)
    losses: list[Array] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    pieces: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    passing: dict[int, _Passing] = field(default_factory=dict)
    hooks: list[Any] = field(default_factory=list)
    reached: dict[str, int] = field(default_factory=dict)
    """For each layer, when its backward was last seen."""


class LayerRecorder:
    """Writer of one rank's record; see the module.

    Raises:
        FileExistsError: the directory has a record of this rank.
    """

    def __init__(self, directory: Path, header: Header, rank: int, tensors: Tensors, kept: Kept) -> None:
        self._writer = RecordWriter(directory, header, rank)
        self._rank, self._tensors, self._kept = rank, tensors, kept
        self._step, self._number = _Step(), 0
        self._running: list[tuple[str, int]] = []
        self._last_time = 0

    def entered(self, name: str, module: Any, values: Any, *, is_again: bool) -> None:
        """A module is called with ``values``; ``is_again`` is True in a backward that recomputes it."""
        micro_batch = self._running[0][1] if self._running else self._count(f"{name} again" if is_again else name)
        self._running.append((name, micro_batch))
        self._see_boundary(name, module, "input", values, is_again=is_again)

    def left(self, name: str, module: Any, values: Any, *, is_again: bool) -> None:
        """The module's call returns ``values``."""
        self._see_boundary(name, module, "output", values, is_again=is_again)
        self._running.pop()

    def scalar_backward(self, loss: Any) -> None:
        """A backward starts at a scalar, the loss of a micro-batch."""
        self._step.losses.append(self._tensors.to_numpy(loss)[0].reshape(()).copy())

    def finish(self, gradients: Iterable[WeightGradient]) -> None:
        """End a step; ``gradients`` has the gradients of all parameters, from the last layer on."""
        step = self._step
        if not step.lines:
            return
        for each in gradients:
            content = self._content(each.value, each.name)
            line = self._line(_Label(each.layer, "backward", "output", 0, 0, each.layout), content, each.value)
            when = step.reached.get(each.layer, line.time)
            step.lines.append(replace(line, parameter=each.name, time=when, in_first=each.in_first))
        losses = [OtherRecorded(f"main/{i}", _decimals(loss), md5_of(loss)) for i, loss in enumerate(step.losses)]
        total = np.add.reduce(step.losses) if step.losses else None
        recorded = RecordedStep(
            self._number,
            None if total is None else _decimals(total),
            None if total is None else md5_of(np.asarray(total)),
            tuple(step.lines),
            tuple(losses) if len(losses) > 1 else (),
        )
        self._writer.put(recorded, step.values if self._kept else None)
        self._number += 1
        self.forget()

    def forget(self) -> None:
        """Drop all records since the end of the last step, and the hooks on their tensors."""
        for hook in self._step.hooks:
            hook.remove()
        self._step = _Step()

    def _count(self, name: str) -> int:
        self._step.calls[name] += 1
        return self._step.calls[name] - 1

    def _see_boundary(
        self, name: str, module: Any, side: Literal["input", "output"], values: Any, *, is_again: bool
    ) -> None:
        micro_batch = self._running[0][1]
        for tensor in self._tensors.leaves(values):
            layout = self._tensors.layout_of(tensor, module, side)
            key = (name, "again" if is_again else "forward", side, micro_batch)
            piece = self._step.pieces[key]
            self._step.pieces[key] += 1
            passing = self._passing(tensor, name)
            if not is_again:
                label = _Label(name, "forward", side, micro_batch, piece, layout)
                self._step.lines.append(self._line(label, passing.content, tensor))
            if passing.is_done:
                passing.labels.clear()
                passing.is_done = False
            other: Literal["input", "output"] = "input" if side == "output" else "output"
            passing.labels.append(_Label(name, "backward", other, micro_batch, piece, layout))

    def _passing(self, tensor: Any, name: str) -> _Passing:
        """The tensor's last record, or a new one if the tensor is new or has changed since."""
        cached, version = self._step.passing.get(id(tensor)), self._tensors.version(tensor)
        if cached is not None and cached.ref() is tensor and cached.version == version:
            passing = cached
        else:
            passing = _Passing(weakref.ref(tensor), version, self._content(tensor, name), [])
            self._step.passing[id(tensor)] = passing
        if not passing.has_hook:
            hook = self._tensors.on_gradient(tensor, lambda gradient: self._backward(gradient, passing))
            if hook is not None:
                self._step.hooks.append(hook)
                passing.has_hook = True
                passing.labels.clear()  # of a checkpoint, which recomputes the modules that made it
        return passing

    def _backward(self, gradient: Any, passing: _Passing) -> None:
        labels = [label for label in passing.labels if label.micro_batch == passing.labels[0].micro_batch]
        passing.is_done = len(labels) == len(passing.labels)
        if not passing.is_done:
            del passing.labels[: len(labels)]
        content = self._content(gradient, labels[-1].layer)
        for label in reversed(labels):  # readers of the tensor give its gradient before its maker takes it
            key = label[:-1]
            again = self._step.pieces[key]
            self._step.pieces[key] += 1
            line = self._line(label._replace(piece=label.piece + _AGAIN * again), content, gradient)
            self._step.lines.append(line)
            self._step.reached[label.layer] = line.time

    def _content(self, tensor: Any, name: str) -> _Content:
        array, dtype = self._tensors.to_numpy(tensor)
        digest, norm = fast_digest(array)
        if self._kept.has(name, array.nbytes):
            self._keep(digest, array)
        return _Content(array.shape, dtype, digest, norm)

    def _keep(self, digest: str, array: Array) -> None:
        self._step.values.setdefault(value_name(digest, array.dtype.name), array.copy())

    def _line(self, label: _Label, content: _Content, tensor: Any) -> Recorded:
        shape, indexes = label.layout or (content.shape, (tuple((0, size) for size in content.shape),))
        digests = [content.digest]
        if len(indexes) > 1:
            parts = split_parts(self._tensors.to_numpy(tensor)[0], indexes)
            digests = [fast_digest(part)[0] for part in parts]
            for digest, part in zip(digests, parts, strict=True):
                if value_name(content.digest, part.dtype.name) in self._step.values:
                    self._keep(digest, part)
        shards = tuple(Shard(self._rank, *each) for each in zip(digests, indexes, strict=True))
        self._last_time = max(time.time_ns(), self._last_time + 1)
        return Recorded(
            self._number, label.layer, shape, content.dtype, content.digest, content.norm, shards,
            label.direction, label.side, label.micro_batch, label.piece, time=self._last_time,
        )  # fmt: skip


_AGAIN = 1000
"""Added to a gradient's part number for each further backward through the same tensor."""


def split_parts(array: Array, indexes: Sequence[Index]) -> list[Array]:
    """The parts of a rank's tensor, one for each index: consecutive along the dim in which the indices differ."""
    first = indexes[0]
    dim = next((d for d in range(len(first)) if any(index[d] != first[d] for index in indexes)), 0)
    stops = np.cumsum([index[dim][1] - index[dim][0] for index in indexes])[:-1]
    return list(np.split(array, stops, axis=dim))


def _decimals(loss: Array) -> str:
    return f"{float(loss):.{DECIMALS}f}"


def named_modules(roots: Any, children: Callable[[Any], Iterable[tuple[str, Any]]]) -> dict[int, tuple[str, Any]]:
    """By id, the name and the module of all modules of a model or its stages, with the names of the whole model.

    Names do not contain wrappers. A stage, and a module that spans several stages (by its ``pre_process`` and
    ``post_process``), is not recorded. Blocks that know their ``layer_number`` in the whole model, from 1 on, are
    numbered by it.

    Raises:
        ValueError: two modules have one name.
    """
    named: dict[int, tuple[str, Any]] = {}
    stages = [*roots.values()] if isinstance(roots, Mapping) else [*roots] if _is_list(roots) else [roots]
    for root in stages:
        for name, module in _walk(root, "", children):
            if id(module) in named or _spans_stages(module) or (not name and _is_several(roots)):
                continue
            named[id(module)] = name or WHOLE, module
    counts = Counter(name for name, _ in named.values())
    repeated = next((name for name, count in counts.items() if count > 1), None)
    if repeated is not None:
        raise ValueError(
            f"{counts[repeated]} modules have the name {repeated!r}: pass the stages of `stages_of_sequential` or "
            "`stages_of_transformers`, whose names are the model's, or use these names in your stages"
        )
    return named


def _is_list(roots: Any) -> bool:
    return isinstance(roots, list | tuple)


def _is_several(roots: Any) -> bool:
    return isinstance(roots, Mapping) or (_is_list(roots) and len(roots) > 1)


def _spans_stages(module: Any) -> bool:
    first, last = getattr(module, "pre_process", True), getattr(module, "post_process", True)
    return not (first and last)


_WRAPPED = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_layers")
"""Names of a wrapper's only child: of PyTorch's and Megatron's, of compiled modules, of checkpoints, of Paddle's."""


def _walk(module: Any, name: str, children: Callable[[Any], Iterable[tuple[str, Any]]]) -> Iterable[tuple[str, Any]]:
    inner = [*children(module)]
    is_list = any(type(child).__name__ in ("ModuleList", "LayerList") for _, child in inner)
    if len(inner) == 1 and inner[0][0] in _WRAPPED and not is_list:
        yield from _walk(inner[0][1], name, children)
        return
    yield name, module
    for key, child in inner:
        number = getattr(child, "layer_number", None)
        key = str(number - 1) if key.isdecimal() and isinstance(number, int) else key
        yield from _walk(child, f"{name}.{key}" if name else key, children)


def gradient_of(weight: Any) -> Any:
    """A parameter's gradient; for Megatron's and Fleet's parameters the buffer in which micro-batches are added up."""
    main = getattr(weight, "main_grad", None)
    return weight.grad if main is None else main


def trained_weights(
    modules: Mapping[int, tuple[str, Any]], own: Callable[[Any], Iterable[tuple[str, Any]]]
) -> dict[int, tuple[str, str, Any, Any]]:
    """By id, the name, the layer's name, the weight and the module of all weights, in the order of ``modules``.

    ``own`` returns the trained weights of one module.
    """
    by_id: dict[int, tuple[str, str, Any, Any]] = {}
    for layer, module in modules.values():
        for key, weight in own(module):
            by_id.setdefault(id(weight), (key if layer == WHOLE else f"{layer}.{key}", layer, weight, module))
    return by_id


def program_header(framework: str, dtype: str, modules: Mapping[int, tuple[str, Any]], kept: Kept) -> Header:
    """The header of a program's record, with facts of the model from its modules' configurations."""
    configs = (getattr(module, "config", None) for _, module in modules.values())
    return Header(
        "program", __version__, "", framework, dtype, 0, layers=True, values=bool(kept),
        model=next(filter(None, map(_head_counts, configs)), {}),
    )  # fmt: skip


def _head_counts(config: Any) -> dict[str, int]:
    """Numbers of heads of a model's configuration, by pipeproof's names; empty without one."""
    keys = {
        "num_heads": ("num_attention_heads", "n_head"),
        "num_kv_heads": ("num_key_value_heads", "num_query_groups"),
    }
    numbers = {
        key: next((getattr(config, n, None) for n in names if getattr(config, n, None)), None)
        for key, names in keys.items()
    }
    return {key: int(number) for key, number in numbers.items() if number} if numbers["num_heads"] else {}
