"""Every test here that needs Paddle gets it started as pipeproof starts it: quiet, on the CPU, on one thread."""

import importlib.util

from pipeproof.stages.paddle.runtime import start_paddle

collect_ignore: list[str] = []

if importlib.util.find_spec("paddle") is None:
    collect_ignore += [
        "test_adjoints.py",
        "test_balance.py",
        "test_blocks.py",
        "test_clamped.py",
        "test_context.py",
        "test_model.py",
        "test_optimizer.py",
        "test_paddle_gradients.py",
        "test_pipeline.py",
        "test_recompute.py",
        "test_split_backward.py",
        "test_streams.py",
        "test_tensor_parallel.py",
    ]
else:
    start_paddle()
