"""Run a command as an attack, and classify how it ended; figures of the tools here are kept in one file."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "validation" / "results" / "hardening.json"
"""Figures by tool."""


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a command: its exit status (negative: the signal), output, seconds and peak resident memory in MB."""

    status: int
    output: str
    seconds: float
    peak_mb: int

    @property
    def problem(self) -> str | None:
        """Return the way in which the command was not handled; None where it was."""
        if "Traceback (most recent call last)" in self.output:
            return "traceback"
        if "did not expect this" in self.output:
            return "unexpected error"
        if self.status < 0:
            return f"ended by {signal.Signals(-self.status).name}"
        return None if self.status in (0, 1, 2, 3, 130, 143) else f"status {self.status}"


def pipeproof(
    arguments: Sequence[str | Path],
    *,
    timeout_s: float = 600,
    memory_bytes: int | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Ended:
    """Run ``pipeproof`` to its end; past ``timeout_s`` it is killed, which counts as not handled."""

    def limit() -> None:
        if memory_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))

    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pipeproof", *map(str, arguments)],
            stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, preexec_fn=limit, cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **(environment or {})},
        )  # fmt: skip
        while True:
            pid, wait_status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() - start > timeout_s:
                process.kill()
            time.sleep(0.01)
        process.returncode = os.waitstatus_to_exitcode(wait_status)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Ended(process.returncode, text, time.monotonic() - start, usage.ru_maxrss // 1024)


def kept(tool: str) -> list[dict[str, Any]]:
    """Return the rows that a tool has kept."""
    rows: list[dict[str, Any]] = results().get(tool, [])
    return rows


def results() -> dict[str, Any]:
    """Return the figures of all tools."""
    figures: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return figures


def keep(tool: str, figures: Any) -> None:
    """Replace the figures of a tool in ``RESULTS``."""
    all_figures = results() | {tool: figures}
    RESULTS.write_text(json.dumps(dict(sorted(all_figures.items())), indent=1) + "\n", encoding="utf-8")
