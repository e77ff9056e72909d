"""Rate and peak memory of resharding a large state, next to a plain copy of the same bytes.

The state is made up of random bytes: a GPT of the given size, cut by tp 2 x pp 2, AdamW's moments sharded over dp 2 or
not. It is cut for tp 4, which also cuts dims other than the first in other places, and merged into one file. The rival
is `cp -r` of the source. Both begin with the source's pages dropped from the cache and end with fsync of every file
that they wrote; which goes first alternates.

    python benchmarks/reshard.py --gb 10
    python benchmarks/reshard.py --gb 10 --sharded --repeats 3
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import yaml

from pipeproof.specs.load_plan import load_plan
from pipeproof.state.byte_ranges import digest_of
from pipeproof.state.reshard.copy_regions import TargetFiles
from pipeproof.state.state_index import INDEX_FILE, ShardFile, StateIndex, index_text, provenance_file
from pipeproof.state.state_layout import files_of, whole_state
from pipeproof.state.write_state import values_of
from pipeproof.verify.certificate import graph_digest
from pipeproof.verify.subject import make_subject

_BLOCK = 2**25
_HIDDEN = 2048
_CHILD = """
import sys
from pipeproof.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""
"""The command, which reports at its end its peak memory, in kB."""


def main() -> None:
    """Make the state, measure, print, and remove it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=10.0, help="size of the state")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--sharded", action="store_true", help="moments sharded over dp 2, which are flat ranges")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.directory, prefix="reshard-benchmark-") as folder:
        root = Path(folder)
        dp, memory = (2, {"shard_optimizer": "dp"}) if asked.sharded else (1, {})
        num_layers = _num_layers(asked.gb)
        one = _plan(root / "one.yaml", {"tp": 2, "pp": 2, "dp": dp}, num_layers, 2 // dp, memory)
        other = _plan(root / "other.yaml", {"tp": 4, "pp": 1}, num_layers, 2, {})
        source = _make_state(one, root / "state")
        size = sum(path.stat().st_size for path in source.iterdir())
        print(f"state of {size / 1e9:.2f} GB, {num_layers} layers, tp 2 x pp 2 x dp {dp}{', sharded' * asked.sharded}")
        ways = {"to tp 4": ["--to", str(other), "-o", str(root / "made")],
                "to one file": ["-o", str(root / "made.safetensors")]}  # fmt: skip
        for what, words in ways.items():
            _measure(what, source, words, size, asked.repeats, root)


def _measure(what: str, source: Path, words: list[str], size: int, repeats: int, root: Path) -> None:
    resharded, copied, peaks = [], [], []
    for number in range(repeats):
        for reshards in (True, False) if number % 2 == 0 else (False, True):
            _drop(source)
            if reshards:
                seconds, peak = _reshard(source, words)
                resharded.append(seconds)
                peaks.append(peak)
                _remove(Path(words[-1]))
            else:
                copied.append(_copy(source, root / "copy"))
                _remove(root / "copy")
    rates = [size / 1e9 / median(times) for times in (resharded, copied)]
    print(
        f"{what}: {rates[0]:.2f} GB/s, a copy {rates[1]:.2f} GB/s, ratio {rates[0] / rates[1]:.2f}; at most "
        f"{max(peaks) / 2**20:.2f} GiB of memory; seconds {_shown(resharded)}, copies {_shown(copied)}"
    )


def _reshard(source: Path, words: list[str]) -> tuple[float, int]:
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, "state", "reshard", str(source), *words],
        check=True,
        capture_output=True,
        text=True,
    )
    return time.perf_counter() - started, int(done.stdout.splitlines()[-1])


def _copy(source: Path, to: Path) -> float:
    started = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(to)], check=True)
    for path in (*to.iterdir(), to):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    return time.perf_counter() - started


def _drop(directory: Path) -> None:
    os.sync()
    for path in directory.iterdir():
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
        provenance_file(path).unlink()


def _num_layers(gb: float) -> int:
    """A layer has 15 h^2 weights, embedding and head 2 * 32,768 h; with its two moments a weight takes 12 bytes."""
    weights = gb * 1e9 / 12 - 2 * 32768 * _HIDDEN
    return max(2, round(weights / (15 * _HIDDEN**2) / 2) * 2)


def _plan(path: Path, topology: dict[str, int], num_layers: int, num: int, memory: dict[str, str]) -> Path:
    model = {
        "kind": "gpt", "num_layers": num_layers, "hidden_size": _HIDDEN, "num_heads": 16, "num_kv_heads": 8,
        "ffn_size": 4 * _HIDDEN, "vocab_size": 32768, "seq_length": 128,
    }  # fmt: skip
    schedule = {"kind": "1f1b", "num_micro_batches": num, "micro_batch_size": 1}
    run = {"backend": "paddle", "optimizer": "adamw", "steps": 9}
    plan = {"model": model, "topology": topology, "schedule": schedule, "run": run, "memory": memory}
    path.write_text(yaml.safe_dump({"pipeproof": 1, **plan}))
    return path


def _make_state(path: Path, directory: Path) -> Path:
    subject = make_subject(load_plan(path))
    plan, files, tensors = subject.plan, files_of(subject.plan), whole_state(subject.plan)
    target = TargetFiles(files, tensors, {name: rank for rank, name in enumerate(files)})
    directory.mkdir()
    noted = []
    random = np.random.default_rng(0)
    for name, shards in files.items():
        start, header = target.header_of(name)
        with (directory / name).open("wb") as stream:
            stream.write(start)
            while left := header.size_bytes - stream.tell():
                stream.write(random.bytes(min(_BLOCK, left)))
        file, rank = directory / name, target.ranks[name]
        noted.append(
            ShardFile(name=name, rank=rank, size_bytes=header.size_bytes, sha256=digest_of(file), shards=shards)
        )
    index = StateIndex(
        pipeproof_state=1, steps_done=3, digest=graph_digest(subject), framework="paddle", versions={},
        mesh=dict(zip(plan.mesh.axes, plan.mesh.sizes, strict=True)), values=values_of(plan.spec), tensors=tensors,
        files=tuple(noted),
    )  # fmt: skip
    (directory / INDEX_FILE).write_text(index_text(index))
    return directory


def _shown(times: list[float]) -> str:
    return " ".join(f"{one:.1f}" for one in times)


if __name__ == "__main__":
    main()
