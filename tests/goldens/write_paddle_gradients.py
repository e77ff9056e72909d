"""Writes ``paddle_gradients/*.npz``: results of Paddle's uncut reference for each feature of the PyTorch tests' plans.

Frameworks need not be in one environment: PyTorch's stages are compared with these files, which an environment with
Paddle wrote: ``python -m tests.goldens.write_paddle_gradients``. ``tests/stages/test_adjoints.py`` checks that Paddle
makes the same files today. ``tests.stages.torch.features.kept_of`` selects the kept results of a run.
"""

import numpy as np

from pipeproof.stages.paddle.runtime import start_paddle
from tests.stages.torch.features import FEATURES, GOLDENS, golden_of, kept_of, make_plan


def main():
    """Write every file anew."""
    start_paddle()
    from pipeproof.stages.reference.unpartitioned import run_unpartitioned

    GOLDENS.mkdir(exist_ok=True)
    for feature in FEATURES:
        np.savez_compressed(golden_of(feature), **kept_of(run_unpartitioned(make_plan(feature))))


if __name__ == "__main__":
    main()
