"""Run the commands on a full disk, end them by signals, and let them meet files of other users.

``python validation/hardening/environments.py [disk] [signals] [users] [--times N] [--every N] [--write]``. Each command
reads small files and may write one output, which has an old content before. Handled is a documented exit status without
a traceback, an output that is whole or old, no process that stays, and no temporary file next to the output.

- disk: no file may become larger than some bytes (``RLIMIT_FSIZE``); as root also on a full tmpfs.
- signals: SIGINT, SIGTERM, SIGHUP or SIGQUIT at a random moment of the command's usual time.
- users: inputs that cannot be read, outputs and a TMPDIR that cannot be written. Root gives up its capabilities for it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from attack import ROOT, Ended, keep
from kill_resume import plan, processes

OLD = "an old content\n"
_EXAMPLES = ROOT / "examples"


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its words, with ``IN`` for its input and ``OUT`` for its output; the input's content or source."""

    words: str
    source: Path | str = _EXAMPLES / "gpt_pp4.yaml"
    suffix: str = ".yaml"

    def arguments(self, directory: Path) -> list[str]:
        """Write the input into a directory, and return the words with paths in place of IN and OUT."""
        (directory / "out").mkdir(exist_ok=True)
        given = directory / f"in{self.suffix}"
        if self.source == "a run":
            given = plan(directory, 2).rename(given)
        elif isinstance(self.source, Path) and self.source.is_dir():
            shutil.copytree(self.source, given, dirs_exist_ok=True)
        else:
            given.write_bytes(self.source.read_bytes() if isinstance(self.source, Path) else self.source.encode())
        if self.writes:
            self.output(directory).write_text(OLD)
        names = {
            "IN": str(given),
            **{word: str(directory / "out" / word) for word in self.words.split() if "OUT" in word},
        }
        return [names.get(word, word) for word in self.words.split()]

    @property
    def writes(self) -> bool:
        """True if the command has an output."""
        return "OUT" in self.words

    def output(self, directory: Path) -> Path:
        """Path of the output."""
        return directory / "out" / next(word for word in self.words.split() if "OUT" in word)


_SWEEP = f"plan: {_EXAMPLES / 'gpt_pp4.yaml'}\nsweep: {{schedule.num_micro_batches: [4, 8]}}\n"
COMMANDS = (
    Command("check IN"),
    Command("show IN"),
    Command("simulate IN -o OUT.html"),
    Command("simulate IN -o OUT.csv"),
    Command("simulate IN -o OUT.json"),
    Command("advise IN"),
    Command("sweep IN -o OUT.jsonl", _SWEEP),
    Command("schedule show 1f1b -p 4 -m 8 --as text"),
    Command("schedule jitter IN --runs 20"),
    Command("schedule solve IN -o OUT.csv"),
    Command("schedule list"),
    Command("compare IN IN -o OUT.html"),
    Command("init --model small --gpus 2 --pp 2 --global-batch 4 --force -o OUT.yaml"),
    Command("schedule convert IN --to text", _EXAMPLES / "schedules" / "zbv_pp2.csv", ".csv"),
    Command("play IN -o OUT.html"),
    Command("import megatron IN -o OUT.yaml", _EXAMPLES / "importing" / "megatron.sh", ".sh"),
    Command("import torchtitan IN -o OUT.yaml", _EXAMPLES / "importing" / "torchtitan.toml", ".toml"),
    Command("import deepspeed IN -o OUT.yaml", _EXAMPLES / "importing" / "deepspeed.json", ".json"),
    Command("job file IN --for torchrun"),
    Command("job hang IN", _EXAMPLES / "importing" / "dumps", ""),
    Command("rehearse IN --report OUT.json", "a run", ".json"),
    Command("run IN --report OUT.json", "a run", ".json"),
    Command("run IN -o OUT.html", "a run", ".json"),
)


def start(arguments: list[str], directory: Path, prepare: Callable[[], None] | None = None) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with its temporary files in the directory and its output in a pipe."""
    (directory / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "pipeproof", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, preexec_fn=prepare, start_new_session=True, cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip


def end(process: subprocess.Popen[bytes], started: float) -> Ended:
    """Wait for the end of a command."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        output, _ = process.communicate(timeout=200)
        return Ended(process.returncode, output.decode(errors="replace"), time.monotonic() - started, 0)
    os.killpg(process.pid, signal.SIGKILL)
    return Ended(124, process.communicate()[0].decode(errors="replace"), 200.0, 0)


