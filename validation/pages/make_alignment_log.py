"""Write the figures of ``results/alignment-log.md`` from the runs in ``results/alignment_log.json``.

``python validation/pages/make_alignment_log.py`` writes, ``--check`` exits 1 if the page is stale. ``--measure`` runs
the plans of ``examples/alignment/`` again, 100 steps on eight processes each, and aligns their records. ``--faults``
plants the faults of ``tests/align/planted.py`` again. ``--deepseek`` measures the two plans of DeepSeek-V4's layers,
on four processes and on one. All need Paddle. The first two take up to ten minutes on two cores, the last up to twenty.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pages import EVIDENCE, ROOT, fill, main, table

from pipeproof.analysis.align.array_digests import md5_of
from pipeproof.analysis.align.read_record import open_record
from pipeproof.specs.load_plan import load_plan

RESULTS = EVIDENCE / "alignment_log.json"
EXAMPLES = ROOT / "examples" / "alignment"
NAMES = ("1f1b", "interleaved", "zb_v")
PAIRS = (
    *((f"{name}/run", f"{name}/reference") for name in NAMES),
    ("interleaved/run", "1f1b/run"),
    ("zb_v/run", "1f1b/run"),
)
"""Pairs of records to align: each run with its reference, and the runs with each other."""
DEEPSEEK = ("deepseek_v4", "deepseek_v4_unpartitioned")
DEEPSEEK_PAIRS = (
    ("deepseek_v4/run", "deepseek_v4/reference"),
    ("deepseek_v4/run.log", "deepseek_v4/reference.log", "--order-a", "main,mtp", "--order-b", "main,mtp"),
    ("deepseek_v4/run", "deepseek_v4_unpartitioned/run", "--rounding"),
)
"""Sides to align, and options: records, and logs with the losses of each micro-batch."""
LOSSES = ("main", "mtp", "router")
"""The kinds of losses that ``align`` counts."""
PATIENCE_S = 600.0
"""Time limit of a run: several times its time on an idle machine."""

Results = Mapping[str, Any]


def plans(names: Sequence[str] = NAMES) -> dict[str, dict[str, Any]]:
    """Return the examples by name."""
    return {
        name: load_plan(EXAMPLES / f"{name}.yaml").spec.model_dump(mode="json", exclude_unset=True) for name in names
    }


# --- measuring ---


def measured_runs(names: Sequence[str], pairs: Sequence[Sequence[str]], *options: str) -> dict[str, Any]:
    """Run plans one after the other, recorded with these options, and align the records.

    Returns:
        ``paddle``, the installed version; ``runs``: for each plan the plan, exit status, seconds, and record size;
        ``logs``: the MD5 of the log of each record whose bits are compared, and ``log``, the log of the first one;
        ``alignments``: the output and exit status of ``align`` for each pair.
    """
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder)
        for name, plan in plans(names).items():
            file = records / f"{name}.json"
            file.write_text(json.dumps(plan), encoding="utf-8")
            start = time.monotonic()
            done = _pipeproof(records, "run", file.name, "--record", name, "--record-layers", *options)
            seconds = time.monotonic() - start
            if done.returncode not in (0, 1):
                raise RuntimeError(f"{name}: exit status {done.returncode}:\n{done.stdout}{done.stderr}")
            size = (records / name / "run" / "record.jsonl").stat().st_size
            runs[name] = {"plan": plan, "status": done.returncode, "seconds": round(seconds), "record_bytes": size}
            sys.stderr.write(f"{name}: exit status {done.returncode}, {seconds:.0f} s\n")
        for side in (one for pair in pairs for one in pair if one.endswith(".log")):
            (records / side).write_text(losses_of((records / side).with_suffix("")), encoding="utf-8")
        logs = {
            side: log_of(records / side / "record.jsonl")
            for side in dict.fromkeys(side for pair in pairs if len(pair) == 2 for side in pair)
        }
        alignments = {}
        for pair in pairs:
            done = _pipeproof(records, "state", "align", *pair)
            alignments[" ".join(pair)] = {"status": done.returncode, "printed": done.stdout}
    return {
        "paddle": version("paddlepaddle"),
        "runs": runs,
        "log": next(iter(logs.values())),
        "logs": {side: _md5("\n".join(lines)) for side, lines in logs.items()},
        "alignments": alignments,
    }


def measured_faults() -> dict[str, Any]:
    """Return the output of ``align`` for each fault under each schedule."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "faults.json"
        command = [sys.executable, "-m", "tests.align.planted", str(file)]
        subprocess.run(command, cwd=ROOT, check=True, timeout=PATIENCE_S)
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _pipeproof(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeproof", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


def losses_of(record: Path) -> str:
    """Return a log of the losses of each rank's micro-batches, main and MTP alternately, in PaddleFleet's form.

    The head's output of a micro-batch is its addends to the losses. The record must have values.
    """
    opened, lines = open_record(record), list[str]()
    for step in opened.steps():
        for tensor in step.tensors:
            if (tensor.layer, tensor.direction, tensor.side) == ("head", "forward", "output"):
                values = opened.values(tensor)
                assert values is not None
                assert values.whole.shape == (2,)
                lines += (
                    f"final_loss: rank={tensor.shards[0].rank} val={float(loss):.20f} md5={md5_of(loss)}"
                    for loss in values.whole
                )
    return "\n".join(lines) + "\n"


def log_of(record: Path) -> list[str]:
    """Return one line per step: its losses to 20 decimals, their MD5s, and one MD5 of the MD5s of all gradients."""
    lines, gradients = [], list[str]()
    for text in record.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["kind"] == "gradient":
            gradients.append(f"{line['parameter']} {line['md5']}")
        elif line["kind"] == "step":
            mtp = next(one for one in line["others"] if one["name"] == "mtp.0")
            losses = f"{line['loss']} {line['loss_md5']}  {mtp['loss']} {mtp['md5']}"
            lines.append(f"{line['step']:>4}  {losses}  {_md5('; '.join(sorted(gradients)))}")
            gradients.clear()
    return lines


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


# --- the page ---


def runs_part(results: Results) -> str:
    """Return the table of the runs and their results."""
    rows = [
        (
            f"[`{name}`](../../examples/alignment/{name}.yaml)",
            "every loss and every gradient is the reference's" if run["status"] == 0 else "**does not match**",
            f"{run['seconds']} s",
            f"{run['record_bytes'] / 1e6:.1f} MB",
        )
        for name, run in results["runs"].items()
    ]
    return table(("plan", "result of `run`", "time", "record"), rows) + f"\nPaddle {results['paddle']}, float32.\n"


def alignments_part(results: Results) -> str:
    """Return the output of ``align`` for each pair."""
    blocks = [
        f"```console\n$ pipeproof state align {pair}\n```\n\n```text\n{found['printed'].strip()}\n```\n"
        for pair, found in results["alignments"].items()
    ]
    return "\n".join(blocks)


def log_part(results: Results) -> str:
    """Return the lines of all steps, and the records that have them."""
    same = [side for side, md5 in results["logs"].items() if md5 == _md5("\n".join(results["log"]))]
    summary = f"{len(same)} of {len(results['logs'])} records have these lines, to the last digit: {', '.join(same)}."
    header = f"step  {'main loss':<22} {'md5':<32}  {'loss of mtp.0':<22} {'md5':<32}  md5 of the gradients' md5s"
    return f"{summary}\n\n```text\n" + "\n".join((header, *results["log"])) + "\n```\n"


def faults_part(results: Results) -> str:
    """Return a row for each fault and each report about it; schedules with equal reports share a row."""
    by_fault: dict[str, dict[str, Any]] = {}
    for name, found in results["faults"].items():
        schedule, fault = name.split("/")
        by_fault.setdefault(fault, {})[schedule] = found
    rows = []
    for of_schedules in by_fault.values():
        schedules_of: dict[tuple[str, ...], list[str]] = {}
        for schedule, found in of_schedules.items():
            schedules_of.setdefault(_report_cells(found["printed"]), []).append(schedule)
        for cells, schedules in schedules_of.items():
            planted = next(iter(of_schedules.values()))["planted"]
            rows.append((planted, ", ".join(f"`{one}`" for one in schedules), *cells))
    losses = (f"first {name} loss that differs" for name in LOSSES)
    return table(("fault", "schedules", "first tensor that differs", "guess", *losses), rows)


def _report_cells(printed: str) -> tuple[str, ...]:
    """From the output of ``align``: the first tensor without ranks, the guessed cause, the first loss of each kind."""
    lines = printed.splitlines()
    place = _behind(lines, "first tensor that differs, in execution order: ").partition(", rank")[0]
    cause = _behind(lines, "  cause, a guess: ").partition(":")[0]
    losses = [_behind(lines, f"first_{name}_diff: ") for name in LOSSES]
    return place, cause, *(_loss(line) if line else "none" for line in losses)


def _loss(line: str) -> str:
    """Return step and name, and the ratio of A to B if it is printed."""
    where, _, rest = line.partition(" (")
    factor = rest.rpartition("; A is ")[2] if "; A is " in rest else ""
    return where + (f": {factor}'s" if factor else "")


def _behind(lines: Sequence[str], beginning: str) -> str:
    return next((line.removeprefix(beginning) for line in lines if line.startswith(beginning)), "")


def shown_part(results: Results) -> str:
    """Return the whole output for one fault."""
    printed = results["faults"]["1f1b/rope"]["printed"].strip()
    return f"```text\n{printed}\n```\n"


def parts(results: Results) -> dict[str, str]:
    """Return the generated parts of the page, by name."""
    return {
        "runs": runs_part(results),
        "alignments": alignments_part(results),
        "log": log_part(results),
        "faults": faults_part(results),
        "shown": shown_part(results),
        "deepseek-runs": runs_part(results["deepseek_v4"]),
        "deepseek-alignments": alignments_part(results["deepseek_v4"]),
        "deepseek-log": log_part(results["deepseek_v4"]),
    }


def _measure(options: Sequence[str]) -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    if "--measure" in options:
        results |= measured_runs(NAMES, PAIRS)
    if "--deepseek" in options:
        results |= {"deepseek_v4": measured_runs(DEEPSEEK, DEEPSEEK_PAIRS, "--record-values")}
    if "--faults" in options:
        results |= {"faults": measured_faults()}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] and set(sys.argv[1:]) <= {"--measure", "--faults", "--deepseek"}:
        _measure(sys.argv[1:])
        sys.exit(0)
    page = EVIDENCE / "alignment-log.md"
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    sys.exit(main("validation/pages/make_alignment_log.py", {page: fill(page, parts(measured))}))
