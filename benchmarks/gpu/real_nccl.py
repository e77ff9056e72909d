"""Plans of four ranks on real NCCL, on as few GPUs as there are: proved plans run, and refused plans fail.

    python benchmarks/gpu/real_nccl.py --backend torch                # rehearsals and runs
    python benchmarks/gpu/real_nccl.py --backend paddle --only rehearse

Ranks share GPUs where there are fewer than four (``--share-gpus``), so no time of this means anything. For each plan
there is a line with the expected and the actual result:

- plans that pass ``check`` are rehearsed, and run against the single-process reference;
- ``partial`` under sequence parallelism, with ``--unsafe``: the ranges that arrive wrongly (PP915) are compared with
  those that ``check`` predicts (PP201), element for element; and, with eight elements a rank, against what Fleet's
  helper gave both receivers in the pull request's example;
- an order that deadlocks (PP401), with ``--unsafe``: it hangs, and the watchdog names ranks of the cycle.

``--device cpu`` does the same over gloo, and shows that this file works. What has not begun after ``--seconds`` is left
out, and named. ``--out`` takes everything as JSON. Exit status 1 where something was otherwise than expected.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ONE_S = 75
"""Most seconds of one command."""
HANG_S = 6
"""The watchdog's patience with an order that deadlocks."""
LARGE = {"num_layers": 8, "hidden_size": 64, "num_heads": 4, "ffn_size": 128, "vocab_size": 128, "seq_length": 32}
GOLDEN = {"num_layers": 4, "hidden_size": 4, "num_heads": 2, "ffn_size": 4, "vocab_size": 64, "seq_length": 4}
"""In such a model two ranks have eight elements each of the boundary tensor of one sequence."""
GOLDEN_HELD = [10, 20, 30, 40, 130, 140, 150, 160]
"""Contents of both receivers if rank k's elements are 80 k + 10, 80 k + 20, .., 80 k + 80."""
MOE = {"num_experts": 8, "top_k": 2, "ffn_size": 64}
SEQUENCE_PARALLEL = {"pp": 2, "tp": 2, "sequence_parallel": True}
STUCK = [*[[f"{rank}F0", f"{rank}B0", f"{rank}F1", f"{rank}B1"] for rank in range(3)], ["3F0", "3F1", "3B0", "3B1"]]
"""The last rank waits for the second forward before it sends the first gradient back; the others for that gradient."""


