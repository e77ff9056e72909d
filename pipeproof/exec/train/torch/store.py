"""The key-value store of a pipeline: a part of the one that the script's process groups use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from hashlib import sha256

import torch
import torch.distributed as dist
from torch import nn

from pipeproof.exec.store.train_errors import PipelineError

_COUNTS: Counter[str] = Counter()
"""Pipelines of each group that this process has made: all members make them in one order."""


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """A part of the default group's store for the next pipeline of a group.

    Raises:
        PipelineError: the default group was made without a store.
    """
    try:
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public way to it
    except (AssertionError, KeyError, ValueError) as error:
        raise PipelineError(f"the default process group has no store: {error}") from None
    if store is None:
        raise PipelineError("the default process group has no store: initialise it with torchrun or a TCP store")
    ranks = ".".join(map(str, dist.get_process_group_ranks(group)))
    name = f"{group.group_name}/{sha256(ranks.encode()).hexdigest()[:16]}"
    _COUNTS[name] += 1
    return dist.PrefixStore(f"pipeproof/{name}/{_COUNTS[name]}/", store)


def device_of(modules: Iterable[nn.Module], *, allow_meta: bool = False) -> torch.device:
    """The device of the modules: that of their first parameter or buffer, else the CPU.

    With ``allow_meta`` some may be on the meta device: those of other ranks.

    Raises:
        PipelineError: some are on the meta device, or they are on several devices.
    """
    devices: dict[torch.device, None] = {}
    for module in modules:
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.device.type != "meta":
                devices[tensor.device] = None
            elif not allow_meta:
                raise PipelineError(f"{name} of a stage of this rank is on the meta device: materialize it first")
    if len(devices) > 1:
        raise PipelineError(f"the stages of this rank are on {', '.join(map(str, devices))}: put them on one device")
    device = next(iter(devices), torch.device("cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
