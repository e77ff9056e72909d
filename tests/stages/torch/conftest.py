"""Tests of the PyTorch stages: collected where PyTorch is, on one thread, as pipeproof starts it."""

import importlib.util

collect_ignore_glob: list[str] = []

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob.append("test_*.py")
else:
    from pipeproof.stages.torch.runtime import start_torch

    start_torch("cpu")
