"""Process groups of the script. A pipeline refers to them weakly, so that they end when the script destroys them.

A group of gloo that lives on has threads, which drop the tensors of their last work. Where one does so while the
interpreter ends, CPython ends that thread inside of C++, and the process aborts ("terminate called without an active
exception").
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch.distributed as dist

from pipeproof.exec.store.train_errors import PipelineError


class ScriptGroup:
    """A weak reference to a process group; calling it returns the group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._name = weakref.ref(group), str(group.group_name)

    def __call__(self) -> dist.ProcessGroup:
        """Return the group.

        Raises:
            PipelineError: the script has destroyed it.
        """
        group = self._group()
        if group is None:
            raise PipelineError(f"the script has destroyed process group {self._name!r}: make a new Pipeline")
        return group

    def at_end(self, call: Callable[[], object]) -> None:
        """Call something when the script has destroyed the group."""
        weakref.finalize(self(), call)


def process_group(group: dist.ProcessGroup | dist.DeviceMesh | None) -> dist.ProcessGroup:
    """The process group of an argument.

    Raises:
        PipelineError: no process group is initialised, this rank is not in it, or the mesh has several dims.
    """
    if not dist.is_initialized():
        raise PipelineError("initialise torch.distributed first: start the script with torchrun and call "
                            "torch.distributed.init_process_group")  # fmt: skip
    if group is None:
        return dist.group.WORLD
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise PipelineError(f"the mesh has dims {group.mesh_dim_names}: pass one, such as mesh['pp']")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise PipelineError("this rank is not a member of the group: make its Pipeline on the members alone")
    return group
