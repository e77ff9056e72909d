"""Write ``validation/results/mistakes.md``: typical mistakes, and the first line and the help of the answer to each.

``python validation/pages/make_mistakes.py`` writes, ``--check`` exits 1 if the page is stale.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from click.testing import CliRunner
from pages import EVIDENCE, fill, main, table

from pipeproof.cli.main import main as pipeproof

PLAN = Path("examples/gpt_pp4.yaml")
EDITS = (
    ("no version", "pipeproof: 1\n", ""),
    ("a version of the future", "pipeproof: 1", "pipeproof: 2"),
    ("a tab", "topology: {pp: 4}", "topology:\n\tpp: 4"),
    ("a key twice", "topology: {pp: 4}", "topology: {pp: 4, pp: 2}"),
    ("a misspelt section", "schedule:", "scheduel:"),
    ("a misspelt key", "num_micro_batches", "num_microbatches"),
    ("a key in the wrong section", "topology: {pp: 4}", "topology: {pp: 4, num_layers: 4}"),
    ("a word for a number", "pp: 4", "pp: four"),
    ("zero ranks", "pp: 4", "pp: 0"),
    ("fewer layers than ranks", "num_layers: 4", "num_layers: 2"),
    ("heads that do not divide", "num_heads: 4", "num_heads: 5"),
    ("an unknown schedule", "kind: 1f1b", "kind: 1f1b_interleaved"),
    ("interleaved with one chunk", "kind: 1f1b", "kind: interleaved"),
    ("DualPipe with an odd number of micro-batches", "kind: 1f1b, num_micro_batches: 8",
     "kind: dualpipe, num_micro_batches: 9"),
    ("the name that others use for it", "pp: 4}", "pp: 4, tp: 2, sp: true}"),
    ("an unknown transport", "forward: full", "forward: scatter"),
    ("an unknown type", "dtype: float32", "dtype: fp16"),
    ("a backend without GPUs", "backend: paddle, device: cpu", "backend: jax, device: cpu"),
    ("a time below zero", "forward_us: 100", "forward_us: -1"),
    ("a time under another name", "forward_us: 100", "forward: 100"),
    ("an unknown device", "cost:     {forward_us: 100, backward_us: 200, p2p_latency_us: 0}",
     "cost: {analytic: {device: H100-SXM}}"),
    ("a limit of memory that is too small", "run:  ", "memory: {budget_gib: 0.000001}\nrun:  "),
)  # fmt: skip
"""Each mistake, the text of the plan that is replaced, and the text in its place."""
COMMANDS = (
    ("partial transfers with sequence parallelism", ("check", "examples/gpt_pp2_tp2_sp_partial.yaml")),
    ("a file that does not exist", ("check", "plan.yml")),
    ("a command that is misspelt", ("chek", str(PLAN))),
    ("a file in the place of a command", (str(PLAN),)),
    ("an option that is misspelt", ("check", str(PLAN), "--formt", "json")),
    ("--set without a value", ("check", str(PLAN), "--set", "topology.pp")),
    ("an unknown code", ("check", str(PLAN), "--select", "PP999")),
    ("options of importers for a plan", ("simulate", str(PLAN), "--world-size", "8")),
    ("an output into no directory", ("simulate", str(PLAN), "-o", "nowhere/plan.html")),
    ("a suffix that no picture has", ("simulate", str(PLAN), "-o", "plan.gif")),
    ("tune without a device", ("tune", "llama3_70b", "--gpus", "256")),
)
"""Each mistake, and the words of the command."""


def _answer(words: tuple[str, ...], written: Path) -> tuple[str, str, str]:
    """The exit status, the first line of the answer, and its help."""
    result = CliRunner().invoke(pipeproof, words, prog_name="pipeproof")
    lines = [line.strip().replace(str(written), "plan.yaml") for line in result.output.splitlines()]
    first = next(line for line in lines if line.startswith("error"))
    helps = (line.removeprefix("= help: ") for line in lines if line.startswith("= help: "))
    return str(result.exit_code), first, next(helps, "")


def mistakes_part() -> str:
    """One row for each mistake."""
    text = PLAN.read_text(encoding="utf-8")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.yaml"
        for mistake, old, new in EDITS:
            assert old in text, mistake
            file.write_text(text.replace(old, new), encoding="utf-8")
            rows.append((mistake, *_answer(("check", str(file)), file)))
        rows += [(mistake, *_answer(words, file)) for mistake, words in COMMANDS]
    return table(("mistake", "status", "answer", "help"), rows)


if __name__ == "__main__":
    page = EVIDENCE / "mistakes.md"
    sys.exit(main("validation/pages/make_mistakes.py", {page: fill(page, {"mistakes": mistakes_part()})}))
