"""One training that resumes on another topology after every two steps, on GPUs: each step against the reference.

    python benchmarks/gpu/topologies.py                    # four GPUs, NCCL, PyTorch
    python benchmarks/gpu/topologies.py --device cpu       # over gloo: shows that this file works

Every topology resumes from the state that the one before it saved: every second one directly, the others from
what ``pipeproof state reshard`` made of it. The state at the end is cut for the first topology and back, and compared.
Exit status 1 where a step is not as the reference has it, or a tensor has another MD5.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EVERY = 2
"""Steps on each topology."""
SEQUENCES = 8
MODEL = {
    "kind": "gpt", "num_layers": 4, "hidden_size": 64, "num_heads": 8, "num_kv_heads": 4, "ffn_size": 128,
    "vocab_size": 128, "seq_length": 32, "tied_embedding": True, "mtp": {"num_modules": 1},
    "moe": {"num_experts": 12, "top_k": 3, "ffn_size": 32, "num_shared_experts": 1, "dense_layers": 1,
            "score": "sigmoid", "expert_bias_rate": 0.003},
}  # fmt: skip
SHARDED = {"memory": {"shard_optimizer": "dp"}}
TOPOLOGIES: Mapping[str, Mapping[str, Any]] = {
    "pp 4": {"topology": {"pp": 4}},
    "tp 2, pp 2, SP": {"topology": {"tp": 2, "pp": 2, "sequence_parallel": True}},
    "dp 4, sharded": {"topology": {"dp": 4}, **SHARDED},
    "ep 2, pp 2, interleaved": {"topology": {"ep": 2, "pp": 2}, "schedule": {"kind": "interleaved", "num_chunks": 2}},
    "ep 2, tp 2": {"topology": {"ep": 2, "tp": 2}},
    "pp 4 again": {"topology": {"pp": 4}},
}


def main() -> int:
    """Train on one topology after the other."""
    parser = argparse.ArgumentParser(description="One training on many topologies.")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    all_right = True
    with tempfile.TemporaryDirectory() as folder:
        root, before = Path(folder), None
        files = [_plan(root, number, sections, asked) for number, sections in enumerate(TOPOLOGIES.values())]
        for number, (name, file) in enumerate(zip(TOPOLOGIES, files, strict=True)):
            began = time.monotonic()
            states, report = root / f"states{number}", root / f"report{number}.json"
            resumed: tuple[object, ...] = () if before is None else ("--resume", before)
            how = "" if before is None else "straight from the state"
            if before is not None and number % 2 == 0:
                made = root / f"made{number}"
                _pipeproof("state", "reshard", before, "--to", file, "-o", made)
                resumed, how = ("--resume", made), "from the state, cut anew"
            output = _pipeproof("run", file, "--save", states, "--report", report, *resumed, may_fail=True)
            before = states
            if not report.exists():
                print(f"{name:26} {output.strip().splitlines()[-1]}", flush=True)
                return 1
            content = json.loads(report.read_text())
            all_right = all_right and content["passed"]
            bits = "bit for bit" if all(step["bitwise"] for step in content["steps"]) else "within the bound"
            print(f"{name:26} {time.monotonic() - began:5.1f} s  steps {[step['step'] for step in content['steps']]}  "
                  f"{bits if content['passed'] else 'OTHERWISE'}  {how}", flush=True)  # fmt: skip
        assert before is not None
        there, back = root / "there", root / "back"
        _pipeproof("state", "reshard", before, "--to", files[1], "-o", there)
        _pipeproof("state", "reshard", there, "--to", files[-1], "-o", back)
        same = json.loads(_pipeproof("state", "diff", before, back, "--format", "json", may_fail=True))["equal"]
        print(f"cut for {list(TOPOLOGIES)[1]} and back: {'every tensor is equal' if same else 'OTHERWISE'}")
    return int(not (all_right and same))


def _plan(root: Path, number: int, sections: Mapping[str, Any], asked: argparse.Namespace) -> Path:
    topology = sections["topology"]
    num_micro_batches = SEQUENCES // topology.get("dp", 1) // topology.get("ep", 1)
    schedule = {"kind": "1f1b", **sections.get("schedule", {})}
    run = {"backend": "torch", "device": asked.device, "dtype": asked.dtype, "seed": 3, "optimizer": "adamw"}
    plan = {
        "pipeproof": 1,
        "model": MODEL,
        **sections,
        "schedule": {**schedule, "num_micro_batches": num_micro_batches, "micro_batch_size": 1},
        "run": {**run, "steps": EVERY * (number + 1), "learning_rate": 0.01},
    }
    file = root / f"plan{number}.json"
    file.write_text(json.dumps(plan))
    return file


def _pipeproof(*arguments: object, may_fail: bool = False) -> str:
    command = [sys.executable, "-m", "pipeproof", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode and not may_fail:
        raise SystemExit(ended.stdout + ended.stderr)
    return ended.stdout + (ended.stderr if ended.returncode else "")


if __name__ == "__main__":
    sys.exit(main())
