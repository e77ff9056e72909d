"""PP186: backwards of custom layers against finite differences."""

import re

import pytest

from pipeproof.diagnostics.finding import BadPlanAtError
from tests.custom.plans import FILES, own_plan

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]


def check(build, rows=2, **run):
    from pipeproof.stages.custom.backward_check import require_right_backwards

    require_right_backwards(own_plan(build, rows, run=run).spec)


def refusal(build):
    with pytest.raises(BadPlanAtError) as caught:
        check(build)
    (finding,) = caught.value.findings
    assert finding.code == "PP186"
    return finding.message, caught.value.path


GRADIENTS = f"{FILES / 'gradients.py'}"


@pytest.mark.parametrize("function", ["right", "zero", "unused", "kinks", "dropout"])
def test_layers_whose_backward_is_that_of_their_forward(function):
    check(f"{GRADIENTS}:{function}")


@pytest.mark.parametrize("file", ["mixer.py", "fleet_conv.py", "pair.py", "twice.py"])
def test_the_layers_of_other_tests(file):
    check(file)


@pytest.mark.parametrize(
    ("function", "layer", "tensor"),
    [
        ("wrong_weight", 1, "`layer.1.scale`"),
        ("wrong_input", 1, "input 0"),
        ("none", 1, "`layer.1.scale`"),
        ("detached", 2, "`layer.2.scale`"),
    ],
)
def test_layers_with_another_backward(function, layer, tensor):
    message, path = refusal(f"{GRADIENTS}:{function}")
    assert path == ("model", "layers", layer)
    assert f"the backward of layer `layer.{layer}` differs from finite differences: " in message
    assert f"of {tensor}: " in message
    steps_and_tolerances = re.findall(r"\(step ([\d.e+-]+), tolerance ([\d.e+-]+)\)", message)
    assert steps_and_tolerances
    for step, tolerance in steps_and_tolerances:
        assert 4e-6 < float(step) < 1e-5
        assert 0 < float(tolerance) < 1e-7


def test_an_input_that_a_wrong_backward_follows_is_named_with_both_values():
    """The input's gradient is 0.99 of the right one: that of ``Scaled``, and so those of the product before it."""
    message, _ = refusal(f"{GRADIENTS}:wrong_input")
    by_tensor = {line.partition(" of ")[2].partition(":")[0]: line for line in message.splitlines()}
    line = by_tensor["`layer.1.turn.bias`"]
    by_backward, central = (
        float(part.split()[-1]) for part in line.partition(" by central")[0].split(" by the backward,")
    )
    assert by_backward / central == pytest.approx(0.99, rel=1e-6)


def test_the_command(tmp_path):
    import yaml

    from tests.cli.commands import invoke
    from tests.custom.plans import described, own_dict

    build = f"{GRADIENTS}:wrong_weight"
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(own_dict(build, 2, described(build, 2), run={"steps": 1})))
    result = invoke("run", file, "--check-layers")
    assert result.exit_code == 2
    assert "error[PP186]" in result.output
    assert "step 0" not in result.output
