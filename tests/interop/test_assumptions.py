"""Assumptions of importers decide no verdict: it is the same with other values, or the import is undecided."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeproof.diagnostics.finding import BadPlanError
from pipeproof.interop import Flags, check_imported, import_files

EXAMPLES = Path(__file__).parents[2] / "examples" / "importing"
FILES = {
    "ernie": "erniekit.yaml", "fleet": "strategy.prototxt", "megatron": "megatron.sh",
    "paddleformers": "full_tp_pp.yaml", "torchtitan": "torchtitan.toml", "verl": "verl.sh",
}  # fmt: skip
UNDECIDED = {"fleet"}


def others(value):
    """The opposite of a fact; twice a size, which divides wherever the size does."""
    if isinstance(value, bool):
        return [not value]
    return [2 * value] if isinstance(value, int) else []


@pytest.mark.parametrize("kind", FILES)
def test_each_assumed_value_is_tried_with_another(kind):
    made = import_files(kind, [EXAMPLES / FILES[kind]], Flags())
    report = check_imported(made)
    assert (report.verdict.value == "undecided") == (kind in UNDECIDED)
    changed = {}
    for assumption in made.assumptions:
        for value in others(assumption.value):
            try:
                errors = check_imported(replace(made.again({assumption.key: value}), again=None)).errors
            except BadPlanError as error:
                errors = error.findings
            if bool(errors) != bool(report.errors):
                changed[".".join(map(str, assumption.key)), value] = [str(error.message) for error in errors[:2]]
    assert changed.keys() == ({("topology.sequence_parallel", True)} if kind in UNDECIDED else set()), changed
