"""What the messages of ``torch.distributed.pipelining`` are about: stage, micro-batch and direction of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeproof.interop.record.marks import Marks
from pipeproof.interop.record.patches import Patches

_METHODS = {"get_fwd_recv_ops": "F", "get_fwd_send_ops": "F", "get_bwd_recv_ops": "B", "get_bwd_send_ops": "B"}


def wrap_stages(patches: Patches, marks: Marks) -> None:
    """Keep what each message is about when a stage of ``torch.distributed.pipelining`` prepares it."""
    try:
        from torch.distributed.pipelining.stage import _PipelineStageBase
    except ImportError:  # built without pipelining
        return

    def preparing(kind: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
            def prepare(stage: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
                ops = function(stage, chunk, *args, **kwargs)
                for op in ops:
                    mark = {"stage": stage.stage_index, "micro_batch": chunk, "kind": kind}
                    marks.add(op.tensor, op.tensor.data_ptr(), mark, is_send=op.op.__name__ == "isend")
                return ops

            return prepare

        return wrapping

    for method, kind in _METHODS.items():
        patches.wrap(_PipelineStageBase, method, preparing(kind))
