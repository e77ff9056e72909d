"""Steps of the built-in GPT by a plan: stages as compiled graphs (``run.compiler``) next to operation by operation.

    torchrun --nproc-per-node 2 benchmarks/gpu/plan_graphs.py RESULTS.jsonl 540

The second argument is the time in seconds after which no further row begins. Then come, if wanted, sizes (hidden,
sequence, blocks of a rank, micro-batches) with ``;`` between, schedules, and ``deterministic`` for PyTorch's
deterministic algorithms. Forward and backward of all micro-batches, bfloat16, no optimizer, a GPU a rank. Each row is
written to the file as soon as it is measured.

Of each schedule: the executor without graphs, with them, and both replayed as one CUDA graph; milliseconds, the ratio
to the first row, GiB, and the seconds that the graphs took to make. Bits: ``repeats`` is true if a second step has the
bits of the first, ``as_first`` if the gradients have those of the first schedule with this way and this many stages,
``distance`` is max|a - b| / max|b| of the gradients to those without graphs, at most ``bound``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import Measured, Times, captured_anew, forget, leave, timed
from our_step import OurStep, start
from sizes import Size

from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.reference.bound import parallel_bound

SIZES = "1024,1024,4,16;1536,2048,6,10;2048,4096,6,8;4096,4096,4,8"
KINDS = "1f1b,zb_h1,zb_v"
CHUNK = 2**24
Bits = dict[str, tuple[int, int]]


def bits_of(gradients: Mapping[str, torch.Tensor]) -> Bits:
    """Two sums of the bits of each gradient, of which the second depends on their positions."""
    return {name: _sums(gradient) for name, gradient in gradients.items()}


def _sums(tensor: torch.Tensor) -> tuple[int, int]:
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    found = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for part in tensor.reshape(-1).view(kinds[tensor.element_size()]).split(CHUNK):
        wide = part.to(torch.int64)
        found += torch.stack([wide.sum(), (wide * (torch.arange(len(part), device=part.device) % 65521 + 1)).sum()])
    plain, by_position = found.tolist()
    return plain, by_position


def farthest(gradients: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest distance of a gradient, in units of its largest element."""
    distances = [
        float((gradient.float() - expected[name].float()).abs().max() / expected[name].float().abs().max())
        for name, gradient in gradients.items()
    ]
    return max(distances)


class Rows:
    """Rows of the results; the first rank writes them."""

    def __init__(self, file: Path, end: float, device: torch.device) -> None:
        self._file, self._end, self._device = file, end, device
        if dist.get_rank() == 0:
            file.write_text("")

    def has_time(self) -> bool:
        """Return True if another row may begin, by the clock of the first rank."""
        more = torch.tensor([time.monotonic() < self._end], device=self._device)
        dist.broadcast(more, 0)
        return bool(more)

    def put(self, row: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Write a row; ``facts`` are of each rank: all must hold, the largest number counts."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, dict(facts))
        joined = {
            key: all(own[key] for own in gathered) if isinstance(value, bool) else max(own[key] for own in gathered)
            for key, value in facts.items()
            if not isinstance(value, dict)
        }
        reasons = {stage: reason for own in gathered for stage, reason in own["without"].items()}
        if dist.get_rank() == 0:
            text = json.dumps({**row, **joined, "without": reasons})
            print(text, flush=True)
            with self._file.open("a") as file:
                file.write(text + "\n")


def measured_kind(
    data: dict[str, Any], framework: Any, rows: Rows, row: dict[str, Any], firsts: dict[bool, Bits]
) -> None:
    """The rows of one schedule; ``firsts`` has the bits of the first schedule, without and with graphs."""
    device, times = framework.device, Times(warm_up=3, steps=4, series=2)
    bound = parallel_bound(plan_from_dict({**data, "run": {**data["run"], "compiler": "inductor"}}).spec)
    plain_ms = 0.0
    expected: dict[str, torch.Tensor] = {}
    for has_graphs in (False, True):
        if not rows.has_time():
            return
        began = time.monotonic()
        run = {**data["run"], **({"compiler": "inductor"} if has_graphs else {})}
        step = OurStep({**data, "run": run}, framework)
        made_s = time.monotonic() - began
        step()
        for is_replayed in (False, True) if device.type == "cuda" else (False,):
            if not rows.has_time():
                return
            work: Callable[[], None] = captured_anew(step, device) if is_replayed else step
            begin = step.begin_again if is_replayed else step.begin
            bits = []
            for _ in range(2):
                begin()
                work()
                bits.append(bits_of(step.gradients()))
            if not expected:
                expected = {name: gradient.clone() for name, gradient in step.gradients().items()}
            distance = farthest(step.gradients(), expected)
            as_first = firsts.setdefault(has_graphs, bits[0]) == bits[0]
            took: Measured = timed(work, device, times)
            gib = took.gib - sum(x.nbytes for x in expected.values()) / 2**30
            plain_ms = plain_ms or took.ms
            facts = {
                "repeats": bits[0] == bits[1], "as_first": as_first, "distance": distance,
                "made_s": round(made_s, 1), "without": step.without_graphs,
            }  # fmt: skip
            way = ("graphs" if has_graphs else "operations") + (", replayed" if is_replayed else "")
            rows.put(
                {**row, "way": way, "ms": round(took.ms, 2), "ratio": round(took.ms / plain_ms, 3),
                 "gib": round(gib, 2), "bound": bound},
                facts,
            )  # fmt: skip
            del work, begin
        del step
        forget(device)


def main() -> None:
    """Measure all sizes and schedules that the command line names."""
    file, seconds = Path(sys.argv[1]), float(sys.argv[2])
    end = time.monotonic() + seconds
    sizes = sys.argv[3] if len(sys.argv) > 3 else SIZES
    kinds = sys.argv[4] if len(sys.argv) > 4 else KINDS
    is_deterministic = sys.argv[5:] == ["deterministic"]
    torch.use_deterministic_algorithms(is_deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False
    framework, _ = start()
    rows = Rows(file, end, framework.device)
    for size in [Size.read(text) for text in sizes.split(";")]:
        firsts: dict[int, dict[bool, Bits]] = {}
        for kind in kinds.split(","):
            row = {"hidden": size.hidden, "sequence": size.seq_length, "blocks": size.num_layers,
                   "micro_batches": size.num_micro_batches, "schedule": kind,
                   "deterministic": is_deterministic}  # fmt: skip
            measured_kind(
                size.plan(kind, dist.get_world_size()), framework, rows, row, firsts.setdefault(size.chunks(kind), {})
            )
    leave()


if __name__ == "__main__":
    main()
