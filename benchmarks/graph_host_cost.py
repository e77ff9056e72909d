"""Host time of a stage as graphs, next to the same modules in eager mode: F, and I with W, of one micro-batch.

The tensors are small: the time is spent in Python and PyTorch's dispatch, not in arithmetic. It prints medians in
microseconds, and their ratio; below 1 the graphs need less. A loaded machine shows nothing.

    python benchmarks/graph_host_cost.py --blocks 4
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

_WIDTH, _ROWS = 16, 4


def main() -> None:
    """Time each compiler, alternately with eager mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compilers", nargs="+", choices=["eager", "inductor"], default=["eager", "inductor"])
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()

    import torch

    torch.set_num_threads(1)
    for compiler in options.compilers:
        modules = _stage("whole", options), _stage(compiler, options)
        times: list[list[tuple[float, float]]] = [[], []]
        for index in range(options.rounds + 10):
            for found, stage in zip(times, modules, strict=True):
                each = _micro_batch(stage, options.device)
                if index >= 10:
                    found.append(each)
        eager, graph = ([median(side) * 1e6 for side in zip(*found, strict=True)] for found in times)
        print(json.dumps({
            "compiler": compiler, "torch": torch.__version__, "device": options.device, "blocks": options.blocks,
            "forward_us": [round(graph[0], 1), round(eager[0], 1)],
            "backward_us": [round(graph[1], 1), round(eager[1], 1)], "ratio": round(sum(graph) / sum(eager), 3),
        }), flush=True)  # fmt: skip


def _stage(compiler: str, options: argparse.Namespace) -> Any:
    """A stage of blocks between two others, as graphs or, with ``whole``, as modules."""
    import torch
    from torch import nn

    from pipeproof.exec.train.stage_boundaries import Boundaries, Form, LeafSpec
    from pipeproof.exec.train.torch.module_stage import ModuleStage, trained

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH)
            self.down = nn.Linear(4 * _WIDTH, _WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
            return result

    module = nn.Sequential(*(Block() for _ in range(options.blocks))).to(options.device)
    boundaries = Boundaries(Form("tensor"), Form("tensor"), (LeafSpec((_ROWS, _WIDTH), "float32", True),))  # noqa: FBT003
    names = {name: name for name in trained(module)}
    return ModuleStage(
        1, module, boundaries, None, names, splits=False, check_finite=False,
        compiler=None if compiler == "whole" else compiler,  # type: ignore[arg-type]
    )  # fmt: skip


def _micro_batch(stage: Any, device: str) -> tuple[float, float]:
    """Seconds of F, and of I with W."""
    import torch

    x = torch.randn(_ROWS, _WIDTH, device=device, requires_grad=True)
    gradient = torch.ones(_ROWS, _WIDTH, device=device)
    start = time.perf_counter()
    outputs = stage.forward((x,), step=0, index=0, split=0, watch=None)
    middle = time.perf_counter()
    stage.backward_input(outputs, [gradient]).accumulate()
    end = time.perf_counter()
    if device == "cuda":
        torch.cuda.synchronize()
    return middle - start, end - middle


if __name__ == "__main__":
    main()
