"""A rank's step by pipeproof's executor: as planned, or its work alone, without communication between ranks."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from measure import captured_anew

from pipeproof.comm.lower import lower
from pipeproof.exec.rank.adapter import RankAdapter
from pipeproof.exec.rank.gpu_assignment import shared_gpu
from pipeproof.exec.rank.machine import Instruction
from pipeproof.exec.rank.torch.comm import connect_groups
from pipeproof.exec.rank.torch.framework import TorchFramework
from pipeproof.schedule.op_table import NONE, Channel
from pipeproof.schedule.ops import COMPUTE_KINDS, OpKind
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.common import weights as held

NUM_MARKED = 3
NUM_DRAWS = 999_983
"""A prime: no two rows of a matrix are the same."""
_COSTS = {
    OpKind.FORWARD: "forward_us",
    OpKind.BACKWARD: "backward_us",
    OpKind.BACKWARD_INPUT: "backward_input_us",
    OpKind.BACKWARD_WEIGHT: "backward_weight_us",
}


class OurStep:
    """Forward and backward of all micro-batches of one rank, without the optimizer.

    ``alone``: receives are copies on the device, sends and collectives do nothing, so only the work is left.
    """

    def __init__(self, data: Mapping[str, Any], framework: TorchFramework, *, alone: bool = False) -> None:
        self._data, self._rank, self._device = data, dist.get_rank(), framework.device
        self._plan = lower(plan_from_dict(dict(data)).spec)
        graph = self._plan.graph
        if alone:
            world: Any = _NoWorld(self._rank, {i: g.ranks for i, g in enumerate(graph.groups) if self._rank in g.ranks})
        else:
            world = connect_groups(self._rank, self._device, graph.channels, graph.groups, lambda _: None)
        self._adapter = RankAdapter(self._plan, self._rank, framework, world, lambda *_: None)
        ids = [i for i in graph.rank_ops(self._rank) if graph.parent[i] == NONE]
        self._program = [Instruction.of(graph, i) for i in ids if graph.ops[i].kind is not OpKind.STEP]
        self._adapter.begin(0)

    def begin(self) -> None:
        """Begin step 0 again: its micro-batches, and gradients of zero."""
        self._adapter.begin(0)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradient buffers of the rank's weights."""
        stages = self._adapter.stages.values()
        return {name: weight.gradient for stage in stages for name, weight in stage.parameters.items()}

    def __call__(self) -> None:
        """One step."""
        for instruction in self._program:
            self._adapter.execute(instruction)
        self._adapter.log.clear()

    def floor_ms(self) -> float:
        """Time of the simulated step with the operation times of a replay of this step, and messages that take no time.

        For a step that is ``alone``, on all ranks.
        """
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self._times())
        num_stages = len(self._plan.stages)
        cost: dict[str, Any] = {}
        for kind, name in _COSTS.items():
            found = [
                [t for times in gathered for t in times.get((kind.name, stage), ())] for stage in range(num_stages)
            ]
            if all(found):
                cost[name] = [round(float(np.mean(one)), 3) for one in found]
        if "backward_input_us" in cost:
            cost.pop("backward_us", None)
        return float(simulate(lower(plan_from_dict({**self._data, "cost": cost}).spec)).timeline.makespan_us) / 1e3

    def _times(self) -> dict[tuple[str, int], list[float]]:
        """Microseconds of each computation, by kind and stage."""
        marks: list[tuple[tuple[str, int], torch.cuda.Event, torch.cuda.Event]] = []

        def step() -> None:
            for instruction in self._program:
                if instruction.op.kind not in COMPUTE_KINDS:
                    self._adapter.execute(instruction)
                    continue
                before, after = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
                before.record()
                self._adapter.execute(instruction)
                after.record()
                marks.append(((instruction.op.kind.name, instruction.op.stage), before, after))
            self._adapter.log.clear()

        replay = captured_anew(step, self._device)
        times: dict[tuple[str, int], list[float]] = defaultdict(list)
        for _ in range(NUM_MARKED):
            replay()
            torch.cuda.synchronize(self._device)
            for key, before, after in marks:
                times[key].append(before.elapsed_time(after) * 1e3)
        return dict(times)


class _Done:
    """A transfer that is over."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.posted_ns = self.start_ns = self.end_ns = time.monotonic_ns()

    def wait(self) -> None:
        """Nothing is under way."""


class _NoChannels:
    """Ends of channels that lead nowhere; receives give small random numbers, because zeros would take less power."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._values: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def post(self, channel: Channel, buffer: torch.Tensor, after: Sequence[Any] = ()) -> _Done:
        """A copy on the device, or nothing."""
        if channel.dst == self._rank:
            key = buffer.numel(), buffer.dtype
            if key not in self._values:
                self._values[key] = (torch.randn(buffer.numel(), device=buffer.device) * 0.02).to(buffer.dtype)
            buffer.copy_(self._values[key].view(buffer.shape))
        return _Done(buffer)

    def close(self) -> None:
        """Nothing is open."""


class _NoCollectives:
    """Results of collectives whose members all had the same values: shapes are right, and nothing is moved."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([tensor] * len(self.ranks), dim)

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        return tensor.clone()

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(len(self.ranks), dim)[0].contiguous()

    def exchange(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int]) -> torch.Tensor:
        return rows.clone()


class _NoWorld:
    def __init__(self, rank: int, groups: Mapping[int, tuple[int, ...]]) -> None:
        self.rank, self.channels = rank, _NoChannels(rank)
        self.collectives = {index: _NoCollectives(ranks) for index, ranks in groups.items()}

    def barrier(self) -> None:
        """Nobody else is there."""


def start(timeout: timedelta | None = None) -> tuple[TorchFramework, Callable[[str], None]]:
    """Join the world that torchrun describes; PyTorch on this rank's device, and a function that prints on rank 0.

    Ranks share GPUs where there are fewer than ranks: results are right then, and times mean nothing.
    ``timeout`` limits the world's collectives, by default as in PyTorch.
    """
    held.initial_weight = _QuickWeights()
    device = "gpu" if torch.cuda.is_available() else "cpu"
    local_rank, note = int(os.environ["LOCAL_RANK"]), ""
    if device == "gpu":
        num_ranks, num_gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        local_rank = shared_gpu(local_rank, num_gpus, num_ranks)
        note = f"; {num_ranks} share {num_gpus}: times mean nothing" if num_gpus < num_ranks else ""
    framework = TorchFramework(device, local_rank)
    if device == "gpu":
        dist.init_process_group("nccl", timeout=timeout, device_id=framework.device)
    else:
        dist.init_process_group("gloo", timeout=timeout)

    def report(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    where = torch.cuda.get_device_name() if device == "gpu" else "CPU"
    report(f"{where}, PyTorch {torch.__version__}, {dist.get_world_size()} ranks; milliseconds a step{note}")
    return framework, report


class _QuickWeights:
    """Small numbers of the right shape: as many normal draws as a large model has weights take minutes."""

    def __init__(self) -> None:
        self._draws = (np.random.default_rng(0).random(NUM_DRAWS, dtype=np.float32) - 0.5) * 2
        self._made: dict[tuple[tuple[int, ...], float], np.ndarray] = {}

    def __call__(self, parameter: Any, seed: int, dtype: str) -> np.ndarray:
        if parameter.init_std is None:
            return np.full(parameter.shape, parameter.init_value, dtype=np.float32)
        key = tuple(parameter.shape), parameter.init_std
        if key not in self._made:
            self._made[key] = np.resize(self._draws * np.float32(parameter.init_std), parameter.shape)
        return self._made[key]
