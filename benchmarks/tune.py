"""Seconds of searches by ``pipeproof tune``, with the layouts at each step of pruning.

``python benchmarks/tune.py`` searches layouts of Llama 3 70B on 512 H100 with a global batch of 1,024 sequences of
8,192 tokens for each framework, as the command does: bounds in this process, simulations in one process per processor.
"""

from __future__ import annotations

import time

from pipeproof.analysis.tune.frameworks import FRAMEWORKS
from pipeproof.analysis.tune.search_layouts import tune
from pipeproof.interop.importers.imported import Flags
from pipeproof.interop.tune_models import tune_model


def main() -> None:
    """Print a line for each framework."""
    model = tune_model("llama3_70b", flags=Flags({("model", "seq_length"): 8192}))
    for name in FRAMEWORKS:
        start = time.perf_counter()
        counts = tune(model.plan, gpus=512, device="h100", global_batch=1024, framework=name).counts
        print(
            f"{name}: {time.perf_counter() - start:.1f} s; {sum(counts.removed.values())} not tried, "
            f"{counts.tried} tried, "
            f"{counts.unfit} without a schedule, {counts.over_memory} over the memory, {counts.bounded} bounded, "
            f"{counts.simulated} simulated, {counts.over_memory_simulated} of them over the memory, "
            f"{counts.checked} checked"
        )


if __name__ == "__main__":
    main()
