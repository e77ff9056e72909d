"""Two processes: pipelines that the script does not close, and the threads that are left when its groups are destroyed.

Argument: a directory for the records.
"""

import contextlib
import gc
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import Block, refused, say
from torch import nn

from pipeproof.torch import Pipeline, watch


def gloo_threads():
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            names.append((task / "comm").read_text().strip())
    return [name for name in names if "gloo" in name]


class Faulty(nn.Module):
    def forward(self, _):
        raise ValueError("bad batch")


def main(directory):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    watching, rank = watch(directory=directory / "rings"), dist.get_rank()
    x = torch.randn(8, 16)
    options = {"num_micro_batches": 4, "loss_fn": F.mse_loss}

    deleted = Pipeline({rank: Block()}, example=(x[:2],), **options)
    before = len(gloo_threads())
    del deleted
    gc.collect()
    ends = time.monotonic() + 30
    while len(gloo_threads()) >= before:  # its watch ends the groups
        assert time.monotonic() < ends
        time.sleep(0.1)

    trained = Pipeline({rank: Block(), 3 - rank: Block()}, schedule="zb_v", example=(x[:2],), **options)
    trained.step(x, target=x)
    trained.eval_step(x, target=x)
    trained.clip_grad_norm_(1.0)
    trained.compare(nn.Sequential(*(Block() for _ in range(4))), x, target=x)
    with trained.record(directory / "record"):
        trained.step(x, target=x)
    trained.profile(directory / "profile.json", x, target=x, num_steps=1)

    own = dist.new_subgroups(group_size=1)[0]
    replicated = Pipeline({0: Block()}, example=(x[:2],), group=own, data_group=dist.group.WORLD, **options)
    replicated.step(x, target=x)

    tied = {rank: Block()}
    failed = Pipeline(tied, tied=[{0: "up.weight", 1: "up.weight"}], example=(x[:2],), **options)
    tied[rank].up = Faulty() if rank else tied[rank].up
    refused(lambda: failed.step(x, target=x), "bad batch")
    del own

    say("trained", threads=len(gloo_threads()))
    dist.barrier()
    dist.destroy_process_group()
    assert gloo_threads() == [], gloo_threads()
    sys.stdout.write(f"rank {rank} has no thread of gloo\n")
    refused(lambda: trained.step(x, target=x), "this pipeline has ended")
    assert watching.path.exists()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
