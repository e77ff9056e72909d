#!/bin/bash
# Six planted failures of a loop of all-reduces of two ranks, one GPU each, watched by `job hang --follow` from before
# their start. Three to four minutes; PyTorch 2.11, Python 3.12.
#
#   bash validation/hardening/nccl_monitor.sh OUT           # BACKEND=gloo: the same without GPUs
#
# OUT/summary.txt gets a line for each kind as it ends: seconds from the failure to the verdict while the job is
# followed, its status, kind and causes, then status, kind and causes of `job hang` after all processes are gone.
# OUT/KIND/ has the rings, both verdicts and the output of the ranks.
set -u
out=$(mkdir -p "$1" && cd "$1" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
backend=${BACKEND:-nccl}
python=${PYTHON:-python3}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 COLUMNS=200

cat > "$out/job.py" <<'PROGRAM'
import os, sys, time
import torch
import torch.distributed as dist
from pipeproof.torch import watch

kind, directory, backend = sys.argv[1:]
local = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local) if backend == "nccl" else torch.device("cpu")
if backend == "nccl":
    torch.cuda.set_device(local)
    dist.init_process_group("nccl", device_id=device)
else:
    dist.init_process_group("gloo")
rank = dist.get_rank()
watch(directory=os.path.join(directory, "rings"))
x = torch.ones(1 << 20, device=device)
gathered = [torch.empty_like(x) for _ in range(2)]


def failed():
    with open(os.path.join(directory, "failed_at"), "a") as file:
        file.write(f"{time.time()}\n")


def next_batch(i):
    if kind == "sleep" and rank == 1 and i == 5:
        failed()
        time.sleep(600)


for i in range(1000):
    next_batch(i)
    if kind == "mismatch" and i == 5 and rank == 1:
        failed()
        dist.all_gather(gathered, x)
    elif kind == "late_mismatch" and i == 5 and rank == 1:
        failed()
        dist.all_reduce(x[: 1 << 19])
    elif kind == "kill" and i == 5 and rank == 1:
        failed()
        os.kill(os.getpid(), 9)
    elif kind == "p2p" and i == 5:
        failed()
        dist.send(x, 1 - rank)
    elif kind == "leave" and i == 5 and rank == 1:
        failed()
        break
    else:
        dist.all_reduce(x)
    if backend == "nccl":
        torch.cuda.synchronize()
    if kind == "late_mismatch":
        time.sleep(0.01)
print(rank, "ended", float(x[0]), flush=True)
PROGRAM

verdict() {  # DIRECTORY FILE: status, kind and causes of a verdict
    "$python" - "$1" "$2" <<'PROGRAM'
import json, os, pathlib, sys
directory, name = pathlib.Path(sys.argv[1]), sys.argv[2]
file = directory / name
try:
    text = file.read_text()
    data = json.loads(text[text.index("{"):])
    failed = directory / "failed_at"
    seconds = file.stat().st_mtime - float(failed.read_text().split()[0]) if failed.exists() else float("nan")
    states = " ".join(f"{rank['rank']}={rank['state']}" for rank in data["ranks"])
    took = f"after {seconds:5.1f} s: " if name == "follow.json" else ""
    print(f"{took}{data['status']} {data['kind']} causes {data['causes']} ({states})")
except (OSError, ValueError) as error:
    print(f"no verdict: {error}")
PROGRAM
}

{
    date
    timeout 60 "$python" -c "
import sys, torch, pipeproof
import click, filelock, networkx, numpy, pydantic, rich, simpy, yaml
print(sys.version.split()[0], torch.__version__, torch.cuda.device_count(), 'GPUs')
print([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])" 2>&1 | tail -3
} | tee "$out/summary.txt"

port=29610
for kind in kill mismatch leave late_mismatch sleep p2p; do
    at="$out/$kind"
    rm -rf "$at"
    mkdir -p "$at/rings"
    port=$((port + 1))
    timeout 40 "$python" -m pipeproof job hang --follow --duration 30 --format json "$at/rings" \
        > "$at/follow.json" 2> "$at/follow.err" &
    monitor=$!
    sleep 1.5
    timeout -k 5 45 "$python" -m torch.distributed.run --nproc-per-node 2 --master-port $port "$out/job.py" \
        "$kind" "$at" "$backend" > "$at/job.log" 2>&1 &
    job=$!
    wait $monitor
    echo "$kind, followed: $(verdict "$at" follow.json)" | tee -a "$out/summary.txt"
    timeout 20 "$python" -m pipeproof job hang "$at/rings" > "$at/follow_text.txt" 2>&1
    sleep 1
    kill $job 2> /dev/null  # torchrun ends its ranks
    for _ in $(seq 80); do kill -0 $job 2> /dev/null || break; sleep 0.1; done
    kill -9 $job 2> /dev/null
    wait $job 2> /dev/null
    timeout 20 "$python" -m pipeproof job hang --format json "$at/rings" > "$at/after.json" 2> "$at/after.err"
    echo "$kind, afterwards: $(verdict "$at" after.json)" | tee -a "$out/summary.txt"
done
[ $SECONDS -gt 190 ] || timeout 60 "$python" "$root/benchmarks/watch_overhead.py" --backend "$backend" --seconds 20 > "$out/overhead.txt" 2>&1
tail -5 "$out/overhead.txt" 2> /dev/null | tee -a "$out/summary.txt"
date | tee -a "$out/summary.txt"
