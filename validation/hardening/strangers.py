"""Connect to every port at which a starting run listens, as a stranger, and see how the run ends.

``python validation/hardening/strangers.py [--write]``. A listener is found a moment after it listens, through
``/proc``. A stranger connects and closes, sends random bytes, or says nothing and stays.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from attack import ROOT, keep
from kill_resume import plan, processes

LISTENS = "0A"
"""State of a listening socket in ``/proc/net/tcp`` (the kernel's ``TCP_LISTEN``)."""
KINDS = ("connects and closes", "sends 64 bytes", "sends 64 KiB", "stays and says nothing")


def listeners(directory: Path) -> set[tuple[str, int]]:
    """Addresses, as four numbers or ``::``, and ports at which the processes of a run listen."""
    inodes = set[str]()
    for pid in processes(directory):
        with contextlib.suppress(OSError):
            inodes |= {str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].split(":")
                host = "::" if name == "tcp6" else socket.inet_ntoa(bytes.fromhex(address)[::-1])
                found.add((host, int(port, 16)))
    return found


def visit(port: int, kind: str, draw: random.Random) -> socket.socket | None:
    """Connect as a stranger; return the connection if it stays."""
    stranger = socket.socket()
    stranger.settimeout(1.0)
    with contextlib.suppress(OSError):
        stranger.connect(("127.0.0.1", port))
        if kind == "stays and says nothing":
            return stranger
        if kind.startswith("sends"):
            stranger.sendall(draw.randbytes(64 if kind == "sends 64 bytes" else 2**16))
            time.sleep(0.02)
    stranger.close()
    return None


def attack(backend: str, kind: str, directory: Path) -> dict[str, Any]:
    """Start a run, visit each of its listeners once, and return how it ended."""
    directory.mkdir()
    path = plan(directory, 3)
    content = json.loads(path.read_text())
    content["run"]["backend"] = backend
    path.write_text(json.dumps(content))
    draw, stay, seen = random.Random(0), list[socket.socket](), dict[tuple[str, int], None]()
    with tempfile.TemporaryFile() as output:
        begun = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeproof", "run", str(path)], stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory)},
        )  # fmt: skip
        while process.poll() is None and time.monotonic() - begun < 300:
            for listener in listeners(directory) - seen.keys():
                seen[listener] = None
                if (connection := visit(listener[1], kind, draw)) is not None:
                    stay.append(connection)
            time.sleep(0.002)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    for connection in stay:
        connection.close()
    is_named = process.returncode == 3 and "error[PP902]" in text
    return {
        "backend": backend, "stranger": kind, "visited": len(seen), "status": process.returncode,
        "addresses": dict(sorted(Counter(host for host, _ in seen).items())),
        "problem": None if (process.returncode == 0 or is_named) and "Traceback" not in text else text[-2000:],
    }  # fmt: skip


def main() -> int:
    """Attack each framework in each way; status 1 where a run neither passed nor ended with PP902."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backends", nargs="+", default=["torch", "paddle"])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    rows, begun = [], time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        for backend in options.backends:
            for number, kind in enumerate(KINDS):
                rows.append(attack(backend, kind, Path(name) / f"{backend}{number}"))
                print(rows[-1], flush=True)
    if options.write:
        keep("strangers", {"runs": rows, "seconds": round(time.monotonic() - begun)})
    return int(any(row["problem"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
