"""A check loads only the modules that its plan needs: each process pays for its imports."""

import pytest

from tests.cli.commands import python
from tests.plans import plan_file

SHARED = {"sizes", "stage_ops"}
"""Modules that the table of kinds and several generators need."""


def loaded_by_check(tmp_path, **sections):
    plan = plan_file(tmp_path / "plan.json", **sections)
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from pipeproof.cli.main import main\n"
        f"assert CliRunner().invoke(main, ['check', {str(plan)!r}]).exit_code == 0\n"
        "print(*(name for name in sys.modules if name.startswith('pipeproof.')))"
    )
    done = python("-c", code, check=True)
    return set(done.stdout.split())


@pytest.mark.slow(but=["interleaved-"])
@pytest.mark.parametrize(
    ("schedule", "own"),
    [
        ({"kind": "1f1b"}, {"one_f_one_b"}),
        ({"kind": "gpipe"}, {"gpipe"}),
        ({"kind": "interleaved", "num_chunks": 2}, {"interleaved", "round_robin"}),
    ],
    ids=lambda value: value["kind"] if isinstance(value, dict) else "",
)
def test_a_check_loads_the_generator_of_its_own_schedule(tmp_path, schedule, own):
    prefix = "pipeproof.schedule.generators."
    loaded = {name.removeprefix(prefix) for name in loaded_by_check(tmp_path, schedule=schedule) if prefix in name}
    assert loaded - SHARED == own


def test_data_sheets_are_loaded_for_plans_that_ask_for_them(tmp_path):
    resolve = "pipeproof.cost.analytic_times"
    assert resolve not in loaded_by_check(tmp_path)
    assert resolve in loaded_by_check(tmp_path, cost={"analytic": "h200"})


def test_an_interrupt_during_the_imports_is_no_traceback():
    code = (
        "import runpy, sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'pipeproof.cli.sweep_command':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "runpy.run_module('pipeproof', run_name='__main__', alter_sys=True)"
    )
    done = python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
