"""Run the commands on a full disk, end them by signals, and let them meet files of other users.

``python validation/hardening/environments.py [disk] [signals] [users] [--times N] [--every N]
[--commands WORDS ..] [--write]``. Each command
reads small files and may write one output, which has an old content before. Handled is a documented exit status without
a traceback, an output that is whole or old, no process that stays, and no temporary file next to the output. A reshard,
which keeps its work in order to continue, is handled if the same command then succeeds.

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
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attack import ROOT, Ended, keep, results
from kill_resume import plan, processes

OLD = "an old content\n"
_EXAMPLES = ROOT / "examples"


@dataclass(frozen=True, slots=True)
class Made:
    """Files that a run made: ``states``, ``record`` or ``hosts``, which is a folder for each of two hosts."""

    name: str


@cache
def made() -> tempfile.TemporaryDirectory[str]:
    """Make the files of ``Made``, once: a run that saves and records, and one of two processes of another launcher."""
    directory = tempfile.TemporaryDirectory()
    place = Path(directory.name)
    given = plan(place, 2)
    begun = time.monotonic()
    ended = end(
        start(["run", str(given), "--save", str(place / "states"), "--record", str(place / "both")], place), begun
    )
    assert ended.status == 0, ended.output
    (place / "both" / "run").rename(place / "record")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = {"SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
    hosts = []
    for rank in range(2):
        (place / f"host{rank}").mkdir()
        variables = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in {**launcher, "RANK": rank}.items()}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        arguments = ["run", str(given), "--keep-logs", str(place / "kept")]
        hosts.append(start(arguments, place / f"host{rank}", variables=variables))
    for process in hosts:
        ended = end(process, begun)
        assert ended.status == 0, ended.output
    for rank, folder in enumerate(sorted((place / "kept").iterdir())):
        shutil.copytree(folder, place / "hosts" / f"host{rank}")
    return directory


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its words, with ``IN``, ``OUT`` and ``EXAMPLES`` for paths; the input's content or source.

    ``continues``: killed, it keeps its work, and the same command completes it; its output does not exist before.
    """

    words: str
    source: Path | Made | str = _EXAMPLES / "gpt_pp4.yaml"
    suffix: str = ".yaml"
    continues: bool = False

    def arguments(self, directory: Path) -> list[str]:
        """Write the input into a directory, and return the words with paths in place of IN and OUT."""
        (directory / "out").mkdir(exist_ok=True)
        given = directory / f"in{self.suffix}"
        if self.source == "a run":
            given = plan(directory, 2).rename(given)
        elif isinstance(self.source, str):
            given.write_text(self.source)
        else:
            source = Path(made().name) / self.source.name if isinstance(self.source, Made) else self.source
            if source.is_dir():
                shutil.copytree(source, given, dirs_exist_ok=True)
            else:
                shutil.copy(source, given)
        if self.writes and not self.continues:
            self.output(directory).write_text(OLD)
        return [self._argument(word, given, directory) for word in self.words.split()]

    def _argument(self, word: str, given: Path, directory: Path) -> str:
        """Return a word with paths in place of IN and EXAMPLES, which may be followed by a name in them, and of OUT."""
        if word.startswith("EXAMPLES/"):
            return str(_EXAMPLES / word[len("EXAMPLES/") :])
        if word == "IN" or word.startswith("IN/"):
            return str(given) + word[len("IN") :]
        return str(directory / "out" / word) if "OUT" in word else word

    @property
    def writes(self) -> bool:
        """True if the command has an output."""
        return "OUT" in self.words

    def output(self, directory: Path) -> Path:
        """Path of the output."""
        return directory / "out" / next(word for word in self.words.split() if "OUT" in word)


COMMANDS = (
    Command("check IN"),
    Command("show IN"),
    Command("simulate IN -o OUT.html"),
    Command("simulate IN -o OUT.json"),
    Command("tune IN"),
    Command("sweep IN --set schedule.num_micro_batches=[4,8]"),
    Command("schedule show 1f1b -p 4 -m 8 --as text"),
    Command("schedule list"),
    Command("compare IN IN -o OUT.html"),
    Command("init --model small --gpus 2 --pp 2 --global-batch 4 --force -o OUT.yaml"),
    Command("schedule convert IN --to text", _EXAMPLES / "schedules" / "zbv_pp2.csv", ".csv"),
    Command("play IN -o OUT.html"),
    *(
        Command(f"import plan --from {kind} IN{words} -o OUT.yaml", _EXAMPLES / file, Path(file).suffix)
        for kind, file, words in (
            ("megatron", "importing/megatron.sh", ""),
            ("torchtitan", "importing/torchtitan.toml", ""),
            ("megatron-bridge", "importing/megatron_bridge.yaml", ""),
            ("fleet", "importing/strategy.prototxt", ""),
            *((kind, "importing/full_tp_pp.yaml", "") for kind in ("paddleformers", "paddlenlp", "ernie")),
            ("verl", "importing/verl.sh", ""),
            ("schedule", "schedules/zbv_pp2.csv", ""),
        )
    ),
    Command("job hang IN", _EXAMPLES / "importing" / "dumps", ""),
    Command("import profile IN --plan EXAMPLES/gpt_pp4.yaml", '{"traceEvents": []}', ".json"),
    Command("tune llama3_8b --device h100 --gpus 2 --global-batch 2 --fix tp=1 --fix pp=2 --fix schedule=1f1b"),
    Command("check IN", _EXAMPLES / "recording" / "crossed", ""),
    Command("doctor"),
    Command("state show IN --verify", Made("states"), ""),
    Command("state diff IN IN", Made("states"), ""),
    Command("state reshard IN -o OUT.safetensors", Made("states"), "", continues=True),
    Command("state align IN IN", Made("record"), ""),
    Command("state aoa IN --source EXAMPLES/gpt_pp2_tp2_sp_full.yaml", _EXAMPLES / "aoa" / "names.aoa", ".aoa"),
    Command("rehearse IN --report OUT.json", "a run", ".json"),
    Command("run IN --report OUT.json", "a run", ".json"),
    Command("run IN -o OUT.html", "a run", ".json"),
)  # fmt: skip


