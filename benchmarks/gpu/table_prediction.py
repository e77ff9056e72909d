"""Steps of one GPU predicted from a measured table of costs, and the same steps measured, in one run.

    pipeproof doctor --backend torch --on gpu --write-costs costs.json
    torchrun --nproc-per-node 1 benchmarks/gpu/table_prediction.py costs.json "4096,4096,4,8;1536,2048,6,10"

The second argument has sizes: hidden, sequence, blocks, micro-batches. A step is the forward and backward of all
micro-batches in bfloat16, no optimizer and no messages. Measured are plain modules in eager mode, the same with
``torch.compile`` of each block, pipeproof's executor op by op, and its step as one CUDA graph. Predicted is each
``cost.analytic.execution``, with the table and with the device's own curves (``h100``). Milliseconds, and errors in %.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from measure import Times, captured_anew, forget, leave, timed
from our_step import OurStep, start
from plain_gpt import summed_loss
from rival import plain_stage, plain_step
from sizes import Size

from pipeproof.comm.lower import lower
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.torch import Pipeline

EXECUTIONS = ("eager", "compiled", "graph")


def predicted_ms(size: Size, analytic: Mapping[str, Any], execution: str) -> float:
    """The forwards and backwards of a step."""
    cost = {"analytic": {**analytic, "execution": execution}}
    simulation = simulate(lower(plan_from_dict({**size.plan("1f1b", 1), "cost": cost}).spec))
    spans = [span for span, _ in simulation.timeline.compute_spans(0)]
    return float(max(s.end for s in spans) - min(s.start for s in spans)) / 1e3


def graph_step(size: Size, device: torch.device) -> Callable[[], object]:
    """The modules of ``plain_step`` in a pipeline of one stage, as graphs."""
    module = plain_stage(size, 0, 1, 1, device)
    tokens, labels = (torch.randint(0, size.vocab_size, (size.num_micro_batches, size.seq_length), device=device)
                      for _ in range(2))  # fmt: skip
    pipe = Pipeline(
        {0: module}, schedule="1f1b", num_micro_batches=size.num_micro_batches, loss_fn=summed_loss,
        example=(tokens[:1],), split="graph", scale_grads=False,
    )  # fmt: skip
    return lambda: pipe.step(tokens, target=labels)


def main() -> None:
    """Time and predict all sizes that the command line names."""
    framework, report = start()
    device = framework.device
    table = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["cost"]["analytic"]
    tables = {"measured": table, table["device"]: {key: table[key] for key in ("device", "dtype")}}
    for size in [Size.read(text) for text in sys.argv[2].split(";")]:
        report(f"hidden {size.hidden}, sequence {size.seq_length}, {size.num_layers} blocks, "
               f"{size.num_micro_batches} micro-batches")  # fmt: skip
        predicted = {(name, way): predicted_ms(size, of, way) for name, of in tables.items() for way in EXECUTIONS}

        def line(way: str, execution: str, step: Callable[[], object], predicted: Any = predicted) -> None:
            ms = timed(step, device, Times()).ms
            guesses = "  ".join(
                f"{name} {predicted[name, execution]:8.2f} {100 * (predicted[name, execution] / ms - 1):+6.1f}"
                for name in tables
            )
            report(f"{way:26} {ms:8.2f}  {guesses}")

        for is_compiled in (False, True):
            plain = plain_step(size, device, is_shared_out=False, is_compiled=is_compiled)
            line("modules, blocks compiled" if is_compiled else "modules", "eager", plain)
            del plain
            forget(device)
        graphs = graph_step(size, device)
        line("modules, stage as graph", "compiled", graphs)
        del graphs
        forget(device)
        ours = OurStep(size.plan("1f1b", 1), framework)
        line("executor, op by op", "eager", ours)
        replayed = captured_anew(ours, device)
        line("executor, one CUDA graph", "graph", replayed)
        del ours, replayed
        forget(device)
    leave()


if __name__ == "__main__":
    main()
