"""Fixtures of the PyTorch stages: PyTorch runs on one thread, as pipeproof starts it."""

import importlib.util

if importlib.util.find_spec("torch") is not None:
    from pipeproof.stages.torch.runtime import start_torch

    start_torch("cpu")
