"""A rank that hangs in a collective of gloo, and writes its Flight Recorder's dump; run by test_real_dump."""

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

rank, folder = int(sys.argv[1]), Path(sys.argv[2])


def dump():
    """Write both forms once the rank has hung for a while, and end it."""
    time.sleep(1.5)
    (folder / "pickle" / f"trace_{rank}").write_bytes(c10d._dump_fr_trace())
    (folder / "json" / f"trace_{rank}.json").write_bytes(c10d._dump_fr_trace_json())
    while not (folder / "json" / f"trace_{1 - rank}.json").exists():
        time.sleep(0.1)  # a rank that ends first would wake the other
    os._exit(0)


store = dist.FileStore(str(folder / "store"), 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
values = torch.ones(4)
dist.all_reduce(values)
threading.Thread(target=dump, daemon=True).start()
if rank == 0:  # the other rank does not come to it
    with contextlib.suppress(RuntimeError):  # the other rank ended
        dist.all_reduce(values)
time.sleep(60)
