"""DeepSeek-V4's layers on two GPUs over NCCL: losses and gradients against the reference, and peaks of memory.

    python benchmarks/gpu/deepseek_v4_run.py OUT.jsonl --seconds 540
    python benchmarks/gpu/deepseek_v4_run.py OUT.jsonl --only "one GPU" --seconds 1000    # peaks of each kind of layer
    python benchmarks/gpu/deepseek_v4_run.py OUT.jsonl --device cpu     # small sizes over gloo: every plan works

Each row is written as soon as it is there. Of a run: its status, whether it passed, the largest distance of a gradient
to the reference in the plan's order of sums, and to the unpartitioned model, next to the bound. ``memory`` has for each
rank the bytes that the plan predicts at the peak, those that PyTorch's allocator counted in the last step, and their
ratio. A run has ``--each`` seconds, and none begins after ``--seconds``. Exit status 1 if a run failed or was left out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeproof.comm.lower import lower
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict

Plan = Mapping[str, Any]
TYPES = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
STREAMS = {
    "streams": 4, "sinkhorn_iterations": 20, "sinkhorn": "softmax", "epsilon": 1e-6, "transposed": True,
    "contraction": "learned",
}  # fmt: skip
EXPERTS = {
    "top_k": 2, "num_shared_experts": 1, "score": "sqrtsoftplus", "routed_scale": 1.5, "expert_bias_rate": 0.001,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "hidden_size": 16, "num_heads": 4, "head_size": 8, "vocab_size": 32, "seq_length": 16, "ffn_size": 8,
    "moe": {"num_experts": 4, "ffn_size": 8},
    "compressed_attention": {
        "q_lora_rank": 6, "qk_rope_head_dim": 2, "sliding_window": 3, "o_groups": 2, "o_lora_rank": 5,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "index_n_heads": 3, "index_head_dim": 4, "index_topk": 2,
    },
}  # fmt: skip
LARGE: dict[str, Any] = {
    "hidden_size": 1024, "num_heads": 8, "head_size": 128, "vocab_size": 8192, "seq_length": 2048, "ffn_size": 512,
    "moe": {"num_experts": 8, "ffn_size": 512},
    "compressed_attention": {
        "q_lora_rank": 256, "qk_rope_head_dim": 64, "sliding_window": 128, "o_groups": 4, "o_lora_rank": 256,
        "index_n_heads": 8, "index_head_dim": 128, "index_topk": 128,
    },
}  # fmt: skip
WIDE: dict[str, Any] = {
    "hidden_size": 2048, "num_heads": 16, "vocab_size": 16384, "seq_length": 4096, "ffn_size": 1024,
    "moe": {"ffn_size": 1024},
}  # fmt: skip
MEMORY = {"attention": "unfused", "overhead_gib": 0.0625}
"""The overhead are the two workspaces of cuBLAS, of the threads of forward and backward."""
MTP = {"num_modules": 1, "magic_send": True, "reads": "after_norm"}
"""With it a plan of several stages needs no embedded tokens next to the streams."""


def plans(device: str) -> Iterator[tuple[str, Plan]]:
    """All plans by name."""
    size = SMALL if device == "cpu" else LARGE
    spec = {"layer_types": TYPES, **size["compressed_attention"]}
    model: dict[str, Any] = {
        "kind": "gpt", **size, "num_layers": 4, "compressed_attention": spec, "hyper_connections": STREAMS,
        "swiglu_limit": 10.0, "swiglu_formula": "silu", "moe": {**EXPERTS, **size["moe"], "hash_layers": 1},
    }  # fmt: skip
    run = {"backend": "torch", "device": device, "dtype": "bfloat16", "main_grad_dtype": "float32", "steps": 2}
    one = {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 1}
    plan: dict[str, Any] = {
        "pipeproof": 1, "model": model, "topology": {"pp": 2}, "schedule": one, "memory": MEMORY,
        "run": run,
    }  # fmt: skip
    zb_v = {**one, "kind": "zb_v", "num_chunks": 2}
    yield "pp 2, 1f1b", plan
    yield "pp 2, zb_v", {**plan, "schedule": zb_v}
    yield "pp 2, zb_v, documents", {**plan, "schedule": zb_v, "model": with_documents(model)}
    yield "pp 2, 1f1b, MTP", {**plan, "model": {**model, "mtp": MTP}}
    wide = {**run, "dtype": "float32"}  # in bfloat16 another order of sums also changes choices
    for name, topology in {"ep 2": {"ep": 2}, "tp 2, SP": {"tp": 2, "sequence_parallel": True}}.items():
        divided = {**plan, "topology": {"pp": 1, **topology}}
        yield f"{name}, 1f1b", divided
        yield f"{name}, 1f1b, float32", {**divided, "run": wide}
    yield "pp 2, 1f1b, recomputed", {**plan, "memory": {**MEMORY, "recompute": "full"}}
    # The host would count the tokens of each expert, except if all ranks have all tokens, in bfloat16 throughout.
    replayed = {**model, "moe": {**EXPERTS, **size["moe"], "dispatcher": "all_gather"}}
    run = {"backend": "torch", "device": device, "dtype": "bfloat16", "steps": 4}
    run |= {"replay": True} if device == "gpu" else {}
    yield "pp 2, 1f1b, replayed", {**plan, "model": replayed, "run": run}
    yield "pp 2, zb_v, replayed", {**plan, "model": replayed, "run": run, "schedule": zb_v}
    yield from on_one_gpu(plan, {} if device == "cpu" else WIDE)


def with_documents(model: Mapping[str, Any]) -> dict[str, Any]:
    """The model with two documents in each sequence, and YaRN."""
    length = model["seq_length"]
    scaling = {"factor": 16.0, "original_max_position_embeddings": 65536}
    packed = {"documents": [length * 5 // 8, length - length * 5 // 8], "rope_scaling": scaling}
    return {**model, "compressed_attention": {**model["compressed_attention"], **packed}}


def on_one_gpu(plan: Plan, wider: Mapping[str, Any]) -> Iterator[tuple[str, Plan]]:
    """Plans for the peaks of each type of attention, with and without streams, and of recomputation."""
    experts = {**plan["model"]["moe"], **wider.get("moe", {})}
    model = {**plan["model"], **wider, "moe": experts}
    spec, schedule = model["compressed_attention"], {**plan["schedule"], "num_micro_batches": 2}
    models: dict[str, dict[str, Any]] = {
        "all types, MTP": {**model, "mtp": MTP},
        "all types, documents and YaRN": with_documents(model),
    }
    for attention, types in {**{kind: [kind] * 4 for kind in TYPES}, "all types": TYPES}.items():
        own = {**model, "compressed_attention": {**spec, "layer_types": types}}
        models |= {attention: own, f"{attention}, no streams": {**own, "hyper_connections": None}}
    for name, variant in models.items():
        for recompute in ("none", "full"):
            memory = {**MEMORY, "recompute": recompute}
            one = {**plan, "topology": {"pp": 1}, "schedule": schedule, "model": variant, "memory": memory}
            yield f"one GPU, {name}{', recomputed' * (recompute == 'full')}", one


def predicted_peaks(plan: Plan) -> list[int]:
    """Bytes of each rank at its peak."""
    return [int(curve.peak) for curve in simulate(lower(plan_from_dict(dict(plan)).spec)).memory]


def distances(report: Mapping[str, Any]) -> dict[str, Any]:
    """Losses, and the largest distances of gradients, in a report."""
    gradients, steps = report["gradients"], report["steps"]
    farthest = {
        key: max((one[key] for one in gradients if one.get(key) is not None), default=None)
        for key in ("max_rel_diff", "uncut_max_rel_diff")
    }
    losses = {key: [step[key] for step in steps] for key in ("loss", "reference_loss", "uncut_loss") if key in steps[0]}
    bitwise = all(step["bitwise"] for step in steps)
    return {"passed": report["passed"], "bitwise": bitwise, "bound": report["parallel_bound"],
            "judged_by": report["judged_by"], **farthest, **losses}  # fmt: skip


def outcome(plan: Plan, seconds: float) -> dict[str, Any]:
    """Run a plan for at most so many seconds; its row."""
    with tempfile.TemporaryDirectory() as folder:
        file, report, profile = (Path(folder) / f"{name}.json" for name in ("plan", "report", "profile"))
        file.write_text(json.dumps(plan))
        command = [sys.executable, "-m", "pipeproof", "run", str(file), "--report", str(report)]
        command += ["--timeout", str(seconds / 2)]
        if not plan["run"].get("replay"):  # a replayed step has no times of single operations
            command += ["--profile", str(profile)]
        begin = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return {"status": f"not done within {seconds:g} s"}
        row: dict[str, Any] = {"status": done.returncode, "seconds": round(time.monotonic() - begin, 1)}
        if report.exists():
            row |= distances(json.loads(report.read_text()))
        if done.returncode:
            text = done.stdout + done.stderr
            row["output"] = text if len(text) < 4000 else f"{text[:3000]}\n..\n{text[-1000:]}"
        memory = json.loads(profile.read_text()).get("memory") or [] if profile.exists() else []
    for predicted, own in zip(predicted_peaks(plan), memory, strict=bool(memory)):
        allocated = own["allocated_bytes"]
        ratio = round(predicted / allocated, 4) if allocated else None
        row.setdefault("memory", []).append({"predicted": predicted, "allocated": allocated, "ratio": ratio})
    return row


def main() -> int:
    """Run all plans; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--each", type=float, default=150.0, help="seconds of a run")
    parser.add_argument("--seconds", type=float, default=540.0, help="after which no run begins")
    parser.add_argument("--only", default="", help="names that contain this text")
    options = parser.parse_args()
    end, all_right = time.monotonic() + options.seconds, True
    options.file.write_text("")
    for name, plan in plans(options.device):
        if options.only not in name:
            continue
        left = end - time.monotonic()
        row = {"name": name, **(outcome(plan, min(options.each, left)) if left > 0 else {"status": "not begun"})}
        with options.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
        all_right = all_right and row["status"] == 0
    return int(not all_right)


if __name__ == "__main__":
    sys.exit(main())
