"""Run the planted hangs and a healthy job; keep seconds and verdicts in docs/planted_hangs.json, and write the page.

    python validation/pages/make_hangs.py --healthy-minutes 30

On two GPUs, where each line is printed when its job has ended:

    PLANTED_BACKEND=nccl PLANTED_RANKS=2 python validation/pages/make_hangs.py --jobs 3 --results FILE

``--results FILE`` writes the results there and no page; ``--add FILE`` adds such results to the page.
``--healthy-only`` and ``--hangs-only`` run one half, and keep the results of the other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from pipeproof.exec.monitor.verdict import PATIENCE_S  # noqa: E402
from pipeproof.signals import terminate_raises  # noqa: E402
from tests.exec.monitor.hang_jobs import BACKEND, CAUSES, NUM_RANKS, outcome  # noqa: E402

PAGE = ROOT / "docs" / "planted-hangs.md"
RESULTS = ROOT / "docs" / "planted_hangs.json"
_STEP_S = 0.6
"""Measured seconds of a step of the healthy job, to choose their number; what the page states is counted."""
_DETECTED_S = 10
_NAMES = {
    "crossed_sends": "two ranks send to each other first",
    "missing_receive": "a rank leaves out one receive",
    "extra_collective": "a rank issues one more all-reduce",
    "rank_local_keys": "all-reduce of metrics by keys of the rank",
    "exception": "an exception on one rank",
    "killed": "a rank is killed (SIGKILL)",
    "stopped": "a rank is stopped (SIGSTOP)",
    "data_loader_stuck": "the data loader of a rank is stuck",
    "wrong_group": "an all-reduce in a wrong group",
    "micro_batch_counts": "ranks with different numbers of micro-batches",
    "shape_mismatch": "an all-reduce of another size",
}


def _run_hang(name: str, directory: Path, limit_s: float) -> dict[str, Any]:
    result = outcome(name, directory / name / "rings", patience_s=PATIENCE_S, timeout_s=limit_s)
    verdict = result.verdict
    row = {
        "name": name,
        "expected": list(CAUSES[name]),
        "seconds": round(result.seconds, 1),
        "status": "running" if verdict is None else str(verdict.status),
        "kind": "none" if verdict is None else str(verdict.kind),
        "causes": [] if verdict is None else list(verdict.causes),
    }
    print(_row(row), flush=True)
    if not _is_right(row):
        findings = () if verdict is None else verdict.findings
        lines = () if verdict is None else verdict.lines()
        print("\n".join((*(finding.message for finding in findings), *lines, result.log[-2000:])), flush=True)
    return row


def _run_healthy(directory: Path, seconds: float) -> dict[str, Any]:
    num_steps = max(8, round(seconds / _STEP_S))
    rings = directory / "healthy" / "rings"
    result = outcome("healthy", rings, patience_s=PATIENCE_S, num_steps=num_steps, timeout_s=seconds)
    status = "running" if result.verdict is None else str(result.verdict.status)
    healthy = {"seconds": round(seconds), "status": status}
    print(f"healthy job: {healthy}", flush=True)
    if result.verdict is not None and status == "hang":
        print("\n".join((*result.verdict.lines(), result.log[-2000:])), flush=True)
    return healthy


def _ranks(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) or "none"


def _is_detected(row: Mapping[str, Any]) -> bool:
    return row["status"] == "hang" and row["seconds"] <= _DETECTED_S


def _is_right(row: Mapping[str, Any]) -> bool:
    return row["status"] == "hang" and row["causes"] == row["expected"]


def _row(row: Mapping[str, Any]) -> str:
    return (
        f"| {_NAMES[row['name']]} | {_ranks(row['expected'])} | {row['seconds']:.1f} | {row['kind']} | "
        f"{_ranks(row['causes'])} | {'yes' if _is_right(row) else 'no'} |"
    )


def _section(backend: str, result: Mapping[str, Any]) -> str:
    rows, healthy = result["hangs"], result["healthy"]
    alarms = "one false alarm" if healthy["status"] == "hang" else "no false alarm"
    return f"""\
## {result["num_ranks"]} ranks over {backend}, PyTorch {result["torch"]}, {result["machine"]}

| planted | cause | seconds | kind | named cause | right |
| --- | --- | ---: | --- | --- | --- |
{chr(10).join(map(_row, rows))}

{sum(map(_is_detected, rows))} of {len(rows)} detected within {_DETECTED_S} s, cause named right in \
{sum(map(_is_right, rows))} of {len(rows)}.

A healthy job with jitter (the last of three ranks sleeps up to 1.5 s more than the others) was followed for at most
{healthy["seconds"]} s: {alarms}; it was {healthy["status"]} at the end.
"""


def page_text(results: Mapping[str, Any]) -> str:
    """Return the page of the results of each backend."""
    sections = "\n".join(_section(backend, results[backend]) for backend in sorted(results))
    return f"""\
# Planted hangs

`validation/pages/make_hangs.py` writes this page from `docs/planted_hangs.json`. A job is a pipeline of three
micro-batches, with two all-reduces of metrics and one of gradients in each step. The hang is planted in the fifth step.
The seconds are those from the last event of any rank to the verdict of `pipeproof job hang --follow DIR`, with the
default `--timeout` of {PATIENCE_S:g} s.

{sections}"""


def _machine() -> str:
    import torch

    name = f"{NUM_RANKS} x {torch.cuda.get_device_name()}" if BACKEND == "nccl" else f"{os.cpu_count()} processors"
    return f"one machine with {name}"


def main() -> None:
    """Measure, keep the results, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--healthy-minutes", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=1, help="planted hangs at a time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one planted hang, its start included")
    parser.add_argument("--hangs-only", action="store_true")
    parser.add_argument("--healthy-only", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--add", type=Path, help="add results of another machine, and measure nothing")
    arguments = parser.parse_args()
    file: Path = arguments.results
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if arguments.add is not None:
        results |= json.loads(arguments.add.read_text(encoding="utf-8"))
    else:
        import torch

        result = results.setdefault(BACKEND, {})
        result |= {"num_ranks": NUM_RANKS, "torch": torch.__version__.partition("+")[0], "machine": _machine()}
        with terminate_raises(), tempfile.TemporaryDirectory() as directory:
            path = Path(directory)
            if not arguments.healthy_only:
                with ThreadPoolExecutor(arguments.jobs) as pool:
                    futures = [pool.submit(_run_hang, name, path, arguments.limit) for name in _NAMES]
                    result["hangs"] = [future.result() for future in futures]
            if not arguments.hangs_only:
                result["healthy"] = _run_healthy(path, arguments.healthy_minutes * 60)
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if file == RESULTS:
        PAGE.write_text(page_text(results), encoding="utf-8")


if __name__ == "__main__":
    main()
