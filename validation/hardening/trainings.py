"""Attack trainings of a script with `Pipeline` under torchrun and Paddle's launcher, and reshards.

``python validation/hardening/trainings.py [CASE ..] [--write]``. Handled is a training that passes, or whose ranks all
end within ``ENDS_S`` with an error that names the cause: no abort, no hang, no process left. Cases that mount need
root, and are left out without it. ``--exits N`` runs the script of docs/train.md N times instead, two at a time, and
counts those that end otherwise than with status 0.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attack import ROOT, keep, pipeproof
from kill_resume import plan, processes
from strangers import listeners

ENDS_S = 90.0
"""Longest time from an attack to the end of all processes, on a busy machine."""
STEPS_S = 300.0
"""Longest time of a training that nobody attacks."""

TRAIN = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from pipeproof.torch import Pipeline, save_dcp, stages_of_sequential, watch
dist.init_process_group("gloo")
watch(directory=os.environ.get("RINGS", "rings"))
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
x, y = torch.randn(16, 64), torch.randn(16, 64)
pipe = Pipeline(stages_of_sequential(model, dist.get_world_size()), schedule="1f1b", num_micro_batches=4,
                loss_fn=nn.functional.mse_loss, example=(x[:4],), timeout_s=15.0)
for step in range(int(os.environ.get("STEPS", "60"))):
    pipe.step(x, target=y)
    open("stepped", "a").close()
    time.sleep(0.1)
if "SAVE" in os.environ:
    save_dcp(os.environ["SAVE"], pipe.stages)
print("rank", dist.get_rank(), "trained to its end", flush=True)
dist.destroy_process_group()
"""
PADDLE = """
import paddle, paddle.distributed as dist, time
from paddle.distributed import fleet
from pipeproof.paddle import watch
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": 2}
fleet.init(is_collective=True, strategy=strategy)
watch(directory="rings")
x = paddle.ones([64])
for step in range(60):
    dist.all_reduce(x)
    open("stepped", "a").close()
    time.sleep(0.1)
print("rank", dist.get_rank(), "trained to its end", flush=True)
"""
JUMP = """
import os, threading, time
if os.environ.get("RANK") == "1":
    real, begun = time.time_ns, time.monotonic()
    def shift():
        return int(os.environ["JUMP_S"]) * 10**9 if time.monotonic() - begun > 8 else 0
    time.time_ns = lambda: real() + shift()
    time.time = lambda: time.time_ns() / 1e9
"""


TORCHRUN = ("torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0", "--rdzv-id=job")  # fmt: skip


