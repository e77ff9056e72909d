"""Number of GPUs that Paddle sees; the query starts nothing on them."""

from __future__ import annotations

from pipeproof.stages.paddle.runtime import start_paddle


def num_gpus() -> int:
    """Number of GPUs that this process may use; 0 if the build is for CPUs."""
    start_paddle()  # the first import must be quiet and on one thread
    import paddle

    return int(paddle.device.cuda.device_count())
