"""Memory of a rank on the CPU by stages of sharding, predicted and measured.

``python benchmarks/sharded_states.py [torch|paddle]`` runs a plan of two pipeline and four data-parallel ranks with
each stage of sharding, and prints the peak of rank 0 in the second step: as ``simulate`` predicts it, and the growth of
its process (``VmHWM`` of Linux), less the growth with a tiny model.

``python benchmarks/sharded_states.py fsdp2`` runs stages 2 and 3 on four data-parallel ranks without a pipeline, each
block a stage, and the same model and batch under FSDP2 (``fsdp2_gpt.py``). It also prints the losses of the first step,
and the largest difference of a gradient in units of its largest element.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pipeproof import load_plan, lower, simulate
from pipeproof.analysis.align.read_record import open_record

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


def plan_without_pipeline(number: int, model: dict[str, int]) -> dict[str, Any]:
    """The plan with the first ``number`` stages of sharding, each block a stage of its own."""
    plan = plan_of("torch", number, model)
    schedule = {"kind": "looped_bfs", "num_chunks": 8, "num_micro_batches": 1, "micro_batch_size": 2}
    return {**plan, "topology": {"dp": 4}, "schedule": schedule}


def measured(plan: dict[str, Any], folder: Path, *options: str) -> int:
    """Bytes of the process of rank 0 at most in the second step."""
    file, peak = folder / "plan.json", folder / "peak"
    file.write_text(json.dumps(plan))
    (folder / "sitecustomize.py").write_text(f"PEAK = {str(peak)!r}\n{WATCH}")
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back
    command = [sys.executable, "-m", "pipeproof", "run", str(file), "--timeout", "300", *options]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return int(peak.read_text())


def fsdp2(plan: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The loss, the gradients by the plan's names, and the ``peak`` of FSDP2."""
    file, result = folder / "plan.json", folder / "fsdp2.npz"
    file.write_text(json.dumps(plan))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    rival = str(Path(__file__).parent / "fsdp2_gpt.py")
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, rival, str(file), str(result)], env=environment, check=True)
    with np.load(result) as arrays:
        return {**arrays, "peak": int(result.with_suffix(".peak").read_text())}


def compare_fsdp2(folder: Path) -> None:
    """Print the table of both."""
    tiny = plan_without_pipeline(0, TINY)
    base, their_base = measured(tiny, folder), fsdp2(tiny, folder)["peak"]
    print("| stage | predicted MiB | ours MiB | FSDP2 MiB | loss, ours | loss, FSDP2 | furthest gradient |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for number in (2, 3):
        plan, record = plan_without_pipeline(number, LARGE), folder / f"record{number}"
        found, theirs = measured(plan, folder) - base, fsdp2(plan, folder)
        predicted = simulate(lower(load_plan(folder / "plan.json").spec)).memory[0].peak
        measured(plan, folder, "--record", str(record), "--record-values")
        ours = open_record(record / "run")
        step = next(iter(ours.steps()))
        furthest = ("", 0.0)
        for each in step.tensors:
            values = ours.values(each)
            assert values is not None
            other = theirs[each.parameter]
            distance = float(np.abs(values.whole - other).max() / np.abs(other).max())
            furthest = max(furthest, (each.parameter, distance), key=lambda pair: pair[1])
        peaks = " | ".join(f"{value / 2**20:.1f}" for value in (predicted, found, theirs["peak"] - their_base))
        losses = f"{float(step.loss or 0):.7f} | {float(theirs['loss']):.7f}"
        print(f"| {number} | {peaks} | {losses} | {furthest[1]:.1e}, {furthest[0]} |", flush=True)


def main() -> None:
    """Print the table."""
    backend = sys.argv[1] if len(sys.argv) > 1 else "torch"
    if backend == "fsdp2":
        with tempfile.TemporaryDirectory() as name:
            compare_fsdp2(Path(name))
        return
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
