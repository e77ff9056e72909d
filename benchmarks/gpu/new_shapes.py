"""Steps of shapes on one GPU: from its data sheet, from a profile of one micro-batch, and measured.

    torchrun --nproc-per-node 1 benchmarks/gpu/new_shapes.py OUT.jsonl [DEVICE] [SHAPES]

Forward and backward of micro-batches of one sequence in bfloat16, no optimizer, operation by operation; medians of
steps. No constant was fitted to these shapes; the last three were not run before the model had its terms. Each line has
the step of four micro-batches, the same step as one CUDA graph, the times of its kernels by PyTorch operation and
sizes, and steps of 4 and 16 micro-batches from a profile of a plan with one. SHAPES are numbers, such as 9,10,11.
Without a GPU it runs small sizes in float32: that tries the code. No shape begins after ``SECONDS``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from measure import leave, settle
from predicting import between_us, given_cost, simulated, stage_times
from prediction import Benchmark
from torch.profiler import ProfilerActivity, profile

from pipeproof.comm.lower import lower
from pipeproof.exec.measure.profile_from_logs import measured_profile
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.certificate import graph_digest
from pipeproof.verify.subject import make_subject

SECONDS = 210
HEATED_S = 2.0
"""Time of steps before the profiled ones: a GPU reaches its limit of power after about a second."""
NUM_PROFILED = 20
"""Steps of one micro-batch that are profiled, one after the other; the first does not count."""
_EXPERTS = {"num_experts": 32, "top_k": 4, "ffn_size": 1024}
SHAPES: tuple[dict[str, Any], ...] = (
    {"num_layers": 6, "hidden_size": 3072, "num_heads": 24, "num_kv_heads": 8, "ffn_size": 8192, "mlp": "swiglu"},
    {"num_layers": 3, "hidden_size": 6144, "num_heads": 48, "ffn_size": 24576, "vocab_size": 16000, "seq_length": 2048},
    {"num_layers": 8, "hidden_size": 1536, "num_heads": 12, "ffn_size": 6144, "vocab_size": 50304, "seq_length": 8192},
    {"num_layers": 4, "hidden_size": 2048, "num_heads": 16, "ffn_size": 4096, "moe": _EXPERTS},
    {"num_layers": 4, "hidden_size": 2560, "num_heads": 20, "num_kv_heads": 4, "ffn_size": 9728, "vocab_size": 128256},
    {"num_layers": 2, "hidden_size": 8192, "num_heads": 64, "num_kv_heads": 8, "ffn_size": 28672},
    {"num_layers": 6, "hidden_size": 5120, "num_heads": 40, "ffn_size": 13824, "seq_length": 1024},
    {"num_layers": 3, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_size": 14336, "seq_length": 8192,
     "moe": {"num_experts": 8, "top_k": 2, "ffn_size": 4096}},
    {"num_layers": 3, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 4, "ffn_size": 6144, "seq_length": 16384,
     "moe": {"num_experts": 64, "top_k": 8, "ffn_size": 768}},
    {"num_layers": 4, "hidden_size": 3584, "num_heads": 28, "num_kv_heads": 4, "ffn_size": 18944, "vocab_size": 152064},
    {"num_layers": 3, "hidden_size": 7168, "num_heads": 56, "num_kv_heads": 8, "ffn_size": 20480, "vocab_size": 64000,
     "seq_length": 8192},
    {"num_layers": 3, "hidden_size": 3072, "num_heads": 24, "num_kv_heads": 8, "ffn_size": 8192, "seq_length": 8192,
     "vocab_size": 100352, "moe": {"num_experts": 16, "top_k": 4, "ffn_size": 2048}},
)  # fmt: skip


def main() -> None:
    """Predict and measure each shape, and write a line of JSON for it."""
    device, begin = sys.argv[2] if len(sys.argv) > 2 else "h200", time.monotonic()
    numbers = map(int, sys.argv[3].split(",")) if len(sys.argv) > 3 else range(len(SHAPES))
    benchmark = Benchmark()
    with Path(sys.argv[1]).open("w", encoding="utf-8") as out:
        for shape in [SHAPES[n] for n in numbers]:
            if time.monotonic() - begin > SECONDS:
                break
            line: dict[str, Any] = {"shape": shape}
            for part in (_predicted, _steps, _kernels, _from_one):
                try:
                    line |= part(benchmark, _plan(benchmark, shape), device)
                except Exception as error:  # noqa: BLE001 - the other parts continue
                    line[f"error{part.__name__}"] = repr(error)[:500]
                benchmark.forget()
            benchmark.report(json.dumps({key: value for key, value in line.items() if key != "kernels"}))
            out.write(json.dumps(line) + "\n")
            out.flush()
    leave()


def _plan(benchmark: Benchmark, shape: Mapping[str, Any]) -> dict[str, Any]:
    model = {"kind": "gpt", "activation_order": "bsh", "vocab_size": 32000, "seq_length": 4096, **shape}
    if not benchmark.on_gpu:
        model |= {
            "num_layers": 1,
            "seq_length": 32,
            "hidden_size": 128,
            "num_heads": 4,
            "ffn_size": 256,
            "vocab_size": 512,
        }
        model |= {"num_kv_heads": 1} if "num_kv_heads" in model else {}
        model |= {"moe": {**model["moe"], "ffn_size": 64}} if "moe" in model else {}
    dtype = "bfloat16" if benchmark.on_gpu else "float32"
    return {
        "pipeproof": 1,
        "model": model,
        "topology": {"pp": 1},
        "schedule": {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 1},
        "run": {"backend": "torch", "device": "gpu" if benchmark.on_gpu else "cpu", "dtype": dtype},
        "memory": {"optimizer_bytes": 0, "gradient_dtype": dtype},
    }


def _with_count(plan: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {**plan, "schedule": {**plan["schedule"], "num_micro_batches": number}}


def _predicted(_: Benchmark, plan: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Forwards and backwards from the data sheet."""
    cost = {"analytic": {"device": device, "dtype": "bfloat16"}}
    timeline = simulate(lower(plan_from_dict({**plan, "cost": cost}).spec)).timeline
    spans = [span for span, _ in timeline.compute_spans(0)]
    return {"predicted_ms": float(max(span.end for span in spans) - min(span.start for span in spans)) / 1000}


