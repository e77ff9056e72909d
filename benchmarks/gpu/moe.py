"""Steps of models with experts on GPUs: pipeproof's executor next to PyTorch's own.

    torchrun --nproc-per-node 2 benchmarks/gpu/moe.py "2048,4096,4,8" 64,8,1024 1f1b,dualpipe_v,zb_v

The first argument is the size (hidden, sequence, blocks of a rank, micro-batches),
the second the experts of a block (how many, how many for a token, inner size).
First no pipeline, and experts shared out over all ranks (``ep``), with both
dispatchers, and with pairs that alternate: the rival is a plain loop over
micro-batches, with an all-to-all each way. Then pipelines of the given schedules with all experts
of a block on its rank: the rival is ``torch.distributed.pipelining``. Both sides
multiply all experts in one kernel. A fourth argument selects the plans whose names contain it.

Forward and backward of all micro-batches, bfloat16, no optimizer; gradients that
ranks of experts share are summed. ``work`` is ours without communication, as if every rank received its own tensors.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from measure import Times, captured_anew, forget, leave, timed
from our_step import OurStep, start
from rival import plain_step, rival_step
from sizes import Size

ALONE = Times(warm_up=1, steps=3, series=1)


DISPATCHERS = ("all_to_all", "all_gather")


def _shared_out(size: Size, num_ranks: int, *, on_gpus: bool) -> dict[str, dict[str, Any]]:
    """Plans by name."""
    assert size.moe is not None
    plans = {}
    for overlap, dispatcher in itertools.product(("none", "pairs") if on_gpus else ("none",), DISPATCHERS):
        plan = replace(size, moe={**size.moe, "dispatcher": dispatcher}).plan("1f1b", 1, ep=num_ranks)
        plan["schedule"]["overlap"] = overlap
        plans[f"ep {num_ranks} {dispatcher}{', pairs' * (overlap != 'none')}"] = plan
    return plans


def main() -> None:
    """Time the sizes on the command line."""
    framework, report = start()
    device, rank, num_ranks = framework.device, dist.get_rank(), dist.get_world_size()
    num_experts, top_k, ffn = map(int, sys.argv[2].split(","))
    moe = {"num_experts": num_experts, "top_k": top_k, "ffn_size": ffn}
    size = replace(Size.read(sys.argv[1]), moe=moe)
    report(f"hidden {size.hidden}, sequence {size.seq_length}, {size.num_layers} blocks a rank, "
        f"{size.num_micro_batches} micro-batches, {num_experts} experts of {ffn}, {top_k} a token")  # fmt: skip
    report(f"{'':32} {'rival':>8} {'ours':>8} {'ratio':>6} {'graph':>8} {'ratio':>6} {'work':>8}   GiB: rival, ours")
    kinds = sys.argv[3] if len(sys.argv) > 3 else "1f1b,dualpipe_v,zb_v"  # "" for none
    for kind in ["", *filter(None, kinds.split(","))]:
        made = rival_step(kind, size, rank, num_ranks, device) if kind else plain_step(size, device, is_shared_out=True)
        theirs = timed(made, device, Times())
        del made
        forget(device)
        if kind:
            plans = {f"pp {num_ranks} {kind}": size.plan(kind, num_ranks)}
        else:
            plans = _shared_out(size, num_ranks, on_gpus=device.type == "cuda")
        for name, data in plans.items():
            if sys.argv[4:] and sys.argv[4] not in name:
                continue
            step = OurStep(data, framework)
            ours = timed(step, device, Times())
            without, gib = ours.ratio_to(theirs), f"{ours.gib:.2f}"
            del step
            forget(device)
            graph = f"{'':15}"
            if kind:  # else the host reads how many rows go where
                step = OurStep(data, framework)
                step()
                step.begin()
                replay = captured_anew(step, device)
                graph = timed(replay, device, Times()).ratio_to(theirs)
                del replay, step
                forget(device)
            work = f"{'':8}"
            if "pairs" not in name:  # turns need communication
                work = f"{timed(OurStep(data, framework, alone=True), device, ALONE).ms:8.2f}"
                forget(device)
            report(f"{name:32} {theirs.ms:8.2f} {without} {graph} {work}   {theirs.gib:.2f} {gib}")
    leave()


if __name__ == "__main__":
    main()
