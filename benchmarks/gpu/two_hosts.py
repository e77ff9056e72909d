"""Four ranks that NCCL and pipeproof take for two hosts of two GPUs: placement as planned, and round-robin.

    python benchmarks/gpu/two_hosts.py                    # four GPUs, NCCL
    python benchmarks/gpu/two_hosts.py --device cpu       # over gloo: shows that this file works

Each rank is given the name of its host (``PIPEPROOF_NODE``), and NCCL the same (``NCCL_HOSTID``). A plan of pp 2 and
tp 2, which keeps a tp group on one host, is rehearsed under torchrun. A line for each placement has its findings (none,
and PP950), the simulated step, the paths of NCCL for the messages of pp (sockets between hosts alone), and the smallest
bandwidth of these edges. Exit status 1 where something was otherwise than expected.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LIMIT_S = 120
HOSTS: Mapping[str, str] = {"as planned": "RANK / 2", "round-robin": "RANK % 2"}
"""Host of a rank, in the shell's arithmetic."""
PLAN = {
    "pipeproof": 1,
    "model": {"kind": "gpt", "num_layers": 4, "hidden_size": 512, "num_heads": 8, "ffn_size": 1024, "vocab_size": 512,
              "seq_length": 256},
    "topology": {"pp": 2, "tp": 2, "sequence_parallel": True},
    "schedule": {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 1},
    "cost": {"forward_us": 10_000, "backward_us": 20_000, "network": {
        "ranks_per_node": 2,
        "node": {"latency_us": 10, "bandwidth": 200}, "between": {"latency_us": 30, "bandwidth": 2},
    }},
}  # fmt: skip


def rehearsed(host: str, device: str, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report and the edges of a rehearsal whose ranks are on these hosts."""
    plan, report, edges = (folder / name for name in ("plan.json", "report.json", "edges.json"))
    plan.write_text(json.dumps({**PLAN, "run": {"backend": "torch", "device": device, "dtype": "float32"}}))
    rank = (
        f"export PIPEPROOF_NODE=n$(({host})) NCCL_HOSTID=n$(({host})) NCCL_SOCKET_IFNAME=lo; "
        f"exec {sys.executable} -m pipeproof rehearse {plan} --report {report} -o {edges}"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--no-python"]
    done = subprocess.run([*launcher, "bash", "-c", rank], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return json.loads(report.read_text()), json.loads(edges.read_text())


def main() -> int:
    """Rehearse on both placements; return the exit status."""
    parser = argparse.ArgumentParser(description="Four ranks as two hosts.")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    options = parser.parse_args()
    all_right = True
    for name, host in HOSTS.items():
        with tempfile.TemporaryDirectory() as folder:
            report, edges = rehearsed(host, options.device, Path(folder))
        placement, paths = report["placement"], report.get("paths", {})
        codes = [finding["code"] for finding in placement["findings"]]
        is_planned = name == "as planned"
        right = report["passed"] and codes == ([] if is_planned else ["PP950"])
        right = right and (placement["placed_us"] > placement["planned_us"]) is not is_planned
        if options.device == "gpu":
            right = right and {"NET" in path for path in paths.values()} == {is_planned}
        all_right = all_right and right
        slowest = min(edge["bandwidth"] for edge in edges["edges"])
        print(f"{'as expected' if right else 'OTHERWISE':11} {name:11} {codes or 'no finding'}, a step takes "
              f"{placement['placed_us'] / 1e3:.2f} ms, {placement['planned_us'] / 1e3:.2f} ms as planned (simulated); "
              f"pp {sorted(set(paths.values())) or '(no NCCL)'}, at least {slowest:g} GB/s", flush=True)  # fmt: skip
    return int(not all_right)


if __name__ == "__main__":
    sys.exit(main())
