"""Mutants of a file, and how the command that reads one ended."""

from __future__ import annotations

import os
import random
import resource
import select
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.fuzz.readers import ROOT, Reader, record_of_values

LIMIT_S = 30
"""Processor time of a command, in seconds: a mutant of a small file takes less than one."""
MEMORY_BYTES = 4 * 2**30
_NUMBERS = (
    b"0",
    b"-1",
    b"1e400",
    b"Infinity",
    b"NaN",
    b"9" * 5000,
    b"18446744073709551616",
    b"3/0",
    b"null",
    b"[" * 3000,
)
_BYTES = (b"", b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\x1b[31m", b"\r", b'"', b"{", b"]", b"*a", b"&a", b"$A", b"\n")


def mutant_of(seed: bytes, draw: random.Random) -> bytes:
    """Change one to four places of a file: bits, values, parts that are left out, repeated or moved, and its end."""
    content = bytearray(seed)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(content) + 1)
        length = draw.choice((1, 1, 2, 8, 64))
        part = bytes(content[at : at + length])
        match draw.randrange(7):
            case 0 if at < len(content):
                content[at] ^= 1 << draw.randrange(8)
            case 1:
                del content[at:]
            case 2:
                del content[at : at + length]
            case 3:
                content[at:at] = part * draw.choice((2, 100))
            case 4:
                content[at : at + length] = draw.choice(_NUMBERS)
            case 5:
                content[at:at] = draw.choice(_BYTES)
            case _:
                other = draw.randrange(len(content) + 1)
                content[other:other] = part
    return bytes(content)


def preload(reader: Reader) -> None:
    """Read a seed in this process: forked processes then have the reader's modules."""
    from click.testing import CliRunner

    from pipeproof.cli.main import main

    with tempfile.TemporaryDirectory() as directory:
        path = _written(reader, reader.seeds[0], Path(directory))
        CliRunner().invoke(main, [str(word) for word in reader.command(path)])


def _written(reader: Reader, content: bytes, directory: Path) -> Path:
    path = directory / "input" / reader.file
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    if reader.name == "values":
        for number, record in enumerate((directory / "input", directory / "other")):
            (record / "values").mkdir(parents=True, exist_ok=True)
            (record / "values" / "step0.npz").write_bytes(content if number == 0 else reader.seeds[0])
            (record / "record.jsonl").write_bytes(record_of_values(str(number) * 32))
    if reader.name == "record_map":
        (path.parent / "record.jsonl").write_bytes(record_of_values("0" * 32))
    if reader.name == "rank_record":
        (path.parent / "record.rank1.jsonl").write_bytes(reader.seeds[0])
    if reader.name == "results":
        (path.parent / "gpt_pp4.yaml").write_bytes((ROOT / "examples" / "gpt_pp4.yaml").read_bytes())
    return path


peak_mb = 0.0
"""Largest resident memory of a process that read a mutant until now, with the memory of its parent."""


def outcome_of(reader: Reader, content: bytes) -> str | None:
    """Read a mutant in a forked process; return the unhandled outcome, or None."""
    global peak_mb
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as output:
        path = _written(reader, content, Path(directory))
        pid = os.fork()
        if pid == 0:
            _read(reader, path, output.fileno())
        descriptor = os.pidfd_open(pid)
        ready, _, _ = select.select([descriptor], [], [], 20 * LIMIT_S)  # it waits for something that never comes
        os.close(descriptor)
        if not ready:
            os.kill(pid, signal.SIGKILL)
        _, ended, usage = os.wait4(pid, 0)
        status, peak_mb = os.waitstatus_to_exitcode(ended), max(peak_mb, usage.ru_maxrss / 1000)
        output.seek(0)
        return problem_of(status, output.read().decode(errors="replace"))


def problem_of(status: int, output: str) -> str | None:
    """Return the unhandled outcome in one line; None for a status of pipeproof without a traceback."""
    if status < 0:
        return f"ended by {signal.Signals(-status).name}"
    if "Traceback (most recent call last)" in output or "did not expect this" in output:
        lines = [line for line in output.splitlines() if "Error" in line]
        return f"unexpected: {lines[-1] if lines else output[-200:]}"
    return None if status in (0, 1, 2) else f"status {status}"


def _read(reader: Reader, path: Path, output: int) -> None:
    os.dup2(output, 1)
    os.dup2(output, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    status = 70
    try:
        from pipeproof.cli.main import main

        main.main([str(word) for word in reader.command(path)], prog_name="pipeproof")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:  # noqa: BLE001 - the fuzzer looks for errors that escape
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def keep_counts(counts: Mapping[str, int], bad: int, seconds: float) -> None:
    """Keep the counts of a fuzz for ``validation/results/hardening.md``."""
    sys.path.insert(0, str(ROOT / "validation" / "hardening"))
    from attack import keep

    keep(
        "fuzz",
        {
            "mutants": sum(counts.values()),
            "readers": len(counts),
            "not_handled": bad,
            "seconds": round(seconds),
            "peak_mb": round(peak_mb),
        },
    )
