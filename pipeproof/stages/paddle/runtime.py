"""Start of Paddle for bit-exact comparisons: quiet, on one thread, on the CPU or on one GPU.

Paddle's matrix products have other bits with two threads than with one. So both sides of a comparison call
``start_paddle`` before anything else imports Paddle.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NUM_THREADS = 1
SELECTED_GPUS = "FLAGS_selected_gpus"
"""The variable in which Paddle's process groups look for their device."""


def start_paddle(gpu: int | None = None, *, computes: bool = True) -> None:
    """Import Paddle, set its device to the CPU or a GPU, and pin it to one thread. A second call changes nothing.

    On a GPU a known kernel is tried, unless the process only copies data (``computes`` is False).

    Raises:
        ImportError: Paddle is not installed.
        RuntimeError: Paddle has already computed with more threads and cannot be pinned; or there is no such GPU, or
            its kernels compute wrong values.
    """
    os.environ.setdefault("GLOG_minloglevel", "2")  # Paddle's C++ side: errors only
    pin_threads()
    if gpu is not None:
        os.environ[SELECTED_GPUS] = str(gpu)
        for flag in ("FLAGS_cudnn_deterministic", "FLAGS_embedding_deterministic"):
            os.environ.setdefault(flag, "1")
    with quiet_python():
        import paddle

        if gpu is None:
            paddle.set_device("cpu")
        else:
            _require_gpu(gpu, paddle.device.cuda.device_count())
            paddle.set_device(f"gpu:{gpu}")
    _require_pinned()
    if gpu is not None and computes:
        require_kernels()


def _require_gpu(gpu: int, num_gpus: int) -> None:
    if not num_gpus:
        raise RuntimeError("Paddle sees no GPU here: run.device gpu needs a build with CUDA and a driver")
    if gpu >= num_gpus:
        raise RuntimeError(f"there is no GPU {gpu} for this rank: Paddle sees {num_gpus}")


def require_kernels() -> None:
    """Compute a known result on the device and compare it.

    Raises:
        RuntimeError: the values are wrong.
    """
    import numpy as np
    import paddle

    numbers = np.arange(1.0, 257.0, dtype="float32").reshape(16, 16)
    on_device = paddle.to_tensor(numbers)
    kernels: tuple[tuple[str, Callable[[], Any], np.ndarray], ...] = (
        ("sum", lambda: on_device + on_device, numbers + numbers),  # Paddle's own kernel, before a library's
        ("product", lambda: paddle.matmul(on_device, on_device), numbers @ numbers),
    )
    for name, compute, expected in kernels:
        computed = compute().numpy()
        if not np.allclose(computed, expected, rtol=1e-2):
            raise RuntimeError(
                f"kernels on {paddle.device.get_device()} do not compute: a {name} of known matrices has "
                f"{computed.flatten()[:4].tolist()} where {expected.flatten()[:4].tolist()} is right; Paddle "
                f"{paddle.__version__} has no code for this GPU and supports only `pipeproof rehearse`"
            )


def pin_threads() -> None:
    """Request one thread. Paddle's math libraries read the environment at their first use; later has no effect."""
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = str(NUM_THREADS)


@contextlib.contextmanager
def quiet_python() -> Iterator[None]:
    """Suppress output and warnings of Paddle's Python code: no ccache, modified flags, thread counts.

    If the block raises, its output to stderr is printed after all.
    """
    written = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(written):
            warnings.simplefilter("ignore")
            yield
    except BaseException:
        sys.stderr.write(written.getvalue())
        raise


@contextlib.contextmanager
def quiet_native() -> Iterator[None]:
    """Suppress output of Paddle's C++ code to the process's stdout and stderr (a banner of its flags).

    If the block raises, the output is printed after all, on stderr.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as written:
        saved = {fd: os.dup(fd) for fd in (1, 2)}
        try:
            for fd in saved:
                os.dup2(written.fileno(), fd)
            yield
        except BaseException:
            written.seek(0)
            os.write(saved[2], written.read())
            raise
        finally:
            for fd, original in saved.items():
                os.dup2(original, fd)
                os.close(original)


def num_math_threads() -> int:
    """The most threads that Paddle's OpenMP runtime would use, in this thread or in a new one.

    The count is per thread, and a count set after the import holds only in the thread that set it. So a new thread
    is checked as well.
    """
    counts = [_openmp_threads()]
    fresh = threading.Thread(target=lambda: counts.append(_openmp_threads()))
    fresh.start()
    fresh.join()
    return max(counts)


def _require_pinned() -> None:
    num_threads = num_math_threads()
    if num_threads != NUM_THREADS:
        raise RuntimeError(
            f"Paddle computes with {num_threads} threads: it was in use before pipeproof could pin it to "
            f"{NUM_THREADS}, and its results depend on the number; set OMP_NUM_THREADS={NUM_THREADS} in the "
            "environment, or import pipeproof's runner first"
        )


def _openmp_threads() -> int:
    """The most threads of all OpenMP runtimes that Paddle ships; its MKL takes the count from them.

    A build without such a runtime uses the environment.
    """
    import paddle

    folder = Path(paddle.__file__).parent / "libs"
    counts = [NUM_THREADS]
    for library in sorted(folder.glob("lib*omp*.so*")):
        runtime = ctypes.CDLL(str(library))  # loaded by Paddle already: this only looks it up
        counts.append(int(runtime.omp_get_max_threads()))
    return max(counts)
