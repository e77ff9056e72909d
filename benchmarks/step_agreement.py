"""Host time of the ranks' agreement on the signature of a step, before and after it existed, alternately in one run.

Processes on the CPU train small transformer blocks: their operations bound a step. ``before`` skips the agreement: the
ranks take the signature of the start. Times are CPU times of the thread that calls ``step``, medians of the rounds;
``agreement`` is the time in the agreement alone, with the word and its messages.

    python benchmarks/step_agreement.py
    python benchmarks/step_agreement.py --ranks 4 --schedule zb_v --micro-batches 16
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from statistics import median
from typing import Any
from unittest.mock import patch


def main() -> int:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2, help="of each stage")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10, help="of each kind in a round")
    parser.add_argument("--rank-of-job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of_job:
        _rank(options)
        return 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, __file__, *sys.argv[1:], "--rank-of-job"], env=environment, check=False).returncode


def _rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    from pipeproof.exec.train.torch.signatures import Signature, Signatures
    from pipeproof.torch import Pipeline, stages_of_rank

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    num = options.ranks * (2 if options.schedule in ("zb_v", "interleaved") else 1)
    own = stages_of_rank(options.schedule, options.ranks, num, dist.get_rank())
    stages = {n: nn.Sequential(*(_block() for _ in range(options.layers))) for n in own}
    x = torch.randn(options.micro_batches, 4, 16)
    pipe = Pipeline(
        stages, schedule=options.schedule, num_micro_batches=options.micro_batches, loss_fn=nn.functional.mse_loss,
        example=(x[:1],),
    )  # fmt: skip
    agreed = Signatures.agreed
    times: dict[str, list[float]] = {"before": [], "after": [], "agreement": []}

    def timed(signatures: Signatures, call: str, values: Any, require: Any, split: Any) -> Signature:
        require()
        start = time.thread_time()
        signature = agreed(signatures, call, values, lambda: None, split)
        times["agreement"].append(time.thread_time() - start)
        return signature

    def skipped(signatures: Signatures, call: str, values: Any, require: Any, split: Any) -> Signature:
        require()
        return signatures.first

    for _ in range(5):
        pipe.step(x, target=x)
    for _ in range(options.rounds):
        for kind, used in (("before", skipped), ("after", timed)):
            with patch.object(Signatures, "agreed", used):
                start = time.thread_time()
                for _ in range(options.steps):
                    pipe.step(x, target=x)
                times[kind].append((time.thread_time() - start) / options.steps)
    pipe.close()
    shown = {kind: round(median(each) * 1e6, 1) for kind, each in times.items()}
    ratios = [after / before for before, after in zip(times["before"], times["after"], strict=True)]
    shown["after_over_before"] = round(median(ratios), 4)
    shown["agreement_over_before"] = round(shown["agreement"] / shown["before"], 4)
    print(json.dumps({"rank": dist.get_rank(), "microseconds": shown}), flush=True)
    dist.destroy_process_group()


def _block() -> Any:
    """A transformer block so small that its time is the host's for its operations."""
    from torch import nn

    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)


if __name__ == "__main__":
    sys.exit(main())