@dataclass(frozen=True)
class Case:
    """One plan and one command; ``expects`` is ``right``, ``corrupt`` or ``hang``."""

    name: str
    verb: str
    expects: str
    sections: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Result of a case."""

    case: Case
    as_expected: bool
    seconds: float
    fact: str
    detail: Mapping[str, Any] = field(default_factory=dict)


PLANS: Mapping[str, Mapping[str, Any]] = {
    "gpipe pp4": {"topology": {"pp": 4}, "schedule": {"kind": "gpipe"}},
    "1f1b pp4": {"topology": {"pp": 4}},
    "interleaved pp4": {"topology": {"pp": 4}, "schedule": {"kind": "interleaved", "num_chunks": 2}},
    "zb_v pp4": {"topology": {"pp": 4}, "schedule": {"kind": "zb_v", "num_chunks": 2}},
    "pp2 tp2": {"topology": {"pp": 2, "tp": 2}},
    "pp2 tp2 sp": {"topology": SEQUENCE_PARALLEL},
    "pp2 tp2 partial": {"topology": {"pp": 2, "tp": 2}, "transport": {"forward": "partial", "backward": "partial"}},
    "ep4": {"topology": {"pp": 1, "ep": 4}, "model": {"moe": MOE}},
}
"""Those that pass ``check``."""


def cases(only: str) -> list[Case]:
    """All of them, the most telling ones first; ``only`` is ``rehearse``, ``run`` or ``all``."""
    partial = {"topology": SEQUENCE_PARALLEL, "transport": {"forward": "partial", "backward": "partial"}}
    stuck = {
        "topology": {"pp": 4},
        "schedule": {"kind": "custom", "programs": STUCK, "num_micro_batches": 2},
    }
    golden = {**partial, "model": GOLDEN, "schedule": {"micro_batch_size": 1}}
    wrong = [
        Case("pp2 tp2 sp partial", "rehearse", "corrupt", partial),
        Case("golden", "rehearse", "corrupt", golden),
        Case("stuck", "rehearse", "hang", stuck),
    ]
    rehearsed = [Case(name, "rehearse", "right", sections) for name, sections in PLANS.items()]
    run = [Case(name, "run", "right", sections) for name, sections in PLANS.items()]
    chosen = [*wrong, *rehearsed] if only != "run" else []
    return [*chosen, *run] if only != "rehearse" else chosen


def plan_of(case: Case, backend: str, device: str) -> dict[str, Any]:
    """The plan of a case, as a plan file has it."""
    sections = case.sections
    schedule = {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 2, **sections.get("schedule", {})}
    plan = {
        "pipeproof": 1,
        "model": {"kind": "gpt", **LARGE, **sections.get("model", {})},
        "topology": sections["topology"],
        "schedule": schedule,
        "run": {"backend": backend, "device": device, "dtype": "float32", "steps": 2, "learning_rate": 0.01},
    }
    return plan | {"transport": sections["transport"]} if "transport" in sections else plan


def carry_out(case: Case, options: argparse.Namespace) -> Outcome:
    """Check the plan, carry it out, and hold one against the other."""
    with tempfile.TemporaryDirectory() as folder:
        plan, report = Path(folder) / "plan.json", Path(folder) / "report.json"
        plan.write_text(json.dumps(plan_of(case, options.backend, options.device)))
        predicted = json.loads(_pipeproof("check", str(plan), "--format", "json").stdout)
        command = [case.verb, str(plan), "--report", str(report)]
        command += ["--share-gpus"] if options.device == "gpu" else []
        command += ["--unsafe"] if case.expects != "right" else []
        command += ["--timeout", str(HANG_S if case.expects == "hang" else 60)]
        begin = time.monotonic()
        try:
            done = _pipeproof(*command)
        except subprocess.TimeoutExpired:
            seconds = time.monotonic() - begin
            return Outcome(case, as_expected=False, seconds=seconds, fact=f"not done within {ONE_S} s")
        seconds = time.monotonic() - begin
        found = json.loads(report.read_text()) if report.exists() else {}
    verify = {"right": _is_right, "corrupt": _is_as_predicted, "hang": _hangs}[case.expects]
    as_expected, fact, detail = verify(done, predicted, found)
    if case.name == "golden" and as_expected:
        held = [_held(detail["found"]["boundary 0->1, forward"], rank) for rank in (2, 3)]
        as_expected = held == [GOLDEN_HELD, GOLDEN_HELD]
        fact = f"both receivers hold {held[0]}" if as_expected else f"the receivers hold {held}"
    if not as_expected:
        detail = {**detail, "output": (done.stdout + done.stderr)[-3000:]}
    return Outcome(case, as_expected, seconds, fact, detail)


def _pipeproof(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipeproof", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=ONE_S, check=False)


CaseResult = tuple[bool, str, dict[str, Any]]
Done = subprocess.CompletedProcess[str]


def _is_right(done: Done, predicted: dict[str, Any], found: dict[str, Any]) -> CaseResult:
    if done.returncode != 0:
        first = re.search(r"error\[.*", done.stdout)
        return False, f"status {done.returncode}: {first.group() if first else ''}"[:100], {}
    if "messages" in found:
        counts = {key: found[key] for key in ("messages", "collectives", "elements", "faults")}
        fact = "{messages} messages, {collectives} collectives, {elements} elements, all right".format(**counts)
        return predicted["certified"] and found["passed"], fact, counts
    bitwise = all(step["bitwise"] for step in found["steps"])
    equality = "bit for bit" if bitwise else f"compared by {found['judged_by']}"
    return found["passed"], f"{len(found['steps'])} steps against the reference: {equality}", {"bitwise": bitwise}


def _is_as_predicted(done: Done, predicted: dict[str, Any], found: dict[str, Any]) -> CaseResult:
    """Elements that ``check`` predicts as lost at each boundary and direction, and their replacements."""
    promised = _ranges(predicted, "PP201")
    arrived = _ranges(found, "PP915")
    detail = {"predicted": promised, "found": arrived}
    if done.returncode != 1 or not promised:
        return False, f"status {done.returncode}, {len(promised)} predicted, {len(arrived)} found", detail
    lost = sum(one["stop"] - one["start"] for ranges in arrived.values() for one in ranges["lost"])
    same = arrived == promised
    word = "are just those that check predicts" if same else "are NOT those that check predicts"
    return same, f"{lost} elements lie wrongly at {len(arrived)} boundaries, and {word}", detail


def _ranges(report: dict[str, Any], code: str) -> dict[str, Any]:
    """By boundary and direction, which elements are wrong."""
    findings = (one for one in report.get("findings", ()) if one["code"] == code)
    return {one["message"].split(":")[0]: one["witness"] for one in findings}


def _held(witness: dict[str, Any], rank: int) -> list[int]:
    """Elements that a receiver holds in place of the eight of its counterpart two ranks before it."""
    held = [80 * (rank - 2) + 10 * (place + 1) for place in range(8)]
    lost, foreign = (
        [
            (one["source_rank"], place)
            for one in witness[key]
            if one["rank"] == rank
            for place in range(one["start"], one["stop"])
        ]
        for key in ("lost", "foreign")
    )
    for (_, place), (source, there) in zip(lost, foreign, strict=True):
        held[place] = 80 * source + 10 * (there + 1)
    return held


def _hangs(done: Done, predicted: dict[str, Any], found: dict[str, Any]) -> CaseResult:
    """True if it ended with the watchdog's status, and the operation that it names is in the cycle of ``check``."""
    cycles = [one for one in predicted["findings"] if one["code"] == "PP401"]
    text = " ".join(done.stdout.split())
    named = re.search(r"error\[PP903\]: (rank \d+ .*?) of step", text)
    if done.returncode != 3 or not cycles or named is None:
        return False, f"status {done.returncode}, {len(cycles)} predicted", {"findings": predicted["findings"]}
    where = named.group(1).rsplit(" ", 1)[-1]
    in_cycle = where in json.dumps(cycles[0])
    word = "which is in the cycle that check predicts" if in_cycle else "which is NOT in the cycle that check predicts"
    return in_cycle, f"hangs at {where}, {word}", {"named": named.group(), "predicted": cycles[0]}


