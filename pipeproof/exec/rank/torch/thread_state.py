"""State of PyTorch that each thread has for itself, as far as results and the place of kernels depend on it."""

from __future__ import annotations

from collections.abc import Callable

import torch


def as_this_thread(device: torch.device) -> Callable[[], None]:
    """Return a function that a new thread calls to compute with PyTorch as this one does now.

    That is on the same device and stream, which may be captured, with the same number of threads (on which the bits of
    products depend), gradient mode and autocast.
    """
    num_threads, records = torch.get_num_threads(), torch.is_grad_enabled()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    is_cast, cast_to = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    keeps_casts = torch.is_autocast_cache_enabled()

    def set_up() -> None:
        torch.set_num_threads(num_threads)
        if stream is not None:
            torch.cuda.set_device(device)
            torch.cuda.set_stream(stream)
        torch.set_grad_enabled(records)
        torch.set_autocast_enabled(device.type, is_cast)
        torch.set_autocast_dtype(device.type, cast_to)
        torch.set_autocast_cache_enabled(keeps_casts)
        if is_cast:  # else the end of a nested autocast would clear the casts of all threads
            torch.autocast_increment_nesting()

    return set_up