def start(
    arguments: list[str],
    directory: Path,
    prepare: Callable[[], None] | None = None,
    *,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, with its temporary files in the directory and its output in a pipe."""
    (directory / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", "pipeproof", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL, preexec_fn=prepare, start_new_session=True, cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory / "tmp"), "PYTHONDONTWRITEBYTECODE": "1",
             **variables},
    )  # fmt: skip


def end(process: subprocess.Popen[bytes], started: float) -> Ended:
    """Wait for the end of a command."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        output, _ = process.communicate(timeout=200)
        return Ended(process.returncode, output.decode(errors="replace"), time.monotonic() - started, 0)
    os.killpg(process.pid, signal.SIGKILL)
    return Ended(124, process.communicate()[0].decode(errors="replace"), 200.0, 0)


def left(command: Command, directory: Path, ended: Ended) -> str | None:
    """Return forbidden remains of the command; a worker is given a moment to end."""
    deadline = time.monotonic() + 10
    while (pids := processes(directory)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if pids:
        return f"{len(pids)} processes left"
    if not command.writes:
        return None
    out = command.output(directory)
    if command.continues:
        if ended.status == 0 and out.exists():
            return None
        again = end(start(command.arguments(directory), directory), time.monotonic())
        return None if again.status == 0 and out.exists() else f"again: status {again.status}, {again.output}"
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
                ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False
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
            (place / "filler").unlink()
            yield row(command, "a full tmpfs", ended, place, ended.problem)
        finally:
            subprocess.run(["umount", place], check=False)


def signals(directory: Path, commands: Sequence[Command], times: int) -> Iterator[dict[str, Any]]:
    """Commands ended by signals at random moments."""
    for index, command in enumerate(commands):
        draw = random.Random(command.words)
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
            taken.chmod(0o700)
            yield row(command, f"{attack} of another user", ended, place, problem)


def with_others(before: dict[str, Any] | None, rows: list[dict[str, Any]], seconds: int) -> dict[str, Any]:
    """Figures of a tool: new rows, and the kept ones of other commands that still exist."""
    new = {row["command"] for row in rows}
    order = [command.words for command in COMMANDS]
    others = [row for row in before["runs"] if row["command"] in order and row["command"] not in new] if before else []
    runs = sorted(others + rows, key=lambda row: order.index(row["command"]))
    return {"runs": runs, "seconds": seconds + (before["seconds"] if others and before else 0)}


TOOLS = {"disk": disk, "signals": signals, "users": users}


def main() -> int:
    """Run the tools; status 1 where something was not handled."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tools", nargs="*", choices=[*TOOLS, []], default=[], help="all without one")
    parser.add_argument("--times", type=int, default=2, help="moments of each signal and command")
    parser.add_argument("--every", type=int, default=1, help="take each N-th command alone")
    parser.add_argument("--commands", nargs="+", help="only those that begin so; the kept rows of others stay")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    starts = tuple(options.commands or [""])
    commands = [command for command in COMMANDS[:: -options.every] if command.words.startswith(starts)]
    is_handled = True
    for name in options.tools or TOOLS:
        begun, rows = time.monotonic(), []
        with tempfile.TemporaryDirectory() as directory:
            for result in TOOLS[name](Path(directory), commands, options.times):
                rows.append(result)
                if result["problem"]:
                    print(name, result, flush=True)
        wrong = sum(result["problem"] is not None for result in rows)
        is_handled &= not wrong
        print(f"{name}: {len(rows)} attacks, {wrong} not handled, {time.monotonic() - begun:.0f} s", flush=True)
        if options.write:
            before = results().get(name) if options.commands else None
            keep(name, with_others(before, rows, round(time.monotonic() - begun)))
    return int(not is_handled)


if __name__ == "__main__":
    sys.exit(main())
