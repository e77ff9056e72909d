"""Writes the tables of ``results/profile-accuracy.md`` from the runs in ``results/measured.json``.

``python validation/pages/make_measured.py`` writes, ``--check`` exits 1 if a part is stale. ``--measure`` runs all
plans again on this machine and stores the results, ``--measure NAME`` one of them; that needs Paddle and takes minutes.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import yaml
from pages import EVIDENCE, ROOT, fill, main, table

from pipeproof.comm.lower import lower_loaded
from pipeproof.schedule.ops import COMPUTE_KINDS, parse_op
from pipeproof.sim.simulate import simulate
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.profile_file import Profile, Spread, StageOp

RESULTS = EVIDENCE / "measured.json"
NUM_STEPS = 6
LARGER = {
    "kind": "gpt", "num_layers": 4, "hidden_size": 256, "num_heads": 4, "ffn_size": 512, "vocab_size": 512,
    "seq_length": 64,
}  # fmt: skip
_MS = 1000.0


def _larger(pp: int, learning_rate: float = 1e-5, **schedule: Any) -> dict[str, Any]:
    """Return a larger plan; its default learning rate is so low that no gradient becomes tiny."""
    return {
        "pipeproof": 1,
        "model": LARGER,
        "topology": {"pp": pp},
        "schedule": {"kind": "1f1b", "num_micro_batches": 8, "micro_batch_size": 4, **schedule},
        "run": {"seed": 7, "learning_rate": learning_rate},
    }


LARGER_PLANS = {
    "larger_pp2": _larger(2),
    "larger_pp2_gpipe": _larger(2, kind="gpipe"),
    "larger_pp2_16": _larger(2, num_micro_batches=16),
    "larger_pp2_interleaved": _larger(2, kind="interleaved", num_chunks=2),
    "larger_pp2_zb_h1": _larger(2, kind="zb_h1"),
    "larger_pp2_looped_bfs": _larger(2, kind="looped_bfs", num_chunks=2),
    "larger_pp4": _larger(4),
    "larger_pp2_saturating": _larger(2, learning_rate=0.01),
}
EXAMPLES = ("gpt_pp2_tp2_partial", "gpt_pp2_tp2_sp_full", "gpt_pp4")
PLANS = (*EXAMPLES, *LARGER_PLANS)
CASES = (
    *((name, name) for name in (*EXAMPLES, "larger_pp2", "larger_pp2_interleaved", "larger_pp4")),
    ("larger_pp2_saturating", "larger_pp2_saturating"),
    ("larger_pp2_zb_h1", "larger_pp2_zb_h1"),
    ("larger_pp2", "larger_pp2_gpipe"),
    ("larger_pp2", "larger_pp2_16"),
    ("larger_pp2", "larger_pp2_zb_h1"),
    ("larger_pp2_interleaved", "larger_pp2_looped_bfs"),
    ("larger_pp4", "larger_pp2_interleaved"),
)
"""Pairs of the plan whose first run is profiled and the plan whose second run is predicted."""


def plan_data(name: str) -> dict[str, Any]:
    """Return a plan as data with ``NUM_STEPS`` steps; its file paths are absolute."""
    if name in LARGER_PLANS:
        data = json.loads(json.dumps(LARGER_PLANS[name]))
    else:
        data = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text(encoding="utf-8"))
        if "path" in data["schedule"]:
            data["schedule"]["path"] = str(ROOT / "examples" / data["schedule"]["path"])
    data.pop("cost", None)
    data["run"] = {**data["run"], "steps": NUM_STEPS}
    return data


# --- measuring ---


def measure(name: str) -> list[dict[str, Any]]:
    """Run a plan twice and return both measurements without the first step."""
    return [_one_run(plan_data(name)) for _ in range(2)]


def _one_run(data: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        plan, profile, report = (Path(folder) / name for name in ("plan.json", "profile.json", "report.json"))
        plan.write_text(json.dumps(data), encoding="utf-8")
        command = [sys.executable, "-m", "pipeproof", "run", str(plan), "--profile", str(profile), "--report"]
        starved = _watched([*command, str(report)])
        times: dict[str, list[float]] = defaultdict(list)
        extents: dict[int, list[float]] = defaultdict(list)
        for span in json.loads(report.read_text(encoding="utf-8"))["timeline"]:
            op = parse_op(span["op"])
            if span["step"] and op.kind in COMPUTE_KINDS:
                times[f"{op.stage}{op.kind}"].append(round(span["end_us"] - span["start_us"], 3))
                extents[span["step"]] += [span["start_us"], span["end_us"]]
        return {
            "profile": json.loads(profile.read_text(encoding="utf-8")),
            "times_us": dict(sorted(times.items())),
            "computing_us": [round(max(ends) - min(ends), 3) for _, ends in sorted(extents.items())],
            "starved": round(starved, 3),
        }


def _watched(command: Sequence[str]) -> float:
    """Run a command, with priority for its ranks where the system allows it.

    Returns:
        The fraction of their runnable time in which the main threads of the ranks had no core.
    """
    ran: dict[int, tuple[int, int]] = {}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            for rank in _ranks_of(process.pid):
                if rank not in ran:
                    with contextlib.suppress(OSError):
                        Path(f"/proc/{rank}/autogroup").write_text("-19", encoding="ascii")
                with contextlib.suppress(OSError):
                    running, waiting, _ = Path(f"/proc/{rank}/schedstat").read_text(encoding="ascii").split()
                    ran[rank] = (int(running), int(waiting))
            time.sleep(0.05)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
    running_ns, waiting_ns = (sum(times) for times in zip(*ran.values(), strict=True))
    return waiting_ns / (running_ns + waiting_ns)


def _ranks_of(pid: int) -> list[int]:
    """Return the rank processes of a run."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return [int(child) for child in children if "exec.launch.worker" in _command_line(child)]
    return []