def _heat(benchmark: Benchmark, ours: Any) -> None:
    until = time.monotonic() + (HEATED_S if benchmark.on_gpu else 0)
    ours.step(0)
    while time.monotonic() < until:
        ours.step(0)


def _measured_ms(benchmark: Benchmark, ours: Any) -> list[float]:
    times = []
    _heat(benchmark, ours)
    for number in range(9):
        settle(benchmark.framework.device)
        begin = time.perf_counter()
        ours.step(number)
        settle(benchmark.framework.device)
        times.append(1000 * (time.perf_counter() - begin))
    return times[2:]


def _steps(benchmark: Benchmark, plan: Mapping[str, Any], _: str) -> dict[str, Any]:
    """The step, operation by operation and replayed."""
    _, ours = benchmark.of(plan)
    times = _measured_ms(benchmark, ours)
    line: dict[str, Any] = {"measured_ms": median(times), "steps_ms": times}
    if benchmark.on_gpu and "moe" not in plan["model"]:
        line["replayed_ms"] = [(end - start) / 1e6 for start, end in ours.replayed(3)]
    return line


def _kernels(benchmark: Benchmark, plan: Mapping[str, Any], _: str) -> dict[str, Any]:
    """By PyTorch operation and sizes, milliseconds on the device in a step, and calls; and the span of all kernels."""
    _, ours = benchmark.of(plan)
    ours.step(0)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if benchmark.on_gpu else [])]
    with profile(activities=kinds, record_shapes=True) as seen:
        ours.step(1)
        settle(benchmark.framework.device)
    share = "self_device_time_total" if benchmark.on_gpu else "self_cpu_time_total"
    rows = [
        (one.key, str(one.input_shapes), getattr(one, share) / 1000, one.count)
        for one in seen.key_averages(group_by_input_shape=True)
    ]
    kept = sorted((row for row in rows if row[2] > 0.02), key=lambda row: -row[2])[:120]
    return {"kernels_ms": sum(row[2] for row in rows), "kernels": kept}


def _from_one(benchmark: Benchmark, plan: Mapping[str, Any], _: str) -> dict[str, Any]:
    """Steps of more micro-batches: from the profile of a plan with one, and measured."""
    one = _with_count(plan, 1)
    _, ours = benchmark.of(one)
    _heat(benchmark, ours)
    log = [entry for number in range(NUM_PROFILED) for entry in ours.timed_step(number)]
    del ours
    benchmark.forget()
    subject = make_subject(plan_from_dict(one))
    measured = measured_profile(subject, graph_digest(subject), {0: log}, {}, 1)
    cost = given_cost(stage_times(measured), 0.0)
    result = {}
    for number in (4, 16):
        more = _with_count(plan, number)
        predicted = float(simulated(more, cost).makespan) / 1000
        _, ours = benchmark.of(more)
        times = _measured_ms(benchmark, ours)
        del ours
        benchmark.forget()
        result[number] = {"predicted_ms": predicted, "measured_ms": median(times), "steps_ms": times}
    return {"from_one": result, "profile_us": cost, "between_us": between_us(measured)}


if __name__ == "__main__":
    main()
