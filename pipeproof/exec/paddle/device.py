"""Which GPUs Paddle sees; asking starts nothing on them."""

from __future__ import annotations

from pipeproof.stages.paddle.runtime import start_paddle


def num_gpus() -> int:
    """As many as processes of this machine may use; none where the build is for CPUs."""
    start_paddle()  # whoever imports it first does so quietly, on one thread
    import paddle

    return int(paddle.device.cuda.device_count())
