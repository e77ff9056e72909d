"""Measure the time and the memory of every limit: inputs of the largest size that is read, and the next larger one.

``python validation/hardening/limits.py [NAME..]`` prints them, ``--write`` keeps them in results/hardening.json, from
which ``validation/pages/make_hardening.py`` writes the table of ``docs/limitations.md``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from attack import Ended, keep, kept, pipeproof

from pipeproof.analysis.align.read_record import MAX_LINE
from pipeproof.comm.generated_schedule import MAX_OPERATIONS
from pipeproof.diagnostics.source import MAX_BYTES
from pipeproof.foreign_text import MAX_DEPTH as TEXT_DEPTH
from pipeproof.interop.hang.flight_recorder import MAX_BYTES as DUMP_BYTES
from pipeproof.interop.importers.megatron.launch_script import MAX_EXPANDED
from pipeproof.state.flex.pickles import MAX_DEPTH
from pipeproof.state.flex.pickles import MAX_OPERATIONS as PICKLE_OPERATIONS

Arguments = list[str | Path]
PLAN = """\
pipeproof: 1
model: {{kind: gpt, num_layers: 64, hidden_size: 64, num_heads: 4, ffn_size: 64, vocab_size: 64, seq_length: 64}}
topology: {{pp: 64}}
schedule: {{kind: 1f1b, num_micro_batches: {m}, micro_batch_size: 1}}
"""


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit, and a function that makes an input of its size in a directory and returns the command that reads it."""

    name: str
    limit: str
    make: Callable[[Path], Arguments]


def plan_of(m: int) -> Callable[[Path], Arguments]:
    """A plan of 64 stages with ``m`` micro-batches, checked."""

    def make(directory: Path) -> Arguments:
        (directory / "plan.yaml").write_text(PLAN.format(m=m))
        return ["check", directory / "plan.yaml"]

    return make


def yaml_of_size(directory: Path) -> Arguments:
    """A plan file of the largest size: one list of short texts, which are most values for their bytes."""
    text = PLAN.format(m=8) + "stages: ["
    text += "a, " * ((MAX_BYTES - len(text) - 2) // 3) + "]\n"
    (directory / "plan.yaml").write_text(text)
    return ["check", directory / "plan.yaml"]


def script(directory: Path) -> Arguments:
    """A shell script whose variables double without end."""
    doubling = "".join(f"A{n + 1}=$A{n}$A{n}$A{n}$A{n}\n" for n in range(12))
    (directory / "train.sh").write_text("A0=xxxxxxxxxx\n" + doubling + "torchrun pretrain_gpt.py $A12\n")
    return ["import", "plan", directory / "train.sh"]


def toml(directory: Path) -> Arguments:
    """A job file in TOML, nested beyond the limit."""
    (directory / "job.toml").write_text("a = " + "[" * (TEXT_DEPTH + 1) + "]" * (TEXT_DEPTH + 1))
    return ["import", "plan", directory / "job.toml"]


def dump(content: bytes) -> Callable[[Path], Arguments]:
    """A directory with one dump of a rank."""

    def make(directory: Path) -> Arguments:
        (directory / "dumps").mkdir()
        (directory / "dumps" / "rank_0").write_bytes(content)
        return ["job", "hang", directory / "dumps"]

    return make


def json_dump(directory: Path) -> Arguments:
    """A dump in JSON of the largest size: entries with 100 frames each."""
    frame = {"name": "f", "filename": "/usr/lib/python3/site-packages/torch/x.py", "line": 1}
    fields = ("record_id", "process_group", "collective_seq_id", "p2p_seq_id", "profiling_name", "input_sizes",
              "output_sizes", "state", "is_p2p")  # fmt: skip
    values = (0, ["0", "default_pg"], 1, 0, "nccl:all_reduce", [[4]], [[4]], "completed", False)
    entry = json.dumps({**dict(zip(fields, values, strict=True)), "frames": [frame] * 100})
    head = '{"version": "2.10", "pg_config": {"0": {"ranks": "[0]", "desc": "default_pg"}}, "entries": ['
    number = (DUMP_BYTES - len(head) - 2) // (len(entry) + 1)
    (directory / "dumps").mkdir()
    (directory / "dumps" / "rank_0").write_text(head + ",".join([entry] * number) + "]}")
    return ["job", "hang", directory / "dumps"]


def record_line(directory: Path) -> Arguments:
    """A record whose first line is as long as a line may be."""
    (directory / "record.jsonl").write_text("[" + "0," * (MAX_LINE // 2 - 2) + "0]\n")
    return ["state", "align", directory / "record.jsonl", directory / "record.jsonl"]


def long_log(directory: Path) -> Arguments:
    """A training log of 256 MiB without a loss in it: no limit, read line by line."""
    line = "a line of a log that shows nothing of the training, as most lines do\n"
    (directory / "train.log").write_text(line * (2**28 // len(line)))
    return ["state", "align", directory / "train.log", directory / "train.log"]


LIMITS = (
    Limit("a plan file", f"{MAX_BYTES:,} bytes", yaml_of_size),
    Limit("operations of a step", f"{MAX_OPERATIONS:,}", plan_of(MAX_OPERATIONS // (64 * 15))),
    Limit("operations of a step, beyond", f"{MAX_OPERATIONS:,}", plan_of(10_000)),
    Limit("expansions of a shell script, beyond", f"{MAX_EXPANDED:,} characters", script),
    Limit("depth of TOML, beyond", f"{TEXT_DEPTH}", toml),
    Limit("operations of a pickle", f"{PICKLE_OPERATIONS:,}",
          dump(b"\x80\x02](" + b"N" * (PICKLE_OPERATIONS - 7) + b"e.")),
    Limit("depth of a pickle, beyond", f"{MAX_DEPTH}", dump(b"\x80\x02)" + b"\x85" * 100_000 + b".")),
    Limit("values of a pickle, beyond", f"{PICKLE_OPERATIONS:,}", dump(b"\x80\x02)" + b"q\x00h\x00\x86" * 60 + b".")),
    Limit("a dump of a rank in JSON", f"{DUMP_BYTES:,} bytes", json_dump),
    Limit("a line of a record or log", f"{MAX_LINE:,} characters", record_line),
    Limit("a training log of 256 MiB", "none: read line by line", long_log),
)  # fmt: skip


def measured(limit: Limit) -> Ended:
    """Run the command of a limit."""
    with tempfile.TemporaryDirectory() as directory:
        return pipeproof(limit.make(Path(directory)))


def main() -> int:
    """Measure all limits, or those named; status 1 where one was not handled."""
    names = [name for name in sys.argv[1:] if not name.startswith("--")]
    figures, bad = [], 0
    for limit in LIMITS:
        if names and limit.name not in names:
            continue
        ended = measured(limit)
        bad += ended.problem is not None
        first = next(iter(ended.output.splitlines()), "")
        figures_text = f"{ended.status:3} {ended.seconds:7.1f} s {ended.peak_mb:6} MB {ended.problem or ''}"
        print(f"{limit.name:40} {figures_text} {first[:90]}")
        figures.append(
            {"name": limit.name, "limit": limit.limit, "seconds": round(ended.seconds, 1), "peak_mb": ended.peak_mb,
             "status": ended.status, "problem": ended.problem}
        )  # fmt: skip
    if "--write" in sys.argv:
        new = {figure["name"]: figure for figure in figures}
        names = [limit.name for limit in LIMITS]
        keep("limits", sorted({**{old["name"]: old for old in kept("limits")}, **new}.values(),
                              key=lambda figure: names.index(figure["name"])))  # fmt: skip
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
