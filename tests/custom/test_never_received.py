"""PP185: weights of custom layers that no backward has a gradient for; the reference has the same layers."""

import pytest

from tests.custom.plans import FILES, described, own_dict, own_plan

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

SECTIONS = {"schedule": {"num_micro_batches": 2}, "run": {"steps": 2}}


def without_gradient(function, **sections):
    """The weights without a gradient, of each step."""
    from pipeproof.stages.reference.custom_reference import run_custom_unpartitioned

    plan = own_plan(f"{FILES / 'gradients.py'}:{function}", 2, **SECTIONS, **sections).spec
    return [set(result.without_gradient) for result in run_custom_unpartitioned(plan)]


@pytest.mark.parametrize(
    ("function", "weight"),
    [("detached", "layer.2.scale"), ("unused", "layer.0.scale"), ("none", "layer.1.scale")],
)
def test_a_weight_that_the_backward_does_not_reach(function, weight):
    assert without_gradient(function) == [{weight}, {weight}]


@pytest.mark.parametrize("function", ["right", "zero", "frozen"])
def test_weights_that_it_reaches_or_that_are_frozen(function):
    assert without_gradient(function) == [set(), set()]


def test_a_weight_that_one_micro_batch_uses():
    assert without_gradient("once") == [{"once.0.scale"}, set()]


def test_shared_weights_count_once():
    from pipeproof.stages.reference.custom_reference import run_custom_unpartitioned

    plan = own_plan("pair.py", 2, **SECTIONS).spec
    assert {result.without_gradient for result in run_custom_unpartitioned(plan)} == {()}


@pytest.mark.parametrize("function", ["detached", pytest.param("once", marks=pytest.mark.slow)])
def test_the_command(tmp_path, function):
    """With copies of the data-parallel axis, so that the reference adds in the plan's order."""
    import json

    import yaml

    from tests.cli.commands import invoke

    build = f"{FILES / 'gradients.py'}:{function}"
    plan = own_dict(build, 2, described(build, 2), topology={"pp": 1, "dp": 2}, **SECTIONS)
    file, report = tmp_path / "plan.yaml", tmp_path / "report.json"
    file.write_text(yaml.safe_dump(plan))
    result = invoke("run", file, "--report", report)
    findings = [finding["code"] for finding in json.loads(report.read_text())["findings"]]
    if function == "once":
        assert (result.exit_code, findings) == (0, [])
        return
    assert (result.exit_code, findings) == (1, ["PP185"])
    assert "`layer.2.scale`: never received a gradient, in 2 steps of 2 micro-batches" in result.stdout
    assert "fails: matches the reference, but 1 weight never received a gradient" in result.stdout
