"""Steps of one pipeline with NCCL's messages and with those of copy engines, in turns, and the bits of their gradients.

    torchrun --nproc-per-node 2 benchmarks/gpu/send_recv.py "4096,4096,4,8;1536,2048,6,10" 1f1b,zb_v

The first argument has sizes (hidden, sequence, blocks of a rank, micro-batches), several with ``;`` between; the second
schedules. Forward and backward of all micro-batches, bfloat16, no optimizer. Each step is timed operation by operation
and replayed as one CUDA graph. ``work`` is the same step without communication. Gradients of both are compared after as
many steps: with ``deterministic`` as the third argument, as attention has other bits in every step otherwise. On a CPU
both move messages over gloo, to try the code.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from measure import Measured, Times, captured_anew, forget, leave, timed
from our_step import OurStep, start
from plan_graphs import bits_of
from sizes import Size

TIMES = Times(warm_up=2, steps=4, series=3)
NUM_TURNS = 2


def main() -> None:
    """Time all sizes and schedules that the command line names."""
    torch.use_deterministic_algorithms(sys.argv[3:] == ["deterministic"])
    torch.utils.deterministic.fill_uninitialized_memory = False
    framework, report = start()
    device, num_ranks = framework.device, dist.get_world_size()
    ways = ("backend", "copy_engine") if device.type == "cuda" else ("backend", "backend")
    for size in [Size.read(text) for text in sys.argv[1].split(";")]:
        report(f"hidden {size.hidden}, sequence {size.seq_length}, {size.num_layers} blocks a rank, "
            f"{size.num_micro_batches} micro-batches")  # fmt: skip
        report(f"{'':12} {'NCCL':>8} {'copies':>8} {'ratio':>6}   replayed: {'NCCL':>8} {'copies':>8} {'ratio':>6} "
            f"{'work':>8}   gradients")  # fmt: skip
        for kind in sys.argv[2].split(","):
            steps = [
                OurStep({**size.plan(kind, num_ranks), "transport": {"send_recv": way}}, framework) for way in ways
            ]
            eager = [[timed(step, device, TIMES) for step in steps] for _ in range(NUM_TURNS)]
            replays = [captured_anew(step, device) for step in steps]
            graph = [[timed(replay, device, TIMES) for replay in replays] for _ in range(NUM_TURNS)]
            digests = [bits_of(step.gradients()) for step in steps]
            found: list[bool | None] = [None] * num_ranks
            dist.all_gather_object(found, digests[0] == digests[1])
            del steps, replays
            forget(device)
            alone = OurStep(size.plan(kind, num_ranks), framework, alone=True)
            work = timed(captured_anew(alone, device), device, TIMES)
            del alone
            forget(device)
            equal = (
                "equal bits" if all(found) else f"other bits on ranks {[n for n, one in enumerate(found) if not one]}"
            )
            report(f"{kind:12} {_row(eager)}             {_row(graph)} {work.ms:8.2f}   {equal}")
    leave()


def _row(turns: list[list[Measured]]) -> str:
    """The best of all turns of each, and the ratio of the second to the first."""
    first, second = (min((turn[side] for turn in turns), key=lambda one: one.ms) for side in (0, 1))
    return f"{first.ms:8.2f} {second.ratio_to(first)}"


if __name__ == "__main__":
    main()
