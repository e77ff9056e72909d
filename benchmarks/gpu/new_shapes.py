"""Steps of four shapes on one GPU: predicted from its data sheet, and measured. No constant was fitted to them.

    torchrun --nproc-per-node 1 benchmarks/gpu/new_shapes.py OUT.jsonl [DEVICE]

Forward and backward of four micro-batches of one sequence in bfloat16, no optimizer, operation by operation; the median
of five steps. Without a GPU it runs a quarter of the sizes in float32: that tries the code.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from measure import settle
from prediction import Benchmark

from pipeproof.comm.lower import lower
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict

_EXPERTS = {"num_experts": 32, "top_k": 4, "ffn_size": 1024}
SHAPES: tuple[dict[str, Any], ...] = (
    {"num_layers": 6, "hidden_size": 3072, "num_heads": 24, "num_kv_heads": 8, "ffn_size": 8192, "mlp": "swiglu"},
    {"num_layers": 3, "hidden_size": 6144, "num_heads": 48, "ffn_size": 24576, "vocab_size": 16000, "seq_length": 2048},
    {"num_layers": 8, "hidden_size": 1536, "num_heads": 12, "ffn_size": 6144, "vocab_size": 50304, "seq_length": 8192},
    {"num_layers": 4, "hidden_size": 2048, "num_heads": 16, "ffn_size": 4096, "moe": _EXPERTS},
)


def main() -> None:
    """Predict and measure each shape, and write a line of JSON for it."""
    device = sys.argv[2] if len(sys.argv) > 2 else "h200"
    benchmark = Benchmark()
    with Path(sys.argv[1]).open("w", encoding="utf-8") as out:
        for shape in SHAPES:
            line = {"shape": shape, **_times(benchmark, shape, device)}
            benchmark.report(
                f"{shape['hidden_size']}: predicted {line['predicted_ms']:.1f}, {line['measured_ms']:.1f} ms"
            )
            out.write(json.dumps(line) + "\n")
            out.flush()


def _times(benchmark: Benchmark, shape: dict[str, Any], device: str) -> dict[str, float]:
    model = {"kind": "gpt", "activation_order": "bsh", "vocab_size": 32000, "seq_length": 4096, **shape}
    if not benchmark.on_gpu:
        smaller = {"seq_length": 128, "hidden_size": model["hidden_size"] // 4, "num_heads": model["num_heads"] // 4}
        model |= smaller | ({"num_kv_heads": 2} if "num_kv_heads" in model else {})
    dtype = "bfloat16" if benchmark.on_gpu else "float32"
    plan = {
        "pipeproof": 1,
        "model": model,
        "topology": {"pp": 1},
        "schedule": {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 1},
        "run": {"backend": "torch", "device": "gpu" if benchmark.on_gpu else "cpu", "dtype": dtype},
        "memory": {"optimizer_bytes": 0, "gradient_dtype": dtype},
    }
    _, ours = benchmark.of(plan)
    times = []
    for number in range(7):
        settle(benchmark.framework.device)
        begin = time.perf_counter()
        ours.step(number)
        settle(benchmark.framework.device)
        times.append(1000 * (time.perf_counter() - begin))
    del ours
    benchmark.forget()
    cost = {"analytic": {"device": device, "dtype": "bfloat16"}}
    predicted = simulate(lower(plan_from_dict({**plan, "cost": cost}).spec)).makespan
    return {"predicted_ms": float(predicted) / 1000, "measured_ms": median(times[2:])}


if __name__ == "__main__":
    main()
