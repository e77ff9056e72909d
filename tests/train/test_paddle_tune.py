"""Lists of Paddle layers, measured and tuned on two processes."""

import pytest
from click.testing import CliRunner

from pipeproof.cli.main import main
from tests.train.paddle_ranks import run_ranks

pytestmark = pytest.mark.needs_paddle


def test_a_list_of_layers_is_measured_cut_and_trained(tmp_path):
    plan = str(tmp_path / "plan.yaml")
    statuses, outputs = run_ranks("paddle_tune.py", 2, plan)
    assert statuses == [0, 0], "\n".join(outputs)
    checked = CliRunner().invoke(main, ["check", plan])
    assert checked.exit_code == 0, checked.output
    tuned = CliRunner().invoke(main, ["tune", plan, "--gpus", "3", "--top", "1"])
    assert tuned.exit_code == 0, tuned.output
