"""Start of PyTorch for one rank: on its device, deterministic if that is asked for, on one thread on the CPU.

Matrix products have other bits with two threads than with one. So all sides of a comparison call ``start_torch``
before anything else computes.
"""

from __future__ import annotations

import os

import torch

NUM_THREADS = 1


def start_torch(
    device: str, local_rank: int = 0, *, computes: bool = True, deterministic: bool = False
) -> torch.device:
    """Set up and return the device of this process. A second call changes nothing.

    ``device`` is ``cpu`` or ``gpu``. With several GPUs a process takes GPU number ``local_rank``. On a GPU a known
    kernel is tried, unless the process only copies data (``computes`` is False). With ``deterministic`` a GPU uses only
    kernels that add in one order: by default the backward of attention adds as its blocks happen to end.

    Raises:
        RuntimeError: there is no such GPU, or its kernels compute wrong values (a build without code for this GPU
            may do nothing without an error).
    """
    if device == "cpu":
        torch.set_num_threads(NUM_THREADS)
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # products with the same bits in every run
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch sees no GPU here: run.device gpu needs a build with CUDA and a driver")
    if local_rank >= torch.cuda.device_count():
        raise RuntimeError(f"local rank {local_rank} has no GPU: PyTorch sees {torch.cuda.device_count()}")
    torch.cuda.set_device(local_rank)
    chosen = torch.device("cuda", local_rank)
    if deterministic:
        torch.use_deterministic_algorithms(mode=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # no code of ours reads such memory
    if computes:
        require_kernels(chosen)
        start_backward_thread(chosen)
    return chosen


def start_backward_thread(device: torch.device) -> None:
    """Make autograd's thread for a GPU launch a kernel: it then has a CUDA context before its first product.

    Otherwise cuBLAS finds none there, makes one late, and warns.
    """
    torch.ones(1, device=device, requires_grad=True).mul(1.0).backward()


def require_kernels(device: torch.device) -> None:
    """Compute a known result on the device and compare it.

    Raises:
        RuntimeError: the values are wrong.
    """
    numbers = torch.arange(1.0, 257.0)
    on_device = numbers.to(device)
    computed = torch.mm((on_device + on_device).reshape(16, 16), on_device.reshape(16, 16)).cpu()
    expected = torch.mm((numbers + numbers).reshape(16, 16), numbers.reshape(16, 16))
    if not torch.allclose(computed, expected, rtol=1e-2):
        raise RuntimeError(
            f"kernels on {device} do not compute: a product of known matrices has {computed.flatten()[:4].tolist()} "
            f"where {expected.flatten()[:4].tolist()} is right; this build of PyTorch has no code for this GPU"
        )
