"""Importer of schedule files: ranks, stages and micro-batches, and assumed sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeproof.diagnostics.finding import Location
from pipeproof.diagnostics.source import LINE_BREAK, read_text
from pipeproof.interop.importers.import_codes import one_file
from pipeproof.interop.importers.imported import Flags, Imported
from pipeproof.interop.importers.model_sizes import assume_model
from pipeproof.interop.importers.plan_builder import PlanBuilder
from pipeproof.schedule.formats.csv_file import looks_like_csv
from pipeproof.schedule.formats.read_schedule import load_schedule_file
from pipeproof.schedule.formats.schedule_size_checks import Expected
from pipeproof.schedule.ops import COMPUTE_KINDS


def import_schedule(files: Sequence[Path], flags: Flags) -> Imported:
    """Import one file in any format of ``read_schedule``, without or with communication.

    Raises:
        PlanFileError: PP100 if the file cannot be read, the codes of schedule files if it is invalid.
    """
    file = one_file(files, "a schedule is one file")
    name = str(file)
    foreign, text = load_schedule_file(file, Expected()), read_text(name)
    ops = [row.op for rows in foreign.rows for row in rows if row.op.kind in COMPUTE_KINDS]
    num_ranks = len(foreign.rows)
    num_stages = max(op.stage for op in ops) + 1
    plan, location = PlanBuilder("schedule", flags), Location(name)
    plan.set(("topology", "pp"), num_ranks, f"{num_ranks} rows", location)
    plan.set(("schedule", "kind"), "file", name, location)
    plan.set(("schedule", "path"), str(file.resolve()), name, location)
    plan.set(("schedule", "num_micro_batches"), max(op.micro_batch or 0 for op in ops) + 1, name, location)
    plan.assume(("schedule", "micro_batch_size"), 1, "not in a schedule")
    plan.set(("schedule", "num_chunks"), max(num_stages // num_ranks, 1), name, location)
    if looks_like_csv(text):
        plan.set(("run", "backend"), "torch", "a schedule of PyTorch")
        plan.set(("run", "device"), "gpu", "a schedule of PyTorch")
    assume_model(plan, num_stages)
    return plan.imported(name, tuple(LINE_BREAK.split(text)))