def left(command: Command, directory: Path, ended: Ended) -> str | None:
    """Return what the command left behind that it must not; a worker is given a moment to end."""
    deadline = time.monotonic() + 10
    while (pids := processes(directory)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if pids:
        return f"{len(pids)} processes left"
    if not command.writes:
        return None
    out = command.output(directory)
    if others := [path.name for path in out.parent.iterdir() if path != out]:
        return f"left {others}"
    content = out.read_text() if out.exists() else ""
    is_whole = out.suffix in (".csv", ".yaml", ".jsonl") or content.rstrip().endswith((">", "}", "]"))
    if content == OLD or (is_whole and content):
        return None
    return f"status {ended.status}, and the output has {len(content)} characters"


def row(command: Command, attack: str, ended: Ended, directory: Path, problem: str | None) -> dict[str, Any]:
    """Result of one attack."""
    problem = problem or left(command, directory, ended)
    return {"command": command.words, "attack": attack, "status": ended.status,
            "problem": problem and f"{problem}: {ended.output[-1500:]}"}  # fmt: skip


def disk(directory: Path, commands: Sequence[Command], times: int) -> Iterator[dict[str, Any]]:
    """Commands whose files may not become larger than 0 or 2,000 bytes, and on a full tmpfs where root mounts one."""
    for index, command in enumerate(commands):
        for size in (0, 2000):
            place = directory / f"{index}.{size}"
            place.mkdir()
            arguments, begun = command.arguments(place), time.monotonic()
            limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (size, size))
            ended = end(start(arguments, place, limit), begun)
            yield row(command, f"files of {size} bytes", ended, place, ended.problem)
        place = directory / f"{index}.tmpfs"
        place.mkdir()
        if (
            not command.writes
            or subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True, check=False
            ).returncode
        ):
            continue
        try:
            arguments, begun = command.arguments(place), time.monotonic()
            (place / "tmp").mkdir()
            with contextlib.suppress(OSError), (place / "filler").open("wb") as filler:
                while True:
                    filler.write(b"\0" * 4096)
                    filler.flush()
            ended = end(start(arguments, place), begun)
            yield row(command, "a full tmpfs", ended, place, ended.problem)
        finally:
            subprocess.run(["umount", place], check=False)


def signals(directory: Path, commands: Sequence[Command], times: int) -> Iterator[dict[str, Any]]:
    """Commands ended by signals at random moments."""
    draw = random.Random(0)
    for index, command in enumerate(commands):
        (directory / f"{index}").mkdir()
        begun = time.monotonic()
        usual = end(start(command.arguments(directory / f"{index}"), directory / f"{index}"), begun).seconds
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            for number in range(times):
                place = directory / f"{index}.{signum}.{number}"
                place.mkdir()
                arguments, begun = command.arguments(place), time.monotonic()
                process = start(arguments, place)
                time.sleep(draw.uniform(0.1, 1.0) * usual)
                process.send_signal(signum)
                ended = end(process, begun)
                is_by_signal = ended.status in (-signum, 128 + signum)
                problem = None if is_by_signal and "Traceback" not in ended.output else ended.problem
                yield row(command, signum.name, ended, place, problem)


def _ordinary() -> None:
    """Give up the capabilities of root, which then reads and writes the files that an ordinary user could."""
    if os.geteuid() == 0:
        for capability in range(64):
            ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP of linux/prctl.h


def _take_away(path: Path, mode: int) -> None:
    """Let a file or directory be another user's, with this mode."""
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)


def users(directory: Path, commands: Sequence[Command], times: int) -> Iterator[dict[str, Any]]:
    """Commands whose input, output or temporary directory belongs to somebody else."""
    directory.chmod(0o755)
    for index, command in enumerate(commands):
        for attack in ("input", "output", "TMPDIR"):
            if (attack == "output" and not command.writes) or (attack == "input" and "IN" not in command.words):
                continue
            place = directory / f"{index}.{attack}"
            place.mkdir()
            arguments, begun = command.arguments(place), time.monotonic()
            (place / "tmp").mkdir()
            taken = {"input": place / f"in{command.suffix}", "output": place / "out", "TMPDIR": place / "tmp"}[attack]
            _take_away(taken, 0o000 if attack == "input" else 0o555)
            ended = end(start(arguments, place, _ordinary), begun)
            needs_it = attack != "TMPDIR"
            problem = ended.problem or (f"status {ended.status}" if needs_it and ended.status != 2 else None)
            yield row(command, f"{attack} of another user", ended, place, problem)
            taken.chmod(0o700)


TOOLS = {"disk": disk, "signals": signals, "users": users}


def main() -> int:
    """Run the tools; status 1 where something was not handled."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tools", nargs="*", choices=[*TOOLS, []], default=[*TOOLS])
    parser.add_argument("--times", type=int, default=2, help="moments of each signal and command")
    parser.add_argument("--every", type=int, default=1, help="take each N-th command alone")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    is_handled = True
    for name in options.tools:
        begun, rows = time.monotonic(), []
        with tempfile.TemporaryDirectory() as directory:
            for result in TOOLS[name](Path(directory), COMMANDS[:: -options.every], options.times):
                rows.append(result)
                if result["problem"]:
                    print(name, result, flush=True)
        wrong = sum(result["problem"] is not None for result in rows)
        is_handled &= not wrong
        print(f"{name}: {len(rows)} attacks, {wrong} not handled, {time.monotonic() - begun:.0f} s", flush=True)
        if options.write:
            keep(name, {"runs": rows, "seconds": round(time.monotonic() - begun)})
    return int(not is_handled)


if __name__ == "__main__":
    sys.exit(main())
