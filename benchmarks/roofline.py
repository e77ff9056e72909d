"""Distance of the computed times of ``cost.analytic`` from a real GPU, operation by operation.

``python benchmarks/roofline.py measure FILE`` times the operations of one GPT block and head in bfloat16 with PyTorch
on the GPU at hand (no pipeproof needed there) and writes FILE; ``python benchmarks/roofline.py compare FILE`` prints
them next to the predictions. All but matrix products and attention goes through ``torch.compile``, one kernel each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

SIZES = {
    "8B-like, tp 1": {"hidden": 4096, "heads": 32, "ffn": 14336, "vocab": 128256, "seq": 8192, "tp": 1},
    "405B-like, tp 8": {"hidden": 16384, "heads": 128, "ffn": 53248, "vocab": 128256, "seq": 8192, "tp": 8},
}
REPEATS, WARM_UPS = 20, 5


def measure() -> dict[str, Any]:
    """Median microseconds of every operation, by sizes."""
    import torch

    times = {name: dict(_operations(torch, **sizes)) for name, sizes in SIZES.items()}
    return {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "times_us": times}


def _median_us(torch: Any, call: Callable[[], object]) -> float:
    for _ in range(WARM_UPS):
        call()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end))
    return median(times)


def _operations(
    torch: Any, *, hidden: int, heads: int, ffn: int, vocab: int, seq: int, tp: int
) -> Iterator[tuple[str, float]]:
    functional = torch.nn.functional

    def tensor(*shape: int, dtype: Any = torch.bfloat16) -> Any:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    def timed(call: Callable[[], object]) -> float:
        return _median_us(torch, call)

    for name, inner, columns in (
        ("attn.qkv", hidden, 3 * hidden // tp),
        ("attn.out", hidden // tp, hidden),
        ("mlp.gate_up", hidden, 2 * ffn // tp),
        ("mlp.down", ffn // tp, hidden),
        ("head", hidden, vocab // tp),
    ):
        tensors = tensor(seq, inner), tensor(inner, columns), tensor(seq, columns)
        gradient = tensor(inner, columns, dtype=torch.float32)
        for phase, call in _products(*tensors, gradient).items():
            yield f"{name} {phase}", timed(call)
    q, k, v, do = (tensor(1, heads // tp, seq, hidden // heads) for _ in range(4))
    for one in (q, k, v):
        one.requires_grad_()
    yield "attn.core F", timed(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    yield "attn.core I", timed(lambda: torch.autograd.grad(mixed, (q, k, v), do, retain_graph=True))
    x, y = tensor(seq, hidden), tensor(seq, hidden)
    gate, up = tensor(seq, ffn // tp), tensor(seq, ffn // tp)
    swiglu = torch.compile(lambda a, b: functional.silu(a) * b)
    add = torch.compile(lambda a, b: a + b)
    norm = torch.compile(lambda a: functional.rms_norm(a, (hidden,)))
    yield "mlp.swiglu F", timed(lambda: swiglu(gate, up))
    yield "mlp.add F", timed(lambda: add(x, y))
    yield "mlp_norm F", timed(lambda: norm(x))


def _products(x: Any, weight: Any, dy: Any, gradient: Any) -> dict[str, Callable[[], object]]:
    return {"F": lambda: x @ weight, "I": lambda: dy @ weight.T, "W": lambda: gradient.add_(x.T @ dy)}


def predicted(name: str, device: str) -> dict[str, float]:
    """The times of the same operations by ``cost.analytic``."""
    from pipeproof.cost.analytic_times import AnalyticCosts
    from pipeproof.specs.load_plan import plan_from_dict
    from pipeproof.stages.describe.op_work import layer_work

    sizes = SIZES[name]
    plan = plan_from_dict(
        {
            "pipeproof": 1,
            "model": {
                "kind": "gpt", "num_layers": 1, "hidden_size": sizes["hidden"], "num_heads": sizes["heads"],
                "ffn_size": sizes["ffn"], "vocab_size": sizes["vocab"], "seq_length": sizes["seq"],
            },
            "topology": {"tp": sizes["tp"]},
            "schedule": {"kind": "gpipe", "num_micro_batches": 1, "micro_batch_size": 1},
            "cost": {"analytic": {"device": device, "dtype": "bfloat16"}},
        }
    ).spec  # fmt: skip
    assert plan.cost.analytic is not None
    costs = AnalyticCosts(plan, plan.cost.analytic)
    works = [work for layer in ("layer.0", "head") for work in layer_work(plan, layer, costs.size, 2)]
    return {f"{work.name} {work.phase}": float(costs.work(work).us) for work in works}


def compare(measured: dict[str, Any], device: str) -> None:
    """Print measured, predicted and their ratio."""
    print(f"{measured['gpu']}, PyTorch {measured['torch']}, against cost.analytic: {device}; microseconds")
    for name, times in measured["times_us"].items():
        computed = predicted(name, device)
        print(f"\n{name}\n{'operation':<16}{'measured':>10}{'predicted':>10}{'ratio':>7}")
        for op, time in times.items():
            print(f"{op:<16}{time:>10.0f}{computed[op]:>10.0f}{computed[op] / time:>7.2f}")
        total = sum(computed[op] for op in times)
        print(f"{'sum':<16}{sum(times.values()):>10.0f}{total:>10.0f}{total / sum(times.values()):>7.2f}")


def main() -> None:
    """Measure or compare, by the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["measure", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="h200", help="Name in cost.analytic of the GPU that was measured.")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        arguments.file.write_text(json.dumps(measure(), indent=1) + "\n")
    else:
        compare(json.loads(arguments.file.read_text()), arguments.device)


if __name__ == "__main__":
    sys.exit(main())
