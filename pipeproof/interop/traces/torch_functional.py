"""Functional collectives of PyTorch (``torch.ops._c10d_functional``), as DTensor and compiled code call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pipeproof.interop.traces.message_hooks import Patches
from pipeproof.interop.traces.recorder import Call, CallSink, Tensor

_OPS = {
    "all_reduce": "all_reduce", "all_reduce_": "all_reduce", "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter", "all_to_all_single": "all_to_all", "broadcast": "broadcast",
}  # fmt: skip


class _Packet:
    """Replacement of an operator: it records calls; all attributes are the operator's."""

    def __init__(self, packet: Any, call: Callable[..., Any]) -> None:
        self._packet, self._call = packet, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._packet, name)


def wrap_functional(
    patches: Patches, recorder: CallSink, group_of: Callable[[Any], str], tensor_of: Callable[[Any], Tensor]
) -> None:
    """Record functional collectives outside of compiled code, and the waits for their results."""
    pending: dict[int, int] = {}

    def issuing(op: str) -> Callable[[Any], _Packet]:
        def wrapping(packet: Any) -> _Packet:
            def call(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
                group = dist.distributed_c10d._resolve_process_group(args[-1])  # noqa: SLF001 - it takes only a name
                ranks = dist.get_process_group_ranks(group)
                splits = (tuple(map(int, args[1])), tuple(map(int, args[0]))) if op == "all_to_all" else ((), ())
                seq = recorder.call(
                    Call(
                        op, group_of(group), (tensor_of(tensor),), peer=ranks[args[0]] if op == "broadcast" else None,
                        reduction=str(args[0]).lower() if "reduce" in op else "",
                        sent_splits=splits[0], received_splits=splits[1],
                    )
                )  # fmt: skip
                result: torch.Tensor = packet(tensor, *args)
                recorder.issued(seq)
                pending[result.data_ptr()] = seq
                return result

            return _Packet(packet, call)

        return wrapping

    def waiting(packet: Any) -> _Packet:
        def wait(tensor: torch.Tensor) -> torch.Tensor:
            seq = pending.pop(tensor.data_ptr(), None)
            if seq is None:
                untouched: torch.Tensor = packet(tensor)
                return untouched
            recorder.waits((seq,))
            result: torch.Tensor = packet(tensor)
            recorder.done((seq,))
            return result

        return _Packet(packet, wait)

    namespace = torch.ops._c10d_functional  # noqa: SLF001 - the name of the operators
    for name, op in _OPS.items():
        patches.replace(namespace, name, issuing(op))
    patches.replace(namespace, "wait_tensor", waiting)
