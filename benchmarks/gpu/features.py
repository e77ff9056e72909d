"""Each feature of the built-in model by ``pipeproof run`` on GPUs, compared with the reference.

    python benchmarks/gpu/features.py --seconds 240

The plans come from ``tests/features.py`` on two ranks, in float32 and small. A few are long, in bfloat16, where
PyTorch's fast attention adds in no fixed order. Several run at a time, so their times mean nothing. Each line has the
status, the kind of comparison and, for a failure, the error. Runs that have not begun after ``--seconds`` are named.
Exit status 1 if a run failed. ``--device cpu`` shows over gloo that this file works.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.features import FEATURES
from tests.plans import plan_dict

Plan = Mapping[str, Any]
ONE_S = 120
"""Most seconds of one run."""
LONG = {
    "num_layers": 4, "hidden_size": 512, "num_heads": 4, "ffn_size": 1024, "vocab_size": 512, "seq_length": 4096,
}  # fmt: skip
LONG_SCHEDULES = {"1f1b": {}, "zb_v": {"num_chunks": 2}, "interleaved": {"num_chunks": 2}}
GROUPS = {"tp 2": {"tp": 2, "sequence_parallel": True}, "dp 2": {"dp": 2}, "ep 2": {"ep": 2}, "cp 2": {"cp": 2}}


def plans(device: str) -> Iterator[tuple[str, Plan]]:
    """All plans by name, the long ones first."""
    run = {"backend": "torch", "device": device, "steps": 2}
    long_run = {**run, "dtype": "bfloat16", "main_grad_dtype": "float32"}
    batch = {"num_micro_batches": 4, "micro_batch_size": 1}
    for kind, chunks in LONG_SCHEDULES.items():
        sections = {"topology": {"pp": 2}, "schedule": {"kind": kind, **batch, **chunks}}
        long = {"pipeproof": 1, "model": {"kind": "gpt", **LONG}, **sections}
        yield f"sequence 4096, {kind}", {**long, "run": long_run}
        if device == "gpu" and kind == "zb_v":
            yield f"sequence 4096, {kind}, not deterministic", {**long, "run": {**long_run, "deterministic": False}}
            yield f"sequence 4096, {kind}, replayed", {**long, "run": {**long_run, "replay": True, "steps": 4}}
    for name, sections in FEATURES.items():
        yield name, plan_dict(**{**copy.deepcopy(sections), "run": {**sections.get("run", {}), **run}})
    experts = {"num_experts": 8, "top_k": 4, "ffn_size": 256, "dispatcher": "all_gather", "aux_loss": 0.1}
    gathered = {"pipeproof": 1, "model": {"kind": "gpt", **LONG, "seq_length": 256, "moe": experts},
                "topology": {"pp": 1, "ep": 2}, "schedule": {"kind": "1f1b", **batch}}  # fmt: skip
    yield "experts by all-gather, ep 2", {**gathered, "run": {**run, "dtype": "bfloat16"}}
    turns = {**gathered, "schedule": {**gathered["schedule"], "overlap": "pairs"}}
    yield "experts by all-gather, ep 2, turns", {**turns, "run": {**run, "dtype": "bfloat16"}}
    if device == "gpu":  # in one product for all experts of a rank, with more rows than visits
        replayed = {**run, "dtype": "bfloat16", "replay": True, "steps": 4}
        yield "experts by all-gather, ep 2, replayed", {**gathered, "run": replayed}
        yield "experts by all-gather, ep 2, turns, replayed", {**turns, "run": replayed}
    for name, topology in GROUPS.items():
        model = {"model": FEATURES["experts"]["model"]} if name == "ep 2" else {}
        yield name, plan_dict(topology={"pp": 1, **topology}, stages=None, run=run, **copy.deepcopy(model))


def outcome(name: str, plan: Plan) -> tuple[bool, str]:
    """Run a plan; return whether it passed, and its line."""
    with tempfile.TemporaryDirectory() as folder:
        file, report = Path(folder) / "plan.json", Path(folder) / "report.json"
        file.write_text(json.dumps({key: section for key, section in plan.items() if section is not None}))
        command = [sys.executable, "-m", "pipeproof", "run", str(file), "--report", str(report), "--timeout", "90"]
        begin = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=ONE_S, check=False)
        except subprocess.TimeoutExpired:
            return False, f"{name:44} not done within {ONE_S} s"
        found = json.loads(report.read_text()) if report.exists() else {}
    seconds = f"{time.monotonic() - begin:5.0f} s"
    if done.returncode or not found.get("passed"):
        first = re.search(r"error\[[^\n]*(\n[^\n]+){0,6}", done.stdout + done.stderr)
        return False, f"{name:44} status {done.returncode} {seconds} {first.group() if first else done.stderr[-300:]}"
    bits = "bit for bit" if all(step["bitwise"] for step in found["steps"]) else "within the bound"
    return True, f"{name:44} passed {seconds}, compared by {found['judged_by']}: {bits}"


def main() -> None:
    """Run all plans."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--workers", type=int, default=6, help="runs at a time")
    parser.add_argument("--only", default="", help="names that contain this text")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds

    def one(case: tuple[str, Plan]) -> bool:
        if time.monotonic() > end:
            print(f"{case[0]:44} not begun", flush=True)
            return True
        passed, line = outcome(*case)
        print(line, flush=True)
        return passed

    chosen = [case for case in plans(options.device) if options.only in case[0]]
    with ThreadPoolExecutor(options.workers) as pool:
        passed = list(pool.map(one, chosen))
    sys.exit(not all(passed))


if __name__ == "__main__":
    main()
