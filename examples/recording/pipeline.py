"""One step of PyTorch's own 1F1B on two processes, recorded: ``torchrun --nproc-per-node 2 pipeline.py LOGS``.

With ``--crossed`` a stage exchanges the second and the third micro-batch.
Nothing fails: all sizes match, and the loss is plausible.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from pipeproof.interop.traces import record_torch


class CrossedStage(PipelineStage):
    """A stage that receives micro-batch 1 in place of 2, and 2 in place of 1."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the receives of a micro-batch."""
        return super().get_fwd_recv_ops({1: 2, 2: 1}.get(fwd_chunk_id, fwd_chunk_id))


def main(directory: str, *, crossed: bool) -> None:
    """Train one step, and write the calls of this rank into the directory."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stage_class = CrossedStage if crossed and rank == 1 else PipelineStage
    stage = stage_class(torch.nn.Linear(8, 8), rank, num_ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    rows = torch.randn(8, 8)
    with record_torch(directory):
        if rank == 0:
            schedule.step(rows)
        else:
            schedule.step(target=rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], crossed="--crossed" in sys.argv)