@dataclass
class Training:
    """A training in a directory: two ranks of torchrun or of Paddle's launcher."""

    directory: Path
    script: str = TRAIN
    limits: tuple[tuple[int, int], ...] = ()
    wrapped: tuple[str, ...] = ()
    environment: Mapping[str, str] | None = None
    launcher: tuple[str, ...] = TORCHRUN
    name: str = "pipeproof_train.py"

    def start(self) -> subprocess.Popen[bytes]:
        """Start the training; its output is in ``log``."""
        (self.directory / self.name).write_text(self.script)
        command = [sys.executable, "-m", *self.launcher, str(self.directory / self.name)]
        environment = {**os.environ, "PYTHONPATH": f"{self.directory}:{ROOT}", "OMP_NUM_THREADS": "1",
                       "TMPDIR": str(self.directory), **(self.environment or {})}  # fmt: skip

        def limit() -> None:
            for what, value in self.limits:
                resource.setrlimit(what, (value, value))

        with self.log.open("ab") as output:
            return subprocess.Popen(
                [*self.wrapped, *command], cwd=self.directory, stdout=output, stderr=subprocess.STDOUT, env=environment,
                preexec_fn=limit, start_new_session=True,
            )  # fmt: skip

    @property
    def log(self) -> Path:
        """Output of all ranks."""
        return self.directory / "log"

    def stepped(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until a rank has finished a step, or the launcher has ended."""
        ends = time.monotonic() + STEPS_S
        while not (self.directory / "stepped").exists() and process.poll() is None and time.monotonic() < ends:
            time.sleep(0.1)
        time.sleep(1)

    def ranks(self) -> list[int]:
        """Processes of the ranks: of the script, without the launcher."""
        return [pid for pid in processes(self.directory) if not _words(pid).count("-m")]


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def outcome(
    training: Training, process: subprocess.Popen[bytes], names: str, limit_s: float = ENDS_S
) -> dict[str, Any]:
    """Wait for the end of all processes of a training, and classify it; ``names`` is the cause to be named."""
    begun = time.monotonic()
    while processes(training.directory) and time.monotonic() - begun < limit_s:
        with contextlib.suppress(ChildProcessError):
            process.poll()
        time.sleep(0.2)
    seconds, left = time.monotonic() - begun, processes(training.directory)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    text = training.log.read_text(errors="replace")
    ended = len(re.findall("trained to its end", text))
    problem = None
    if left:
        problem = f"{len(left)} processes left"
    elif "terminate called" in text or "did not expect this" in text or "Segmentation" in text:
        problem = "abort"
    elif ended < 2 and not re.search(names, text):
        problem = f"no message with {names!r}: {text[-300:]}"
    errors = [line.strip() for line in text.splitlines() if re.search(r"(Error: |error\[PP)", line)]
    errors = [re.sub(r"^\[rank\d\]: |/tmp/\S*", "", line) for line in errors if "elastic" not in line]
    ending = "trained to its end" if ended >= 2 else (errors[0][:160] if errors else "ended")
    return {"status": process.returncode, "seconds": round(seconds, 1), "outcome": ending, "problem": problem}


def store_of_torchrun(directory: Path) -> dict[str, Any]:
    """The launcher, which has the store, is killed."""
    training = Training(directory)
    process = training.start()
    training.stepped(process)
    process.kill()
    return outcome(training, process, "store|Store|Connection|connection")


def store_of_paddle(directory: Path) -> dict[str, Any]:
    """The rank of a Fleet script that has the store is killed."""
    launcher = ("paddle.distributed.launch", "--nproc_per_node=2", "--log_dir=log_dir", "--backend=gloo")
    training = Training(directory, PADDLE, launcher=launcher)
    process = training.start()
    training.stepped(process)
    if ranks := sorted(training.ranks()):
        os.kill(ranks[0], signal.SIGKILL)
    return outcome(training, process, "terminate all the procs")


def full_disk(directory: Path) -> dict[str, Any]:
    """A checkpoint is saved to a disk with 16 kB."""
    disk = directory / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=16k tmpfs {disk} && exec "$@"'
    training = Training(directory, environment={"SAVE": str(disk / "state"), "STEPS": "2"},
                        wrapped=("unshare", "--mount", "sh", "-c", mount, "sh"))  # fmt: skip
    return outcome(training, training.start(), "No space left", STEPS_S)


def small_shared_memory(directory: Path) -> dict[str, Any]:
    """/dev/shm has 64 kB."""
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    training = Training(directory, environment={"STEPS": "5"}, wrapped=("unshare", "--mount", "sh", "-c", mount, "sh"))
    return outcome(training, training.start(), "No space left|shm", STEPS_S)


def few_descriptors(directory: Path) -> dict[str, Any]:
    """48 open files."""
    training = Training(directory, limits=((resource.RLIMIT_NOFILE, 48),), environment={"STEPS": "5"})
    return outcome(training, training.start(), "open files", STEPS_S)


def little_address_space(directory: Path) -> dict[str, Any]:
    """1,500 MB of address space."""
    training = Training(directory, limits=((resource.RLIMIT_AS, 1500 * 2**20),), environment={"STEPS": "5"})
    return outcome(training, training.start(), "memory|alloc|address space|thread|bad_alloc", STEPS_S)


def clock_jump(directory: Path) -> dict[str, Any]:
    """The clock of a rank jumps by an hour, both ways, while the monitor follows: no false alarm."""
    rows = []
    for seconds in (3600, -3600):
        inner = directory / str(seconds)
        inner.mkdir()
        (inner / "sitecustomize.py").write_text(JUMP)
        training = Training(inner, environment={"JUMP_S": str(seconds), "STEPS": "120"})
        process = training.start()
        followed = pipeproof(["job", "hang", "--follow", "--duration", "60", inner / "rings"], timeout_s=120)
        row = outcome(training, process, "trained")
        if followed.status != 0:
            row["problem"] = f"a false alarm: {followed.output[-300:]}"
        rows.append(row)
    worst = next((row for row in rows if row["problem"]), rows[-1])
    ending = "a false alarm" if worst["problem"] else f"{worst['outcome']}; no alarm"
    return worst | {"outcome": ending}


def two_jobs(directory: Path) -> dict[str, Any]:
    """Two jobs of one id, one directory of rings and one of the checkpoint, at a time."""
    training = Training(directory, environment={"STEPS": "5", "SAVE": str(directory / "state")})
    first, second = training.start(), training.start()
    row = outcome(training, first, "trained", STEPS_S)
    second.wait()
    return row | {"status": f"{first.returncode}, {second.returncode}"}


def stopped_rank(directory: Path) -> dict[str, Any]:
    """A rank is stopped for longer than the timeout, then continues."""
    training = Training(directory)
    process = training.start()
    training.stepped(process)
    ranks = sorted(training.ranks())
    for pid in ranks[-1:]:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(40)
    for pid in ranks[-1:]:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGCONT)
    return outcome(training, process, "no progress|hang|stopped|waits")


def others_directory(directory: Path) -> dict[str, Any]:
    """The rings go to a directory of another user, who let nobody write."""
    other = directory / "others"
    other.mkdir(mode=0o755)
    os.chown(other, 12345, 12345)
    training = Training(directory, environment={"RINGS": str(other / "rings"), "STEPS": "5"},
                        wrapped=("setpriv", "--bounding-set=-dac_override,-dac_read_search"))  # fmt: skip
    return outcome(training, training.start(), "Permission denied", STEPS_S)


def flooded_store(directory: Path) -> dict[str, Any]:
    """500 strangers connect to each port of the job, send 4 kB, and stay."""
    training = Training(directory)
    process = training.start()
    training.stepped(process)
    draw, strangers = random.Random(0), list[socket.socket]()
    for _, port in sorted(listeners(directory)):
        for _ in range(500):
            stranger = socket.socket()
            stranger.settimeout(0.5)
            strangers.append(stranger)
            with contextlib.suppress(OSError):
                stranger.connect(("127.0.0.1", port))
                stranger.sendall(draw.randbytes(4096))
    row = outcome(training, process, "store|Store|Connection|connection|closed")
    for stranger in strangers:
        stranger.close()
    return row | {"outcome": f"{row['outcome']} ({len(strangers)} strangers)"}


def killed_reshard(directory: Path) -> dict[str, Any]:
    """A reshard is killed five times at a random moment, and repeated: the bytes of one that nobody killed."""
    draw, begun = random.Random(0), time.monotonic()
    source = pipeproof(["run", plan(directory, 1), "--save", directory / "states"])
    if source.status != 0:
        return {"status": source.status, "seconds": 0.0, "outcome": "no state", "problem": source.output[-300:]}
    target = directory / "target.yaml"
    target.write_text(plan(directory, 1).read_text().replace('"pp": 2', '"pp": 1'))
    command = ["state", "reshard", directory / "states", "--to", target, "-o"]
    whole = pipeproof([*command, directory / "whole"])
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-m", "pipeproof", *map(str, command), str(directory / "killed")],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                                   env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip
        time.sleep(draw.uniform(0.2, max(0.3, whole.seconds)))
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    again = pipeproof([*command, directory / "killed"])
    equal = _content(directory / "whole") == _content(directory / "killed")
    problem = None if equal and whole.status == 0 else f"{again.status}: {again.output[-300:]}"
    ending = "equal bytes" if equal else "other bytes"
    return {
        "status": again.status,
        "seconds": round(time.monotonic() - begun, 1),
        "outcome": ending,
        "problem": problem,
    }


def _content(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def exits(times: int) -> dict[str, Any]:
    """Run the script of docs/train.md, two at a time; count the ends, and note the load of the machine."""
    page = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    script = page.partition('```python title="train.py"\n')[2].partition("```")[0]

    def once(number: int) -> str:
        directory = Path(tempfile.mkdtemp(prefix="trainings"))
        process = Training(directory, script).start()
        status = process.wait(600)
        text = (directory / "log").read_text(errors="replace")
        shutil.rmtree(directory, ignore_errors=True)
        end = "abort" if "terminate called" in text else f"status {status}"
        loads.append(os.getloadavg()[0])
        print(number, end, "" if status == 0 else text[-500:], flush=True)
        return end

    begun, loads = time.monotonic(), list[float]()
    with ThreadPoolExecutor(2) as pool:
        ends = Counter(pool.map(once, range(times)))
    load = f"{min(loads):.0f} to {max(loads):.0f}"
    return {"times": times, "ends": dict(ends), "load": load, "seconds": round(time.monotonic() - begun)}


CASES: Mapping[str, Callable[[Path], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        store_of_torchrun, store_of_paddle, full_disk, small_shared_memory, few_descriptors, little_address_space,
        clock_jump, two_jobs, stopped_rank, others_directory, flooded_store, killed_reshard,
    )
}  # fmt: skip
_NEED_ROOT = frozenset({"full_disk", "small_shared_memory", "others_directory"})


def main() -> int:
    """Run the cases; status 1 where one was not handled."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--exits", type=int)
    options = parser.parse_args()
    if options.exits:
        found = exits(options.exits)
        print(found)
        if options.write:
            keep("exits", found)
        return int(found["ends"] != {"status 0": options.exits})
    rows, begun = [], time.monotonic()
    for name in options.cases or CASES:
        if name in _NEED_ROOT and os.geteuid() != 0:
            continue
        directory = Path(tempfile.mkdtemp(prefix="trainings"))
        rows.append({"case": name, "attack": (CASES[name].__doc__ or "").rstrip("."), **CASES[name](directory)})
        shutil.rmtree(directory, ignore_errors=True)
        print(rows[-1], flush=True)
    if options.write:
        keep("trainings", {"runs": rows, "seconds": round(time.monotonic() - begun)})
    return int(any(row["problem"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
