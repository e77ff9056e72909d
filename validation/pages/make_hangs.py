"""Run the planted hangs and a healthy job; keep seconds and verdicts in results/planted_hangs.json, and write the page.

    python validation/pages/make_hangs.py --healthy-minutes 30
    python validation/pages/make_hangs.py --healthy-minutes 30 --framework paddle

On two GPUs, where each line is printed when its job has ended:

    PLANTED_BACKEND=nccl PLANTED_RANKS=2 python validation/pages/make_hangs.py --jobs 3 --results FILE

With fewer GPUs than ranks, ranks share them.

``--results FILE`` writes the results there and no page, with status 1 if a cause was not named right; ``--add FILE``
adds such results to the page. ``--only NAME`` runs one planted hang, ``--healthy-only`` and ``--hangs-only`` one half;
other results are kept. ``--check`` exits 1 if the page does not match the kept results.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pages import EVIDENCE, ROOT, main

sys.path.insert(0, str(ROOT))

from pipeproof.exec.monitor.verdict import PATIENCE_S
from pipeproof.signals import terminate_raises
from tests.exec.monitor.hang_jobs import BACKEND, CAUSES, NUM_RANKS, Framework, outcome

PAGE = EVIDENCE / "planted-hangs.md"
RESULTS = EVIDENCE / "planted_hangs.json"
_STEP_S = 0.6
"""Measured seconds of a step of the healthy job, to choose their number; the page states counted figures."""
_DETECTED_S = 10
_TITLES: Mapping[Framework, str] = {"torch": "PyTorch", "paddle": "Paddle"}
_PACKAGES: Mapping[Framework, str] = {"torch": "torch", "paddle": "paddlepaddle"}
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


def _run_hang(name: str, framework: Framework, directory: Path, limit_s: float) -> dict[str, Any]:
    rings = directory / name / "rings"
    result = outcome(name, rings, patience_s=PATIENCE_S, timeout_s=limit_s, framework=framework)
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


def _run_healthy(framework: Framework, directory: Path, seconds: float) -> dict[str, Any]:
    num_steps = max(8, round(seconds / _STEP_S))
    rings = directory / "healthy" / "rings"
    start = time.monotonic()
    result = outcome(
        "healthy", rings, patience_s=PATIENCE_S, num_steps=num_steps, timeout_s=seconds, framework=framework
    )
    status = "running" if result.verdict is None else str(result.verdict.status)
    healthy = {"seconds": int(time.monotonic() - start), "status": status}
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


def _merge(results: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Put new results of each framework and backend in place of older ones."""
    for name, values in new.items():
        old = results.get(name, {})
        rows = {row["name"]: row for row in (*old.get("hangs", ()), *values.get("hangs", ()))}
        results[name] = old | values | {"hangs": [rows[kind] for kind in _NAMES if kind in rows]}


def _healthy(result: Mapping[str, Any]) -> str:
    healthy = result.get("healthy")
    if healthy is None:
        return ""
    alarms = "one false alarm" if healthy["status"] == "hang" else "no false alarm"
    return f"""
A healthy job with jitter (the last of three ranks sleeps up to 1.5 s more than the others) was followed for
{healthy["seconds"]} s: {alarms}; it {"had ended" if healthy["status"] == "ended" else "was still running"} then.
"""


def _section(name: str, result: Mapping[str, Any]) -> str:
    rows = result["hangs"]
    return f"""\
## {name}

{result["num_ranks"]} ranks, {result["framework"]}, {result["machine"]}.

| planted | cause | seconds | kind | named cause | right |
| --- | --- | ---: | --- | --- | --- |
{chr(10).join(map(_row, rows))}

{sum(map(_is_detected, rows))} of {len(rows)} detected within {_DETECTED_S} s, cause named right in \
{sum(map(_is_right, rows))} of {len(rows)}.
{_healthy(result)}"""


def page_text(results: Mapping[str, Any]) -> str:
    """Return the page of the results of each framework and backend."""
    sections = "\n".join(_section(name, results[name]) for name in sorted(results))
    return f"""\
# Planted hangs

`validation/pages/make_hangs.py` writes this page from `planted_hangs.json`. A job is a pipeline of three
micro-batches, with two all-reduces of metrics and one of gradients in each step. The hang is planted in the fifth step.
The seconds are those from the last event of any rank to the verdict of `pipeproof job hang --follow DIR`, with the
default `--timeout` of {PATIENCE_S:g} s.

{sections}"""


def _machine() -> str:
    if BACKEND != "nccl":
        return f"one machine with {os.cpu_count()} processors"
    import torch

    return f"one machine with {min(NUM_RANKS, _num_gpus())} x {torch.cuda.get_device_name()}"


def _num_gpus() -> int:
    import torch

    return int(torch.cuda.device_count())


def _title(framework: Framework) -> str:
    """Ranks that share GPUs have a section of their own."""
    title = f"{_TITLES[framework]} over {BACKEND}"
    if BACKEND != "nccl" or (count := _num_gpus()) >= NUM_RANKS:
        return title
    return f"{title}, {NUM_RANKS} ranks on {'one GPU' if count == 1 else f'{count} GPUs'}"


def _version(framework: Framework) -> str:
    return f"{_TITLES[framework]} {version(_PACKAGES[framework]).partition('+')[0]}"


def run() -> int:
    """Measure, keep the results, and write the page; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--healthy-minutes", type=float, default=1.0)
    parser.add_argument("--jobs", type=int, default=1, help="planted hangs at a time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one planted hang, its start included")
    parser.add_argument("--only", action="append", choices=_NAMES, help="a planted hang; more with more options")
    parser.add_argument("--hangs-only", action="store_true")
    parser.add_argument("--healthy-only", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--add", type=Path, help="add results of another machine, and measure nothing")
    parser.add_argument("--framework", choices=["torch", "paddle"], default="torch")
    parser.add_argument("--check", action="store_true", help="measure nothing, and compare the page")
    arguments = parser.parse_args()
    file: Path = arguments.results
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if arguments.add is not None:
        _merge(results, json.loads(arguments.add.read_text(encoding="utf-8")))
    elif not arguments.check:
        _merge(results, {_title(arguments.framework): _measure(arguments)})
    if not arguments.check:
        file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.argv[1:] = ["--check"] if arguments.check else []
    if file == RESULTS:
        return main("validation/pages/make_hangs.py", {PAGE: page_text(results)})
    return int(not all(_is_right(row) for result in results.values() for row in result.get("hangs", ())))


def _measure(arguments: argparse.Namespace) -> dict[str, Any]:
    framework: Framework = arguments.framework
    result: dict[str, Any] = {"num_ranks": NUM_RANKS, "framework": _version(framework), "machine": _machine()}
    with terminate_raises(), tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        if not arguments.healthy_only:
            with ThreadPoolExecutor(arguments.jobs) as pool:
                names = arguments.only or list(_NAMES)
                futures = [pool.submit(_run_hang, name, framework, path, arguments.limit) for name in names]
                result["hangs"] = [future.result() for future in futures]
        if not (arguments.hangs_only or arguments.only):
            result["healthy"] = _run_healthy(framework, path, arguments.healthy_minutes * 60)
    return result


if __name__ == "__main__":
    sys.exit(run())
