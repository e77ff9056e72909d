"""Start runs on a machine that lacks something they need, and check that the message names it.

``python validation/hardening/machine.py [KIND ..] [--backends torch paddle] [--write]``. A case is handled if the run
passes, or if within a time limit it ends with a documented exit status and a message that names the cause, without a
traceback.

- loopback: a network namespace whose loopback interface is down.
- ports: a network namespace with two free ports.
- space: little address space (``RLIMIT_AS``), in several sizes.
- descriptors: few open files (``RLIMIT_NOFILE``).
- disk: a TMPDIR that has only some bytes free, on a tmpfs.
- pipe: the reader of the output closes it after the first line, or before it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attack import ROOT, keep
from kill_resume import plan, processes

_IN_A_NAMESPACE = ("unshare", "--map-root-user", "--net", "--mount")
_LONGEST_S = 60.0
"""Longest time until a message: less than that after which a hang is reported, on a machine that is busy."""


@dataclass(frozen=True, slots=True)
class Attack:
    """Shell commands before the run, its limits, the documented exit statuses, and the words required in a message."""

    name: str
    kind: str
    before: str = ""
    after: str = ""
    limits: tuple[tuple[int, int], ...] = ()
    statuses: tuple[int, ...] = (2, 3)
    names: str = ""

    @property
    def needs_namespace(self) -> bool:
        """True if the shell commands need a namespace of their own."""
        return bool(self.before)


def _full_disk(free: int) -> Attack:
    """A TMPDIR with some bytes free."""
    fill = (
        'mount -t tmpfs -o size=8m tmpfs "$TMPDIR"; '
        f'head -c {8 * 2**20 - free} /dev/zero > "$TMPDIR/filler" 2> /dev/null; ip link set lo up'
    )
    return Attack(f"a TMPDIR with {free:,} bytes free", "disk", fill, names="full|No space left")


_MB = 2**20
ATTACKS = (
    Attack("no loopback interface", "loopback", "true", statuses=(2,), names=r"loopback interface"),
    Attack(
        "no free ports", "ports", "ip link set lo up; echo 40000 40001 > /proc/sys/net/ipv4/ip_local_port_range",
        statuses=(2,), names="no port of 127.0.0.1 is free",
    ),
    *(
        Attack(f"{size} MB of address space", "space", limits=((resource.RLIMIT_AS, size * _MB),),
               names=r"address space|out of memory")
        for size in (64, 160, 240, 288, 400, 700, 900, 1200)
    ),
    *(
        Attack(f"{number} open files", "descriptors", limits=((resource.RLIMIT_NOFILE, number),),
               names="open files")
        for number in (6, 12, 20, 32)
    ),
    *map(_full_disk, (0, 16_384, 65_536, 262_144)),
    Attack("a reader of one line", "pipe", after=" | head -n 1", statuses=(141,)),
    Attack("a reader of nothing", "pipe", after=" | true", statuses=(141,)),
)  # fmt: skip


def attacked(attack: Attack, backend: str, directory: Path) -> dict[str, Any]:
    """Run a small plan under an attack, and return how it ended."""
    (directory / "tmp").mkdir(parents=True)
    path = plan(directory, 2)
    content = json.loads(path.read_text())
    content["run"]["backend"] = backend
    path.write_text(json.dumps(content))
    words = shlex.join([sys.executable, "-m", "pipeproof", "run", str(path)])
    script = f"{attack.before or 'true'}; {words}{attack.after}" + "; exit ${PIPESTATUS[0]}" * bool(attack.after)
    shell = [*_IN_A_NAMESPACE, "bash", "-c"] if attack.needs_namespace else ["bash", "-c"]

    def limit() -> None:
        for kind, value in attack.limits:
            resource.setrlimit(kind, (value, value))

    begun = time.monotonic()
    process = subprocess.Popen(
        [*shell, script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        preexec_fn=limit, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory / "tmp")},
    )  # fmt: skip
    output = process.communicate()[0].decode(errors="replace").replace(str(directory), "DIR")
    seconds = time.monotonic() - begun
    return {"attack": attack.name, "kind": attack.kind, "backend": backend, "status": process.returncode,
            "seconds": round(seconds, 1), "problem": _problem(attack, process.returncode, output, seconds, directory),
            "message": _message(output, attack.names)}  # fmt: skip


def _problem(attack: Attack, status: int, output: str, seconds: float, directory: Path) -> str | None:
    """Return in which way the attack was not handled."""
    if "Traceback" in output or "did not expect this" in output:
        return f"traceback: {output[-1500:]}"
    if status not in (0, *attack.statuses):
        return f"status {status}: {output[-1500:]}"
    if status not in (0, 141) and not re.search(attack.names, output):
        return f"the message does not name the cause: {output[-1500:]}"
    if seconds > _LONGEST_S:
        return f"took {seconds:.0f} s: {output[-1500:]}"
    if processes(directory):
        return "processes left"
    return None


def _message(output: str, names: str) -> str:
    """Return the part of the output that names the cause; empty where the run passed."""
    lines = [" ".join(line.split()) for line in output.splitlines() if names and re.search(names, line)]
    return lines[0] if lines else ""


def rows(kinds: list[str], backends: list[str]) -> Iterator[dict[str, Any]]:
    """Try the attacks of some kinds, all by default."""
    with tempfile.TemporaryDirectory() as name:
        for attack in ATTACKS:
            for backend in backends:
                if not kinds or attack.kind in kinds:
                    yield attacked(attack, backend, Path(name) / f"{attack.name} {backend}".replace(" ", "-"))


def main() -> int:
    """Try all cases, or the cases of the named kinds; status 1 if one was not handled."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", help="loopback, ports, space, descriptors, disk, pipe")
    parser.add_argument("--backends", nargs="+", default=["torch", "paddle"])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    begun, results = time.monotonic(), []
    for row in rows(options.kinds, options.backends):
        results.append(row)
        print(row, flush=True)
    if options.write:
        keep("machine", {"runs": results, "seconds": round(time.monotonic() - begun)})
    return int(any(row["problem"] for row in results))


if __name__ == "__main__":
    sys.exit(main())
