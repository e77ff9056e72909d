"""All measurements for four GPUs, each bounded in time, with results in a folder as they come.

    python benchmarks/gpu/four.py OUT                       # four GPUs
    python benchmarks/gpu/four.py OUT --only 1-,2           # names that begin so
    python benchmarks/gpu/four.py OUT --device cpu          # small sizes over gloo: shows that every command works

``OUT/NAME.log`` has the output of a command, ``OUT/results.jsonl`` a row for each with its status, seconds and last
lines; commands write further files next to them. Commands that have not begun after ``--seconds`` are named. Exit
status 1 if a command failed or was left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GRACE_S = 45
"""torchrun ends its workers within 30 s of its own SIGTERM."""
LAST_LINES = 40
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node 4 benchmarks/gpu/"
LLAMA = f"{TORCHRUN}llama_pipelines.py OUT/"
HANGS = "validation/pages/make_hangs.py --hangs-only --results OUT/hangs.json"


@dataclass(frozen=True)
class Command:
    """Arguments of Python on four GPUs and on CPUs; a command that has not ended after the seconds of it is stopped."""

    name: str
    gpu: str
    gpu_s: int
    cpu: str
    cpu_s: int = 300


COMMANDS = (
    # A script's modules on three layouts of the ranks, next to PyTorch's pipelines: time, memory, bits.
    Command("1-pp", f"{LLAMA}1-pp.jsonl 380 4096,4096,4,8 pp", 420,
            f"{LLAMA}1-pp.jsonl 200 128,16,2,8 pp --schedules 1f1b,zb_v"),
    Command("1-fsdp", f"{LLAMA}1-fsdp.jsonl 200 4096,4096,4,8 fsdp", 240,
            f"{LLAMA}1-fsdp.jsonl 200 128,16,2,8 fsdp --schedules 1f1b,zb_v"),
    Command("1-tp", f"{LLAMA}1-tp.jsonl 200 4096,4096,4,8 tp", 240,
            f"{LLAMA}1-tp.jsonl 200 256,16,1,8 tp --schedules 1f1b,zb_v"),
    Command("1b-pp", f"{LLAMA}1b-pp.jsonl 110 2048,1024,2,8 pp --deterministic", 150,
            f"{LLAMA}1b-pp.jsonl 150 128,16,2,8 pp --schedules 1f1b --deterministic"),
    Command("1b-fsdp", f"{LLAMA}1b-fsdp.jsonl 80 2048,1024,2,8 fsdp --deterministic", 120,
            f"{LLAMA}1b-fsdp.jsonl 60 128,16,2,8 fsdp --schedules 1f1b --deterministic"),
    Command("1b-tp", f"{LLAMA}1b-tp.jsonl 80 2048,1024,2,8 tp --deterministic", 120,
            f"{LLAMA}1b-tp.jsonl 60 256,16,1,8 tp --schedules 1f1b --deterministic"),
    Command("1c-2048", f"{LLAMA}1c-2048.jsonl 240 2048,4096,12,8 pp", 290,
            f"{LLAMA}1c-2048.jsonl 30 256,16,2,8 pp --schedules gpipe"),
    Command("1c-16", f"{LLAMA}1c-16.jsonl 240 4096,4096,4,16 pp", 290,
            f"{LLAMA}1c-16.jsonl 30 128,16,2,16 pp --schedules gpipe"),
    # F, I and W as graphs, replayed, next to the best compiled schedule of PyTorch.
    Command("2-4096", f"{TORCHRUN}module_pipelines.py 4096,4096,4,8 1f1b,interleaved zb_v,interleaved,1f1b", 180,
            f"{TORCHRUN}module_pipelines.py 128,16,2,4 1f1b,interleaved zb_v,1f1b"),
    Command("2-2048", f"{TORCHRUN}module_pipelines.py 2048,4096,6,8 1f1b,interleaved zb_v,interleaved,1f1b", 240,
            f"{TORCHRUN}module_pipelines.py 256,16,2,4 1f1b zb_v"),
    # All schedules predicted from a profile of 1F1B, with replays.
    Command("3-eager", f'{TORCHRUN}prediction.py OUT/3-eager.json "4096,4096,4,8;2048,4096,4,16"', 240,
            f"{TORCHRUN}prediction.py OUT/3-eager.json 128,16,4,8"),
    # Experts: pairs that alternate with ep 4 and pp 2 x ep 2. Without ep (pp 4) there is no exchange to hide.
    Command("4-ep4", f"{TORCHRUN}overlap.py 2048,4096,4,16 64,8,1024 1f1b --rows 2", 190,
            f"{TORCHRUN}overlap.py 128,16,2,4 8,2,64 1f1b"),
    Command("4-pp2-ep2", f"{TORCHRUN}overlap.py 2048,4096,4,16 64,8,1024 dualpipe_v --rows 2 --pp 2", 190,
            f"{TORCHRUN}overlap.py 128,16,2,4 8,2,64 dualpipe_v --pp 2"),
    Command("4-pp4", f"{TORCHRUN}moe.py 2048,4096,4,8 64,8,1024 dualpipe_v", 190,
            f"{TORCHRUN}moe.py 128,16,2,8 8,2,64 dualpipe_v"),
    # Rehearsals on Paddle: right plans to the end, wrong elements where they are predicted.
    Command("5", "benchmarks/gpu/real_nccl.py --backend paddle --only rehearse --seconds 480 --out OUT/5.json", 560,
            "benchmarks/gpu/real_nccl.py --device cpu --backend paddle --only rehearse --seconds 280 --out OUT/5.json"),
    # Placement on two hosts of two GPUs; planted hangs.
    Command("6-hangs", f"{HANGS} --jobs 3 --limit 100", 450, f"{HANGS} --jobs 2 --limit 150", 600),
    # Checkpoints from topology to topology.
    Command("7", f"{TORCHRUN}module_topologies.py 2048,1024,4,16", 300, f"{TORCHRUN}module_topologies.py 256,16,2,16"),
)  # fmt: skip


def carry_out(name: str, arguments: str, seconds: float, out: Path, environment: dict[str, str]) -> dict[str, object]:
    """Run a command to its end or for ``seconds``; its row."""
    command = [sys.executable, *shlex.split(arguments.replace("OUT", str(out)))]
    begin, file = time.monotonic(), out / f"{name}.log"
    with file.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )  # fmt: skip
        try:
            status: object = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = f"not done within {seconds:g} s"
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    took = round(time.monotonic() - begin, 1)
    return {"name": name, "command": arguments, "status": status, "seconds": took, "output": lines[-LAST_LINES:]}


def main() -> int:
    """Run the commands that the arguments name; return the exit status."""
    parser = argparse.ArgumentParser(description="All measurements for four GPUs.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--only", default="", help="beginnings of names, with commas between")
    parser.add_argument("--seconds", type=float, default=7200.0, help="after which no further command begins")
    options = parser.parse_args()
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    environment = {"PLANTED_RANKS": "4", "PLANTED_BACKEND": "nccl" if options.device == "gpu" else "gloo"}
    begin, all_right = time.monotonic(), True
    chosen = [each for each in COMMANDS if each.name.startswith(tuple(options.only.split(",")))]
    for each in chosen:
        if time.monotonic() - begin > options.seconds:
            print(f"{each.name:12} not begun", flush=True)
            all_right = False
            continue
        arguments, limit_s = (each.gpu, each.gpu_s) if options.device == "gpu" else (each.cpu, each.cpu_s)
        row = carry_out(each.name, arguments, limit_s, out, environment)
        with (out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{each.name:12} status {row['status']}, {row['seconds']} s: {arguments}", flush=True)
        all_right = all_right and row["status"] == 0
    return int(not (all_right and chosen))


if __name__ == "__main__":
    sys.exit(main())
