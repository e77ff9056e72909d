"""Distance of computed times of collectives and messages from real links.

``torchrun --nproc-per-node N benchmarks/links.py measure FILE`` times NCCL's collectives over N GPUs of a node, and a
message between two of them, with PyTorch (no pipeproof needed there), and writes FILE; ``python benchmarks/links.py
compare FILE`` prints them next to the predictions of ``cost.analytic``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

MEBIBYTES = (1, 4, 16, 64, 256)
"""Sizes of a message, and of the whole tensor of a collective."""
REPEATS, WARM_UPS = 20, 5


def measure(file: Path) -> None:
    """Median microseconds by operation and size, of the slowest rank; rank 0 writes them."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    times: dict[str, dict[int, float]] = {}
    for size in MEBIBYTES:
        whole = torch.randn(size * 2**19, device="cuda").to(torch.bfloat16)
        for name, call in _calls(dist, whole, rank, num_ranks).items():
            mine = torch.tensor(_median_us(torch, dist, call), device="cuda")
            dist.all_reduce(mine, op=dist.ReduceOp.MAX)
            times.setdefault(name, {})[size] = mine.item()
    if rank == 0:
        about = {"gpu": torch.cuda.get_device_name(), "num_ranks": num_ranks, "nccl": torch.cuda.nccl.version()}
        file.write_text(json.dumps({**about, "times_us": times}, indent=1) + "\n")
    dist.destroy_process_group()


def _calls(dist: Any, whole: Any, rank: int, num_ranks: int) -> dict[str, Callable[[], object]]:
    part = whole[: whole.numel() // num_ranks].clone()

    def message() -> None:
        if rank == 0:
            dist.send(whole, 1)
        elif rank == 1:
            dist.recv(whole, 0)

    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
        "message": message,
    }


def _median_us(torch: Any, dist: Any, call: Callable[[], object]) -> float:
    times = []
    for repeat in range(WARM_UPS + REPEATS):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        if repeat >= WARM_UPS:
            times.append(1000 * start.elapsed_time(end))
    return median(times)


def predicted(name: str, size: int, num_ranks: int, device: str) -> float:
    """The time of one operation by ``cost.analytic``."""
    from pipeproof.cost.analytic_links import Links
    from pipeproof.cost.devices import DEVICES
    from pipeproof.cost.network_times import Network
    from pipeproof.specs.load_plan import plan_from_dict
    from pipeproof.stages.describe.layer import Collective, CollectiveKind
    from pipeproof.stages.describe.model_family import describe_boundaries

    seq = 64 * num_ranks
    hidden = size * 2**19 // seq
    is_message = name == "message"
    plan = plan_from_dict(
        {
            "pipeproof": 1,
            "model": {
                "kind": "gpt", "num_layers": 2, "hidden_size": hidden, "num_heads": num_ranks, "ffn_size": num_ranks,
                "vocab_size": num_ranks, "seq_length": seq,
            },
            "topology": {"pp": 2} if is_message else {"tp": num_ranks},
            "schedule": {"kind": "gpipe", "num_micro_batches": 1, "micro_batch_size": 1},
            "cost": {"analytic": {"device": device, "dtype": "bfloat16"}},
        }
    ).spec  # fmt: skip
    assert plan.cost.analytic is not None
    run = plan.run.model_copy(update={"dtype": "bfloat16"})
    network = Network.of_device(plan.cost.analytic, DEVICES[plan.cost.analytic.device])
    links = Links(plan.model_copy(update={"run": run}), network)
    if is_message:
        (edge,) = describe_boundaries(links.plan)
        return float(links.message_us(edge.members(0), "full"))
    numel = seq * hidden // (num_ranks if name == "all_gather" else 1)
    return float(links.collective_us(Collective(CollectiveKind(name), "tp", numel, name), 2))


def compare(measured: dict[str, Any], device: str) -> None:
    """Print measured, predicted and their ratio."""
    num_ranks, nccl = measured["num_ranks"], ".".join(map(str, measured["nccl"]))
    print(f"{num_ranks} x {measured['gpu']}, NCCL {nccl}, against cost.analytic: {device}; microseconds")
    print(f"{'operation':<16}{'MiB':>5}{'measured':>10}{'predicted':>10}{'ratio':>7}")
    for name, by_size in measured["times_us"].items():
        for size, time in by_size.items():
            computed = predicted(name, int(size), num_ranks, device)
            print(f"{name:<16}{size:>5}{time:>10.0f}{computed:>10.0f}{computed / time:>7.2f}")


def main() -> None:
    """Measure or compare, by the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["measure", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="h200", help="Name in cost.analytic of the GPUs that were measured.")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        measure(arguments.file)
    else:
        compare(json.loads(arguments.file.read_text()), arguments.device)


if __name__ == "__main__":
    sys.exit(main())
