"""Real Paddle processes over gloo, for tests of its checkpoints: each does one task after the other."""

import json
import os
import subprocess
import sys

import numpy as np

from pipeproof.exec.store.rendezvous import rank_environment, reserved_ports
from pipeproof.state.state_layout import whole_state
from tests.state.runs import plan_of

PATIENCE_S = 120.0
SIZES = {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 24}
MOE = {"num_experts": 13, "top_k": 2, "ffn_size": 2, "expert_bias_rate": 0.01}


def moe_plan(**topology):
    """A tied model with 13 experts, whose moments are sharded where there are data-parallel ranks."""
    sharded = {"memory": {"shard_optimizer": "dp"}} if topology.get("dp", 1) > 1 else {}
    model = {**SIZES, "tied_embedding": True, "moe": MOE}
    return plan_of(topology={"pp": 1, **topology}, model=model, run={"steps": 3}, **sharded)


def values_of(plan):
    """Whole tensors of a plan's state, each with numbers of its own."""
    tensors, values, first = whole_state(plan), {}, 0
    for name in sorted(tensors):
        size = int(np.prod(tensors[name].shape))
        values[name] = (np.arange(first, first + size) / 7).astype(tensors[name].dtype).reshape(tensors[name].shape)
        first += size
    return values


def shard_of(value, shard):
    region = tuple(slice(start, start + length) for start, length in zip(shard.offsets, shard.extents, strict=True))
    part = value[region]
    return part if shard.flat is None else part.ravel()[slice(*shard.flat)]


def in_ranks(num_ranks, *tasks):
    """Run tasks of ``tests.state.flex.rank`` in ranks; a list of results by rank."""
    command = [sys.executable, "-m", "tests.state.flex.rank", json.dumps(tasks)]
    with reserved_ports(num_ranks + 1) as ports:
        started = [
            subprocess.Popen(
                command, env=rank_environment("paddle", rank, num_ranks, ports), stdout=subprocess.PIPE, text=True,
                stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True,
            )
            for rank in range(num_ranks)
        ]  # fmt: skip
        try:
            printed = [process.communicate(timeout=PATIENCE_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(printed)
    return [json.loads(text.splitlines()[-1]) for text in printed]


def here():
    return int(os.environ.get("PADDLE_TRAINER_ID", 0))
