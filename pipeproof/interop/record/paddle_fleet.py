"""Which direction the messages of Fleet's pipeline are of: its P2P helper knows, its calls below do not say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pipeproof.interop.record.marks import Marks
from pipeproof.interop.record.patches import Patches

_TENSORS = (("B", True), ("F", False), ("F", True), ("B", False))
"""Direction, and whether it is sent, of four arguments: to and from the stage before, to and from the next."""


def wrap_fleet(patches: Patches, marks: Marks) -> None:
    """Keep the direction of each tensor that Fleet's helper is about to send or receive, batched or not.

    A stage with several chunks has both ranks next to it on either side, so
    that the peer does not tell an activation from a gradient.
    """
    from paddle.distributed.fleet.meta_parallel.pp_utils import p2p_communication

    def preparing(function: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(*args: Any, **kwargs: Any) -> Any:
            for value, (kind, is_send) in zip(args, _TENSORS, strict=False):
                for tensor in _flat(value):
                    address = int(tensor.data_ptr())
                    marks.add(tensor, address, {"kind": kind}, is_send=is_send)
            return function(*args, **kwargs)

        return prepare

    for name in ("_p2p_ops", "_batched_p2p_ops"):
        patches.wrap(p2p_communication, name, preparing)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for part in value:
            yield from _flat(part)
    elif value is not None:
        yield value
