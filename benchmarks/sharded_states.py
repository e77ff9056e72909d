"""Memory of a rank on the CPU by stages of sharding, predicted and measured.

``python benchmarks/sharded_states.py [torch|paddle]`` runs a plan of two pipeline and four data-parallel ranks with
each stage of sharding, and prints the peak of rank 0 in the second step: as ``simulate`` predicts it, and the growth of
its process (``VmHWM`` of Linux), less the growth with a tiny model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pipeproof import load_plan, lower, simulate

KEYS = ("shard_optimizer", "shard_gradients", "shard_weights")
LARGE = {"hidden_size": 512, "ffn_size": 1376, "num_heads": 8, "vocab_size": 1024}
TINY = {"hidden_size": 16, "ffn_size": 16, "num_heads": 2, "vocab_size": 16}

WATCH = """
import sys, threading, time

def status(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) * 1024

def watch():
    while "pipeproof.exec.rank.adapter" not in sys.modules or not hasattr(
        sys.modules["pipeproof.exec.rank.adapter"], "RankAdapter"
    ):
        time.sleep(0.005)
    adapter = sys.modules["pipeproof.exec.rank.adapter"].RankAdapter
    begin, finish = adapter.begin, adapter.finish

    def begun(self, step):
        if step == 1:
            open("/proc/self/clear_refs", "w").write("5")  # VmHWM begins anew
        begin(self, step)

    def finished(self):
        if self._step == 1 and self.rank == 0:
            open(PEAK, "w").write(str(status("VmHWM")))
        finish(self)

    adapter.begin, adapter.finish = begun, finished

if sys.argv[0] == "-m":
    threading.Thread(target=watch, daemon=True).start()
"""
"""``sitecustomize`` of the workers."""


def plan_of(backend: str, number: int, model: dict[str, int]) -> dict[str, Any]:
    """The plan with the first ``number`` stages of sharding."""
    return {
        "pipeproof": 1,
        "model": {"kind": "gpt", "num_layers": 8, "seq_length": 16, **model},
        "topology": {"pp": 2, "dp": 4},
        "schedule": {"kind": "interleaved", "num_chunks": 4, "num_micro_batches": 2, "micro_batch_size": 1},
        "memory": dict.fromkeys(KEYS[:number], "dp"),
        "run": {"steps": 2, "backend": backend},
    }


def measured(plan: dict[str, Any], folder: Path) -> int:
    """Bytes of the process of rank 0 at most in the second step."""
    file, peak = folder / "plan.json", folder / "peak"
    file.write_text(json.dumps(plan))
    (folder / "sitecustomize.py").write_text(f"PEAK = {str(peak)!r}\n{WATCH}")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back
    command = [sys.executable, "-m", "pipeproof", "run", str(file), "--timeout", "300"]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return int(peak.read_text())


def main() -> None:
    """Print the table."""
    backend = sys.argv[1] if len(sys.argv) > 1 else "torch"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = measured(plan_of(backend, 0, TINY), folder)
        print(f"| stage, {backend} | predicted MiB | measured MiB |\n| --- | --- | --- |")
        for number in range(4):
            found = measured(plan_of(backend, number, LARGE), folder) - base
            predicted = simulate(lower(load_plan(folder / "plan.json").spec)).memory[0].peak
            print(f"| {number} | {predicted / 2**20:.1f} | {found / 2**20:.1f} |", flush=True)


if __name__ == "__main__":
    main()