def _render(outcomes: list[Outcome], left_out: list[str]) -> None:
    for one in outcomes:
        sign = "as expected" if one.as_expected else "OTHERWISE"
        case = one.case
        print(f"{sign:11} {case.verb:8} {case.name:18} {one.seconds:5.1f} s  {one.fact}", flush=True)
    right = sum(one.as_expected for one in outcomes)
    print(f"{right} of {len(outcomes)} as expected" + (f"; not begun: {', '.join(left_out)}" if left_out else ""))


def main() -> int:
    """Run the cases, print the table and write the file; return the exit status."""
    parser = argparse.ArgumentParser(description="Plans of four ranks on real NCCL.")
    parser.add_argument("--backend", choices=["torch", "paddle"], default="torch")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--only", choices=["all", "rehearse", "run"], default="all")
    parser.add_argument("--at-once", type=int, default=2, help="number of concurrent commands")
    parser.add_argument("--seconds", type=float, default=120.0, help="after which no further command begins")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    begin = time.monotonic()
    left_out: list[str] = []

    def one(case: Case) -> Outcome | None:
        if time.monotonic() - begin > options.seconds:
            left_out.append(f"{case.verb} {case.name}")
            return None
        return carry_out(case, options)

    with ThreadPoolExecutor(options.at_once) as pool:
        outcomes = [outcome for outcome in pool.map(one, cases(options.only)) if outcome is not None]
    _render(outcomes, left_out)
    if options.out is not None:
        shown = [
            {
                "verb": outcome.case.verb,
                "plan": outcome.case.name,
                "expects": outcome.case.expects,
                "as_expected": outcome.as_expected,
                "seconds": round(outcome.seconds, 1),
                "fact": outcome.fact,
                **outcome.detail,
            }
            for outcome in outcomes
        ]
        options.out.write_text(json.dumps({"left_out": left_out, "cases": shown}, indent=1) + "\n")
    return 0 if all(outcome.as_expected for outcome in outcomes) and not left_out else 1


if __name__ == "__main__":
    sys.exit(main())
