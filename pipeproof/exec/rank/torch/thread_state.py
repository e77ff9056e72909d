"""State of PyTorch that each thread has for itself, as far as results and the place of kernels depend on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch


def as_this_thread(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Return a context for another thread, in which PyTorch computes as it does here now.

    That is on the same device and stream, which may be captured, with the same number of threads (on which the bits of
    products depend), gradient mode and autocast.
    """
    num_threads, records = torch.get_num_threads(), torch.is_grad_enabled()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    is_cast, cast_to = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    keeps_casts = torch.is_autocast_cache_enabled()

    @contextmanager
    def context() -> Iterator[None]:
        with ExitStack() as stack:
            torch.set_num_threads(num_threads)
            if stream is not None:
                torch.cuda.set_device(device)
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.set_grad_enabled(records))
            stack.enter_context(torch.autocast(device.type, cast_to, enabled=is_cast, cache_enabled=keeps_casts))
            yield

    return context
