"""Programs that are recorded: ``python torch_programs.py NAME RANK RANKS DIRECTORY``; run by test_torch."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C._distributed_c10d import ProcessGroup, Work
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from pipeproof.interop.traces import record_torch

name, rank, num_ranks, directory = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
peer = 1 - rank


class Crossed(PipelineStage):
    """Receives the second micro-batch where the third belongs, and the other way round."""

    def get_fwd_recv_ops(self, fwd_chunk_id):
        return super().get_fwd_recv_ops({1: 2, 2: 1}.get(fwd_chunk_id, fwd_chunk_id))


def pipeline(stage_class):
    """One step of 1F1B with four micro-batches of two rows."""
    torch.manual_seed(0)
    is_crossed = stage_class is Crossed and rank == 1
    model = torch.nn.Linear(8, 8)
    stage = (stage_class if is_crossed else PipelineStage)(model, rank, num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    rows = torch.randn(8, 8)
    arguments, target = [rows] if rank == 0 else [], {"target": rows} if rank == num_ranks - 1 else {}
    with record_torch(directory):
        schedule.step(*arguments, **target)


def collectives():
    """Every kind of collective, an exchange of uneven parts, a group, a functional one; then an exception."""
    values, before = torch.arange(4.0), (ProcessGroup.send, Work.wait, torch.ops._c10d_functional.all_reduce)
    try:
        with record_torch(directory):
            dist.all_reduce(values)
            dist.broadcast(values, 1)
            dist.barrier()
            dist.all_gather([torch.empty(4), torch.empty(4)], values)
            dist.all_gather_into_tensor(torch.empty(8), values)
            dist.reduce_scatter_tensor(torch.empty(2), values)
            dist.all_to_all_single(torch.empty(4), values)
            sent, received = ([1, 3], [1, 2]) if rank == 0 else ([2, 2], [3, 2])
            dist.all_to_all_single(torch.empty(sum(received)), values, received, sent)
            dist.all_gather_object([None, None], "an object")
            work = dist.all_reduce(values, group=dist.new_group([0, 1]), async_op=True)
            work.wait()
            _ = functional.all_reduce(values, "sum", dist.group.WORLD) + 0
            _ = 1 / (rank - rank)
    except ZeroDivisionError:
        pass
    assert (ProcessGroup.send, Work.wait, torch.ops._c10d_functional.all_reduce) == before


def overwritten():
    """A tensor is written between the send and its wait."""
    with record_torch(os.environ["LOGS"]):
        values = torch.zeros(4)
        if rank == 0:
            work = dist.isend(values, peer)
            values.add_(1)
            work.wait()
        else:
            dist.recv(values)  # from any rank


def strided():
    """Sums of a column of a matrix: of the view, whose neighbours in memory are summed instead, and of a copy."""
    matrix = torch.arange(8.0).reshape(4, 2)
    with record_torch(directory):
        dist.all_reduce(matrix[:, 0].clone())
        dist.all_reduce(matrix[:, 0])
    assert matrix.flatten().tolist() == [0, 2, 4, 6, 4, 5, 6, 7]


def hang():
    """Both ranks receive first."""
    with record_torch(directory):
        values = torch.ones(4)
        dist.recv(values, peer)
        dist.send(values, peer)


dist.init_process_group(
    "gloo", store=dist.FileStore(str(directory.parent / f"{name}_store"), num_ranks), rank=rank, world_size=num_ranks
)
match name:
    case "plain":
        pipeline(PipelineStage)
    case "crossed":
        pipeline(Crossed)
    case "collectives":
        overwritten()
        collectives()
    case "strided":
        strided()
    case "hang":
        hang()
dist.destroy_process_group()