def _command_line(pid: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    return ""


# --- predicting ---


def predicted_us(name: str, cost: Mapping[str, Any]) -> float:
    """Return the time from the first start to the last end of the computations of one step, in microseconds."""
    data = {**plan_data(name), "cost": {"p2p": "backend", **cost}}
    timeline = simulate(lower_loaded(plan_from_dict(data))).timeline
    spans = [span for rank in range(len(timeline.ranks)) for span, _ in timeline.compute_spans(rank)]
    return float(timeline.us(max(span.end for span in spans)) - timeline.us(min(span.start for span in spans)))


def by_medians(name: str, profile: Mapping[str, Any]) -> float:
    """Return the prediction of ``cost.profile``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.json"
        file.write_text(json.dumps(profile), encoding="utf-8")
        return predicted_us(name, {"profile": str(file)})


def by_means(name: str, profile: Profile, host_us: float = 0.0) -> float:
    """Return the prediction with the means of the profile, plus ``host_us`` for each computation."""
    message = profile.messages[0].mean_us if profile.messages else 0.0
    cost: dict[str, Any] = {"p2p_latency_us": round(message, 3)}
    for kind, key in _computed(profile).items():
        cost[key] = [round(_op(profile, stage, kind).whole.mean_us + host_us, 3) for stage in _stages(profile)]
    return predicted_us(name, cost)


def host_us(profile: Profile) -> float:
    """Return the host time between operations and after waits, per computation of its rank."""
    computations = sum(_op(profile, s, kind).whole.count for s in _stages(profile) for kind in _computed(profile))
    spent = [spread.count * spread.mean_us for spread in (profile.host.between_ops, profile.host.after_wait) if spread]
    return sum(spent) / computations


def _stages(profile: Profile) -> range:
    return range(len(profile.stages))


def _computed(profile: Profile) -> dict[str, str]:
    """Return the measured kinds of computation, each with the key of its time."""
    keys = {"F": "forward_us", "B": "backward_us", "I": "backward_input_us", "W": "backward_weight_us"}
    there = {op.kind for op in profile.stages[0].ops}
    if "B" in there:  # its parts may be measured too
        there -= {"I", "W"}
    return {kind: key for kind, key in keys.items() if kind in there}


def _op(profile: Profile, stage: int, kind: str) -> StageOp:
    return next(op for op in profile.stages[stage].ops if op.kind == kind)


# --- tables ---


def lengths_part(results: Mapping[str, Any]) -> str:
    """Table of errors: the first run's medians against every operation of the second run."""
    header = ("plan", "operation", "number", "predicted, ms", "measured / predicted", "error, median", "error, 9 of 10")
    rows = []
    for name, _ in (case for case in CASES if case[0] == case[1]):
        first, second = results[name]
        profile = Profile.model_validate(first["profile"])
        for kind in _computed(profile):
            ratios = []
            for stage in _stages(profile):
                expected = _op(profile, stage, kind).whole.median_us
                ratios += [length / expected for length in second["times_us"][f"{stage}{kind}"]]
            mean = fmean(_op(profile, stage, kind).whole.median_us for stage in _stages(profile))
            errors = [abs(ratio - 1) for ratio in ratios]
            shares = (_percent(median(errors)), _percent(quantiles(errors, n=10)[-1]))
            rows.append((f"`{name}`", kind, str(len(ratios)), f"{mean / _MS:.2f}", f"{median(ratios):.2f}", *shares))
        rows += _points(f"`{name}`", profile, Profile.model_validate(second["profile"]))
    return table(header, rows)


def _points(name: str, first: Profile, second: Profile) -> Iterator[tuple[str, ...]]:
    """Rows of messages and collectives of both runs by size; a profile has no single values, only medians."""
    for a in first.messages:
        for b in second.messages:
            if a.num_bytes == b.num_bytes:
                yield (name, f"message of {a.num_bytes} bytes", str(b.count), *_ratio(a, b))
    for one in first.collectives:
        for two in second.collectives:
            if (one.kind, one.axis_size, one.num_bytes) == (two.kind, two.axis_size, two.num_bytes):
                yield (name, f"{one.kind} of {one.num_bytes} bytes", str(two.count), *_ratio(one, two))


def _ratio(predicted: Spread, measured: Spread) -> tuple[str, str, str, str]:
    return (f"{predicted.median_us / _MS:.2f}", f"{measured.median_us / predicted.median_us:.2f}", "", "")


def steps_part(results: Mapping[str, Any]) -> str:
    """Table of predicted and measured times of a step's computations."""
    header = ("profile of", "predicted plan", "by medians, ms", "by means", "and host", "work / cores", "measured, ms",
              "measured / predicted", "starved")  # fmt: skip
    return table(header, [_step_row(results, profiled, name) for profiled, name in CASES])


def _step_row(results: Mapping[str, Any], profiled: str, name: str) -> tuple[str, ...]:
    first, second = results[profiled][0], results[name][1]
    profile = Profile.model_validate(first["profile"])
    medians = by_medians(name, first["profile"])
    predictions = (medians, by_means(name, profile), by_means(name, profile, host_us(profile)), work_us(name, profile))
    measured = second["computing_us"]
    spread = f"{median(measured) / _MS:.1f} ({min(measured) / _MS:.1f} to {max(measured) / _MS:.1f})"
    same = "the same, another run" if profiled == name else f"`{name}`"
    ratio = f"{median(measured) / medians:.2f}"
    shown = (f"{us / _MS:.1f}" for us in predictions)
    return (f"`{profiled}`", same, *shown, spread, ratio, _percent(second["starved"]))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def work_us(name: str, profile: Profile) -> float:
    """Return the lower bound of a step on this machine: the sum of its computations divided by the cores."""
    plan = plan_from_dict(plan_data(name)).spec
    replicas = plan.topology.tp * plan.topology.dp
    one = sum(_op(profile, stage, kind).own.mean_us for stage in _stages(profile) for kind in _computed(profile))
    return one * plan.schedule.num_micro_batches * replicas / profile.machine.cores


def host_part(results: Mapping[str, Any]) -> str:
    """Table of the time between operations in the first run of each plan, in milliseconds."""
    header = ("plan", "between operations", "after a wait", "message in a step", "bare message of that size",
              "host per computation")  # fmt: skip
    rows = []
    for name, _ in (case for case in CASES if case[0] == case[1]):
        profile = Profile.model_validate(results[name][0]["profile"])
        size = profile.messages[0].num_bytes
        bare = next(point for point in profile.bare_messages if point.num_bytes == size)
        spreads = (profile.host.between_ops, profile.host.after_wait, profile.messages[0], bare)
        rows.append((f"`{name}`", *map(_spread_text, spreads), f"{host_us(profile) / _MS:.2f}"))
    return table(header, rows)


def _spread_text(spread: Spread | None) -> str:
    if spread is None:
        return ""
    return f"{spread.median_us / _MS:.2f} ({spread.q1_us / _MS:.2f} to {spread.q3_us / _MS:.2f})"


def machine_part(results: Mapping[str, Any]) -> str:
    """Description of the machine."""
    machine = Profile.model_validate(results["gpt_pp4"][0]["profile"]).machine
    return (
        f"{machine.processor}, {machine.cores} cores for all processes, {machine.threads} compute thread each; "
        f"{machine.framework}, {machine.system}. {NUM_STEPS} steps per run; all but the first count."
    )


PARTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "machine": machine_part, "lengths": lengths_part, "steps": steps_part, "host": host_part,
}  # fmt: skip


def _measure_all(names: Sequence[str]) -> int:
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in names or PLANS:
        results[name] = measure(name)
        RESULTS.write_text(json.dumps(dict(sorted(results.items())), separators=(",", ":")) + "\n", encoding="utf-8")
        sys.stderr.write(f"{name}: without a core for {[run['starved'] for run in results[name]]} of the time\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        sys.exit(_measure_all(sys.argv[2:]))
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = EVIDENCE / "profile-accuracy.md"
    parts = {name: make(measured) for name, make in PARTS.items()}
    sys.exit(main("validation/pages/make_measured.py", {page: fill(page, parts)}))
