"""Every test here that needs Paddle gets it started as pipeproof starts it: quiet, on the CPU, on one thread."""

import importlib.util

from pipeproof.stages.paddle.runtime import start_paddle

if importlib.util.find_spec("paddle") is not None:
    start_paddle()
