"""What messages are about, kept from where a pipeline prepares a tensor to where it is sent or received."""

from __future__ import annotations

from typing import Any

from pipeproof.interop.record.recorder import Call


class Marks:
    """By the address of a prepared tensor, what its message is about. A tensor is kept until then."""

    def __init__(self) -> None:
        self._by_address: dict[tuple[bool, int], tuple[Any, dict[str, Any]]] = {}

    def add(self, tensor: Any, address: int, mark: dict[str, Any], *, is_send: bool) -> None:
        """Keep what the next message of a tensor is about."""
        self._by_address[is_send, address] = tensor, mark

    def of(self, call: Call) -> dict[str, Any] | None:
        """What a message is about, if it was prepared; told once."""
        if call.op not in ("send", "recv"):
            return None
        is_send = call.op == "send"
        tensors = call.inputs if is_send else call.outputs
        found = self._by_address.pop((is_send, tensors[0].start), None) if tensors else None
        return None if found is None else found[1]
