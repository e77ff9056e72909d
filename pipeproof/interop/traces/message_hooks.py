"""Hooks of the recorder: temporarily replaced functions, marks of prepared messages, calls and waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

from pipeproof.interop.traces.recorder import Call, CallSink, Tensor

ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
"""Collectives with a root."""


class Patches:
    """Replaces attributes; ``undo`` restores them, the last one first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def wrap(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        """Call ``hook(function, *arguments)`` in place of a function, if the owner has one of that name."""

        def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                return hook(function, *args, **kwargs)

            return call

        self.replace(owner, name, wrapping)

    def replace(self, owner: Any, name: str, wrapping: Callable[[Any], Any]) -> None:
        """Replace an attribute by ``wrapping(attribute)``, if the owner has one of that name."""
        own = vars(owner).get(name)
        attribute = getattr(owner, name, None)
        if attribute is not None:
            setattr(owner, name, wrapping(attribute))
            is_own = own is not None
            self._undo.append((lambda: setattr(owner, name, own)) if is_own else (lambda: delattr(owner, name)))

    def undo(self) -> None:
        """Restore everything."""
        while self._undo:
            self._undo.pop()()


class Marks:
    """Marks of prepared messages by the address of their tensor, which is kept alive until the message is issued."""

    def __init__(self) -> None:
        self._by_address: dict[tuple[bool, int], tuple[Any, dict[str, Any]]] = {}

    def add(self, tensor: Any, address: int, mark: dict[str, Any], *, is_send: bool) -> None:
        """Store the mark of the next message of a tensor."""
        self._by_address[is_send, address] = tensor, mark

    def of(self, call: Call) -> dict[str, Any] | None:
        """Return the mark of a message, once; None if it was not prepared."""
        if call.op not in ("send", "recv"):
            return None
        is_send = call.op == "send"
        tensors = call.inputs if is_send else call.outputs
        return self.take(tensors[0].start, is_send=is_send) if tensors else None

    def take(self, address: int, *, is_send: bool) -> dict[str, Any] | None:
        """Return the mark of the message whose tensor is at an address, once; None if it was not prepared."""
        entry = self._by_address.pop((is_send, address), None)
        return None if entry is None else entry[1]

    def __bool__(self) -> bool:
        return bool(self._by_address)


class GroupCalls(ABC):
    """Writes the calls of a framework's process groups, and the waits for them, into a log or a ring.

    ``_handles`` has the numbers of the calls that a task or work object waits for.
    """

    def __init__(self, recorder: CallSink) -> None:
        self._recorder = recorder
        self._handles: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()
        self._marks = Marks()

    @abstractmethod
    def wrap(self, patches: Patches) -> None:
        """Wrap all functions that communicate."""

    @contextmanager
    def recording(self) -> Iterator[CallSink]:
        """Record until the block ends, also by an exception, then close the log."""
        patches = Patches()
        error: BaseException | None = None
        try:
            self.wrap(patches)
            yield self._recorder
        except BaseException as raised:
            error = raised
            raise
        finally:
            patches.undo()
            self._recorder.close(error)

    def _issue(self, method: str, read: Callable[[], Call], function: Callable[[], Any]) -> tuple[int | None, Any]:
        """Issue a call; return its number in the log, None for a call that cannot be read, and its result."""
        try:
            record = read()
        except (AttributeError, IndexError, TypeError, ValueError) as error:  # of an unknown release
            self._recorder.unread(method, error)
            return None, function()
        seq = self._recorder.call(record, self._marks.of(record))
        with self._recorder.issuing(seq):
            result = function()
        self._recorder.issued(seq)
        return seq, result

    def _pending(self, handle: Any) -> tuple[int, ...]:
        return tuple(seq for seq in self._handles.get(handle, ()) if self._recorder.is_pending(seq))

    def _wait(self, function: Callable[..., Any], handle: Any, *args: Any, **kwargs: Any) -> Any:
        seqs = self._pending(handle)
        if not seqs:
            return function(handle, *args, **kwargs)
        with self._recorder.waiting(seqs):
            result = function(handle, *args, **kwargs)
        self._end(handle, seqs)
        return result

    def _end(self, handle: Any, seqs: Sequence[int]) -> None:
        self._recorder.done(seqs)


def log_entry(tensor: Any, strides: tuple[int, ...], version: int) -> Tensor:
    """Return the log entry of a tensor of either framework."""
    shape, start = tuple(tensor.shape), int(tensor.data_ptr())
    extent = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    stop = start + extent * int(tensor.element_size()) if prod(shape) else start
    return Tensor(shape, str(tensor.dtype).rpartition(".")[2], strides, start, stop, version, tensor)


def tensors_in(value: Any, kind: type, read: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return ``read`` of each tensor of type ``kind`` in nested lists."""
    if isinstance(value, kind):
        return (read(value),)
    if isinstance(value, list | tuple):
        return tuple(tensor for item in value for tensor in tensors_in(item, kind, read))
    return ()
