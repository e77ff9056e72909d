"""Steps without a pipeline, for ``tune`` to compare with: FSDP2 over all ranks, each with its part of the rows."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist

from pipeproof.exec.train.torch.measure_layers import Batch, Cutter


def sharded_step(
    cutter: Cutter, batch: Batch, num_examples: int, num_steps: int, group: dist.ProcessGroup, device: torch.device
) -> Callable[[], None]:
    """A step of a copy of the model, sharded by FSDP2 block by block.

    Each rank runs ``num_steps`` micro-batches of ``num_examples`` examples. Gradients are scattered behind the last
    backward and then dropped.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = cutter.model
    own = copy.deepcopy(model)
    mesh = DeviceMesh.from_group(group, device.type)
    blocks = {id(block) for block in cutter.blocks}
    for name in [name for name, part in model.named_modules() if id(part) in blocks]:
        block = own.get_submodule(name)
        if device.type == "cuda":
            block.compile()
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(own, mesh=mesh, reshard_after_forward=False)
    if cutter.is_meta:
        own.to_empty(device=device)
        with torch.no_grad():
            for tensor in (*own.parameters(), *own.buffers()):
                tensor.fill_(0.01 if tensor.is_floating_point() else 0)
    rows = batch.resized(num_examples * batch.num_rows)
    kwargs = dict(rows.kwargs)
    if hasattr(model, "config") and hasattr(model.config, "use_cache"):
        kwargs["use_cache"] = False

    def step() -> None:
        for number in range(num_steps):
            own.set_requires_gradient_sync(number == num_steps - 1)
            output = own(*rows.args, **kwargs)
            loss = output if batch.loss_fn is None else batch.loss_fn(output, rows.target)
            (loss / num_steps).backward()
        for weight in own.parameters():
            weight.grad = None

    return step
