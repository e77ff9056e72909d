"""The producer of a layer's input, and causes that follow from the position if the values show none."""

import pytest

from pipeproof.analysis.align.first_difference import WeightGradients, giver, placed
from pipeproof.analysis.align.likely_cause import Cause, Family
from pipeproof.analysis.align.record_format import Recorded

PLAIN = ("embed", "layer.0", "layer.1", "norm", "head")
MODULES = ("embed", "layer.0", "layer.1", "mtp.0", "mtp.1", "empty.0", "norm", "head")
UNKNOWN = Cause(Family.UNKNOWN, "norms 1 and 2")


def tensor(layer, direction="forward", side="input", micro_batch=0, parameter=""):
    return Recorded(0, layer, (2,), "float32", "", 1.0, (), direction, side, micro_batch, parameter=parameter)


@pytest.mark.parametrize(
    ("layers", "layer", "direction", "expected"),
    [
        (PLAIN, "embed", "forward", None),
        (PLAIN, "norm", "forward", "layer.1"),
        (PLAIN, "layer.0", "backward", "layer.1"),
        (PLAIN, "head", "backward", None),
        (MODULES, "layer.1", "forward", "layer.0"),
        (MODULES, "mtp.0", "forward", "layer.1"),
        (MODULES, "mtp.1", "forward", "mtp.0"),
        (MODULES, "empty.0", "forward", "layer.1"),  # the main lane, which no module computes on
        (MODULES, "norm", "forward", "empty.0"),
        (MODULES, "empty.0", "backward", "norm"),
        (MODULES, "mtp.1", "backward", None),  # its lane's gradient is not recorded behind it
        (MODULES, "mtp.0", "backward", None),
        (MODULES, "layer.1", "backward", None),  # a sum of the main lane's and the module's
        (MODULES, "layer.0", "backward", "layer.1"),
    ],
)
def test_who_gave_it(layers, layer, direction, expected):
    assert giver(tensor(layer, direction), layers) == expected


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_layer_that_takes_what_is_equal_and_gives_what_is_not(direction):
    first, before = tensor("layer.1", direction, "output"), tensor("layer.1", direction)
    found = placed(UNKNOWN, first, before, PLAIN)
    assert found.family is Family.COMPUTATION
    assert found.evidence.endswith(UNKNOWN.evidence)
    assert ("forward it is right" in found.evidence) == (direction == "backward")
    assert "lanes" not in found.evidence


@pytest.mark.parametrize(
    ("layer", "direction", "told"),
    [("mtp.0", "forward", True), ("head", "forward", True), ("norm", "forward", False), ("mtp.0", "backward", False)],
)
def test_what_other_lanes_bring_is_said_to_be_unknown(layer, direction, told):
    first, before = tensor(layer, direction, "output"), tensor(layer, direction)
    assert ("other MTP streams" in placed(UNKNOWN, first, before, MODULES).evidence) == told


@pytest.mark.parametrize(
    ("first", "before"),
    [
        (tensor("layer.1", side="output"), None),
        (tensor("layer.1"), tensor("layer.0", side="output")),
        (tensor("layer.1", side="output", micro_batch=1), tensor("layer.1")),
        (tensor("layer.1", "backward", "output"), tensor("layer.1")),
        (tensor("layer.1", parameter="layer.1.a"), tensor("layer.1", parameter="layer.1.b")),
    ],
)
def test_elsewhere_the_place_says_nothing(first, before):
    assert placed(UNKNOWN, first, before, PLAIN) == UNKNOWN


def test_what_the_values_say_comes_first():
    scale = Cause(Family.SCALE, "2")
    assert placed(scale, tensor("layer.1", side="output"), tensor("layer.1"), PLAIN) == scale


def test_gradients_of_weights_narrow_it_down_only_where_some_are_equal_and_some_are_not():
    assert WeightGradients(("a",), ("b",)).are_conclusive
    assert not WeightGradients((), ("b",)).are_conclusive
    assert not WeightGradients(("a",), ()).are_conclusive
