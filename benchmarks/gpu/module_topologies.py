"""One training of a Llama's modules that continues on other topologies through DCP checkpoints, in bfloat16.

    torchrun --nproc-per-node 4 benchmarks/gpu/module_topologies.py 2048,1024,4,16
    torchrun --nproc-per-node 4 benchmarks/gpu/module_topologies.py 256,16,2,16    # without GPUs, over gloo

The argument is the size: hidden, sequence, blocks for each rank of the world, rows of tokens in a step. Each topology
builds modules with other weights, loads the checkpoint of the one before it (``load_dcp``), trains two steps of AdamW
and saves (``save_dcp``). Printed for each: whether all tensors of weights and optimizer have the MD5 with which they
were saved, and the losses. Exit status 1 if a tensor differs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from llama_stages import Layout, joined, llama, weights_of
from measure import forget
from our_step import start
from sizes import Size
from torch.distributed.tensor import DTensor

from pipeproof.torch import Pipeline, causal_lm_loss, load_dcp, save_dcp

TOPOLOGIES: Mapping[str, tuple[str, int, str, int]] = {
    "pp 4": ("pp", 1, "1f1b", 4),
    "pp 2, FSDP 2": ("fsdp", 2, "1f1b", 2),
    "pp 2, TP 2": ("tp", 2, "1f1b", 2),
    "FSDP 4": ("fsdp", 4, "1f1b", 1),
    "pp 4, two stages a rank in a V": ("pp", 1, "zb_v", 8),
    "pp 2, FSDP 2, interleaved": ("fsdp", 2, "interleaved", 4),
    "pp 4 again": ("pp", 1, "1f1b", 4),
}
"""Inside of a stage (see ``Layout``), its number of ranks, the schedule, and the number of stages."""
EVERY = 2
"""Steps on each topology."""


def digests(stages: Mapping[int, torch.nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """MD5 of all whole tensors of all ranks: weights and optimizer states."""
    own = dict[str, object]()
    for name, weight in weights_of(stages).items():
        states = {f"{name} {slot}": value for slot, value in optimizer.state.get(weight, {}).items()}
        for key, value in {name: weight, **states}.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            plain = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            own[key] = hashlib.md5(plain.numpy().tobytes()).hexdigest()
    return joined(own.items())


def main() -> int:
    """Train on one topology after the other."""
    framework, report = start()
    device = framework.device
    size = Size.read(sys.argv[1])
    folder = [tempfile.mkdtemp(prefix="topologies-") if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    root, expected, all_equal = Path(folder[0]), dict[str, object](), True
    for place, (name, (inside, num_inside, kind, num_stages)) in enumerate(TOPOLOGIES.items()):
        began = time.monotonic()
        layout = Layout.of(inside, num_inside, device)
        stages = layout.stages(llama(size, device, seed=place), kind, num_stages)
        optimizer = torch.optim.AdamW(weights_of(stages).values(), lr=1e-3, foreach=False)
        how = "begins"
        if place:
            load_dcp(root / "state", stages, optimizer)
            found = digests(stages, optimizer)
            differ = [key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)]
            all_equal = all_equal and not differ
            how = f"{len(differ)} of {len(expected)} tensors differ" if differ else f"{len(expected)} tensors equal"
        num_replicas = num_inside if inside == "fsdp" else 1
        generator = torch.Generator().manual_seed(place)
        tokens = torch.randint(
            0, size.vocab_size, (EVERY, size.num_micro_batches, size.seq_length), generator=generator
        )
        own = tokens.to(device).chunk(num_replicas, 1)[layout.replica]
        pipe = Pipeline(
            stages, schedule=kind, num_micro_batches=own.shape[1], loss_fn=causal_lm_loss, example=(own[0, :1],),
            group=layout.mesh["pp"],
        )  # fmt: skip
        losses = []
        for batch in own:
            loss = pipe.step(batch, target=batch)
            losses += [] if loss is None else [float(loss)]
            optimizer.step()
            optimizer.zero_grad()
        pipe.close()
        save_dcp(root / "state", stages, optimizer, extra={"topology": name})
        expected = digests(stages, optimizer)
        every = joined([(str(layout.replica), losses)] if losses else [])
        shown = " and ".join(f"{sum(step) / len(step):.4f}" for step in zip(*every.values(), strict=True))
        report(f"{name:32} {how:28} losses {shown}   {time.monotonic() - began:5.1f} s")
        del pipe, stages, optimizer
        forget(device)
    if dist.get_rank() == 0:
        shutil.rmtree(root)
    dist.barrier()
    sys.stdout.flush()
    os._exit(int(not all_equal))  # communicators would hold a normal exit up


if __name__ == "__main__":
    main()
