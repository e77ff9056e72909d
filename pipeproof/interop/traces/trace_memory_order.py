"""Memory order of recorded tensors (PP312): the two ends of a message, and the members of a collective in place.

Backends read and write memory from the first element on, without a look at
the strides. Two tensors store their elements in one order if their sizes and
strides are equal after adjacent dims that are contiguous have been joined; the
shapes may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeproof.diagnostics.finding import Finding, OpsWitness, WitnessOp
from pipeproof.interop.traces.trace_graph import channels_of, collectives_of
from pipeproof.interop.traces.trace_log import LoggedCall, LoggedTensor, RankLog
from pipeproof.interop.traces.trace_text import call_text, position_text
from pipeproof.schedule.op_table import TensorSpec
from pipeproof.verify.memory_order import MEMORY_ORDER, has_holes

_IN_PLACE = frozenset({"all_reduce", "broadcast", "reduce"})
"""Collectives that use the caller's memory; the frameworks copy what they gather or scatter, or refuse the tensor."""


def memory_order_findings(logs: Sequence[RankLog]) -> Iterator[Finding]:
    """Find PP312: messages and collectives whose ends store their elements in different orders, or with holes."""
    for channel in channels_of(logs):
        for send, receive in zip(channel.sends, channel.receives, strict=False):
            yield from _compare(send, receive)
    for members in collectives_of(logs).values():
        calls = [call for _, call in sorted(members.items()) if call.op in _IN_PLACE and call.outputs]
        for call in calls[1:] or calls:
            findings = list(_compare(calls[0], call))
            yield from findings
            if findings:
                break


def _compare(first: LoggedCall, second: LoggedCall) -> Iterator[Finding]:
    """Find the first tensors of two calls that do not store the same elements in one order."""
    for tensors in zip(first.inputs or first.outputs, second.inputs or second.outputs, strict=False):
        sizes, orders = {tensor.numel for tensor in tensors}, {_element_order(tensor) for tensor in tensors}
        holes = [_has_holes(tensor) for tensor in tensors]
        if len(sizes) > 1 or (len(orders) == 1 and not any(holes)):  # of two sizes: other rules report that
            continue
        calls = (first, second) if first is not second else (first,)
        stated = [
            f"rank {call.rank}: {call_text(call)}{position_text(call)} has shape {list(tensor.shape)} and strides "
            f"{list(tensor.strides)}{' with holes' if hole else ''}"
            for call, tensor, hole in zip(calls, tensors, holes, strict=False)
        ]
        yield MEMORY_ORDER.finding(
            "\n".join(stated), next(call.line for call, tensor in zip(calls, tensors, strict=False)
                                    if not _is_contiguous(tensor)),
            "call `.contiguous()` before the tensor is sent or reduced, and receive into a contiguous buffer",
            OpsWitness(tuple(WitnessOp(call.rank, call_text(call)) for call in calls)),
        )  # fmt: skip
        return


def _element_order(tensor: LoggedTensor) -> tuple[tuple[int, int], ...]:
    """Return (size, stride) of each dim with several elements; adjacent dims that are contiguous are one."""
    order: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape, tensor.strides, strict=True):
        if size == 1:
            continue
        if order and order[-1][1] == size * stride:
            order[-1] = order[-1][0] * size, stride
        else:
            order.append((size, stride))
    return tuple(order)


def _is_contiguous(tensor: LoggedTensor) -> bool:
    return _element_order(tensor) in ((), ((tensor.numel, 1),))


def _has_holes(tensor: LoggedTensor) -> bool:
    return has_holes(TensorSpec("message", tensor.shape, tensor.dtype, "", "", strides=tensor.strides))
