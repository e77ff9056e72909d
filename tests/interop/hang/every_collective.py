"""Issue every collective of gloo once, watched, and write the Flight Recorder's dump. Arguments: rank, directory."""

import os
import pickle
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

from pipeproof.exec.monitor.torch_watch import watch
from pipeproof.signals import die_with_parent


def _are_under_way(trace):
    entries = pickle.loads(trace)["entries"]
    return not all(entry["retired"] or entry["is_p2p"] for entry in entries)


die_with_parent(os.getppid())
rank, directory = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), 2), rank=rank, world_size=2)
with watch(directory=directory / "rings"):
    one, two = torch.ones(4), [torch.ones(4), torch.ones(4)]
    joined = torch.ones(8)
    dist.all_reduce(one)
    dist.all_gather(two, one)
    dist.all_gather_into_tensor(joined, one)
    dist.reduce_scatter_tensor(one, joined)
    dist.all_to_all_single(joined, joined.clone())
    dist.broadcast(one, 0)
    dist.reduce(one, 0)
    dist.gather(one, two if rank == 0 else None, dst=0)
    dist.scatter(one, two if rank == 0 else None, src=0)
    batch = [dist.P2POp(dist.isend, one, 1 - rank), dist.P2POp(dist.irecv, joined[:4], 1 - rank)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    dist.barrier()
    path = directory / "dumps" / f"nccl_trace_rank_{rank}"
    path.parent.mkdir(exist_ok=True)
    end = time.monotonic() + 20.0
    while _are_under_way(trace := _dump_fr_trace()) and time.monotonic() < end:
        time.sleep(0.05)  # a thread of gloo notes the end of a collective after it has woken who waits for it
    path.write_bytes(trace)
dist.barrier()
