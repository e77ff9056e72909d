"""Kill runs at random moments and resume them bit for bit; start runs in a row; measure the memory of a long one.

``python validation/hardening/kill_resume.py [--kills N] [--starts N] [--steps N] [--gpus] [--seed N]
[--write | --add]``. With ``--gpus`` the runs are on two GPUs, with PyTorch and NCCL.
The long run prints the slope of the resident memory of each process over its steps, and the growth of its descriptors.
``--write`` replaces the stored figures; ``--add`` adds figures of more kills and starts, at other random moments.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from attack import ROOT, keep, pipeproof, results

_SKIPPED = 0.2
"""Part of a long run that the slope leaves out: frameworks allocate in the first steps."""


_AFTER_A_STATE = 0.7
"""Part of the kills that come after the first state; the others may come at any moment of the start."""
_ENDING_S = 20.0
"""Longest wait for the processes of a killed run: one that is importing its framework ends when it has done so."""


def plan(directory: Path, steps: int, *, on_gpus: bool = False) -> Path:
    """Write a small plan of two stages."""
    model = {"kind": "gpt", "num_layers": 2, "hidden_size": 16, "num_heads": 2, "ffn_size": 16, "vocab_size": 16,
             "seq_length": 8}  # fmt: skip
    content = {
        "pipeproof": 1,
        "model": model,
        "topology": {"pp": 2},
        "schedule": {"kind": "1f1b", "num_micro_batches": 2, "micro_batch_size": 1},
        "run": {"steps": steps} | ({"backend": "torch", "device": "gpu"} if on_gpus else {}),
    }
    path = directory / f"plan{steps}.json"
    path.write_text(json.dumps(content))
    return path


def started(arguments: list[str | Path], directory: Path) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with its files in ``directory``."""
    return subprocess.Popen(
        [sys.executable, "-m", "pipeproof", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def processes(directory: Path) -> list[int]:
    """Processes with a path of the directory on their command line, without zombies."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                words = (path / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(directory) in words and "pipeproof" in words:
                found.append(int(path.name))
    return found


def digests(report: Path, after: int) -> dict[str, Any]:
    """Losses and MD5s of gradients of the steps from ``after`` on."""
    content = json.loads(report.read_text())
    losses = {f"loss {one['step']}": one["loss"] for one in content["steps"] if one["step"] >= after}
    gradients = {f"{one['step']} {one['name']}": one["md5"] for one in content["gradients"] if one["step"] >= after}
    return losses | gradients


def kills(number: int, directory: Path, seed: int, *, on_gpus: bool) -> dict[str, float]:
    """Kill the launcher at a random moment, resume from the newest state, and compare with a run in one go."""
    draw, steps = random.Random(seed), 60
    path, whole = plan(directory, steps, on_gpus=on_gpus), directory / "whole.json"
    ended = pipeproof(["run", path, "--report", whole])
    assert ended.status == 0, ended.output
    duration, equal, left, resumed, longest = ended.seconds, 0, 0, 0, 0.0
    for index in range(number):
        place = directory / f"kill{index}"
        place.mkdir()
        process = started(["run", path, "--save", place / "states", "--save-every", "1"], place)
        if draw.random() < _AFTER_A_STATE:
            while process.poll() is None and not any((place / "states").glob("step-*")):
                time.sleep(0.01)
            time.sleep(draw.uniform(0.0, 1.5))
        else:
            time.sleep(draw.uniform(0.0, 1.0) * duration)
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed = time.monotonic()
        while processes(place) and time.monotonic() - killed < _ENDING_S:
            time.sleep(0.02)
        longest = max(longest, time.monotonic() - killed)
        left += len(processes(place))
        states = sorted((place / "states").glob("step-*")) if (place / "states").exists() else []
        report = place / "report.json"
        resume: list[str | Path] = ["--resume", place / "states"] if states else []
        done = int(states[-1].name.split("-")[1]) if states else 0
        if done >= steps:
            equal += 1  # it had ended
            continue
        resumed += bool(states)
        ended = pipeproof(["run", path, *resume, "--report", report])
        is_equal = ended.status == 0 and digests(report, done) == digests(whole, done)
        equal += is_equal
        print(f"kill {index}: {done} steps saved, {'equal' if is_equal else ended.output}", flush=True)
    return {"kills": number, "equal": equal, "resumed_from_a_state": resumed, "processes_left": left,
            "longest_end_s": round(longest, 1)}  # fmt: skip


def starts(number: int, directory: Path, _: int, *, on_gpus: bool) -> dict[str, float]:
    """Start short runs in a row."""
    short, passed = plan(directory, 1, on_gpus=on_gpus), 0
    for index in range(number):
        ended = pipeproof(["run", short])
        passed += ended.status == 0
        print(f"start {index}: {'passed' if ended.status == 0 else ended.output}", flush=True)
    return {"starts": number, "passed": passed}


def kind_of(pid: int) -> str:
    """Return which process of a run this is."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    module = words[words.index("-m") + 1] if "-m" in words else ""
    return {"pipeproof": "launcher", "pipeproof.exec.launch.worker": "rank"}.get(module, "reference")


def soak(steps: int, directory: Path, _: int, *, on_gpus: bool) -> dict[str, Any]:
    """Run many small steps with checkpoints, and fit the memory and the descriptors of each process over time."""
    place = directory / "soak"
    place.mkdir()
    every = max(1, steps // 20)
    path = plan(place, steps, on_gpus=on_gpus)
    command: list[str | Path] = ["run", path, "--save", place / "states", "--save-every", str(every)]
    begun, process = time.monotonic(), started(command, place)
    samples: dict[int, list[tuple[float, int, int]]] = {}
    kinds: dict[int, str] = {}
    while process.poll() is None:
        for pid in processes(place):
            try:
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                descriptors = len([*Path(f"/proc/{pid}/fd").iterdir()])
                kinds[pid] = kind_of(pid)
            except OSError:
                continue
            samples.setdefault(pid, []).append((time.monotonic() - begun, pages * 4, descriptors))
        time.sleep(0.5)
    seconds = time.monotonic() - begun
    slopes, growths = dict[str, list[float]](), []
    for pid, values in samples.items():
        kept = [value for value in values if value[0] > _SKIPPED * seconds]
        if len(kept) > 10:
            slope = float(np.polyfit([at for at, _, _ in kept], [kb for _, kb, _ in kept], 1)[0])
            slopes.setdefault(kinds[pid], []).append(slope * seconds / steps * 1000)
            growths.append(kept[-1][2] - kept[0][2])
    return {
        "steps": steps, "status": process.returncode, "processes": len(growths),
        "kb_per_1000_steps": {kind: round(max(of_kind)) for kind, of_kind in sorted(slopes.items())},
        "descriptors_grown": max(growths, default=-1),
    }  # fmt: skip


def added(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Sum of the figures of two runs of ``kills`` or ``starts``; of a longest time the longer."""
    return {key: max(old[key], value) if key.startswith("longest") else old[key] + value for key, value in new.items()}


def main() -> int:
    """Run the three; status 1 where one did not hold."""
    parser = argparse.ArgumentParser()
    for name, default in (("kills", 100), ("starts", 200), ("steps", 10_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--seed", type=int, help="of the random moments; without it the number of kept kills")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--add", action="store_true")
    options = parser.parse_args()
    before = results() if options.add else {}
    holds = True
    with tempfile.TemporaryDirectory() as name:
        for part, number in ((soak, options.steps), (kills, options.kills), (starts, options.starts)):
            if not number:
                continue
            kept_as = part.__name__ + "_on_gpus" * options.gpus
            begun, old = time.monotonic(), before.get(kept_as)
            seed = options.seed if options.seed is not None else 0 if old is None else old.get("kills", 0)
            figures = part(number, Path(name), seed, on_gpus=options.gpus)
            figures["seconds"] = round(time.monotonic() - begun)
            print(kept_as, figures, flush=True)
            holds &= {soak: figures.get("status") == 0, kills: figures.get("equal") == number,
                      starts: figures.get("passed") == number}[part]  # fmt: skip
            if options.write or options.add:
                keep(kept_as, figures if old is None or part is soak else added(old, figures))
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())
