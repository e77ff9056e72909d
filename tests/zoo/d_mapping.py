"""Family D: which stage, rank and group a thing belongs to."""

import dataclasses

from pipeproof.verify.declared_facts import Facts, LayerNumber
from tests.plans import subject
from tests.zoo.case import Case
from tests.zoo.rows import without

UNEVEN = [["embed", "layer.0", "layer.1", "layer.2"], ["layer.3", "norm", "head"]]


def numbered(*numbers_of_stages):
    """The uneven plan, the layers of each stage computing as these layers of the model."""
    numbers = tuple(
        LayerNumber(stage, place, number)
        for stage, numbers in enumerate(numbers_of_stages)
        for place, number in enumerate(numbers)
    )
    return dataclasses.replace(subject(stages=UNEVEN), facts=Facts(num_layers=4, layer_numbers=numbers))


AXES = {"pp": 2, "dp": 2, "ep": 2}


def groups_of_another_order():
    """The plan's ranks in the groups of a mesh whose rank matrix has two axes changed places."""
    right = subject(topology=AXES)
    permuted = subject(topology={**AXES, "order": ["tp", "cp", "dp", "ep", "pp"]})
    return right.with_graph(permuted.graph)


def groups_of_another_size():
    """Expert groups of as many ranks as there are experts (4), where the plan has two ranks share them."""
    right = subject(topology={"dp": 2, "ep": 2})
    return right.with_graph(subject(topology={"dp": 1, "ep": 4}).graph)


CASES = (
    Case(
        "D1",
        "the number of a stage's first layer is its rank times the average number of layers",
        lambda: numbered((0, 1, 2), (3,)),
        lambda: numbered((0, 1, 2), (2,)),
        kills=("PP117",),
    ),
    Case(
        "D2",
        "each stage numbers its layers from 0",
        lambda: numbered((0, 1, 2), (3,)),
        lambda: numbered((0, 1, 2), (0,)),
        kills=("PP117",),
    ),
    Case(
        "D5",
        "the partitioner leaves the last stage empty",
        lambda: subject(stages=UNEVEN),
        lambda: subject(stages=[["embed", "layer.0", "layer.1", "layer.2", "layer.3", "norm", "head"], []]),
        kills=("PP115",),
    ),
    Case(
        "D7",
        "the rank matrix of the group maker swaps the dp and ep axes",
        lambda: subject(topology=AXES),
        groups_of_another_order,
        kills=("PP309",),
    ),
    Case(
        "D8",
        "gradients are reduced over dp alone, though the ranks along cp see other tokens",
        lambda: subject(topology={"dp": 2, "cp": 2}),
        lambda: without(subject(topology={"dp": 2, "cp": 2}), "REDUCE_GRAD:cp"),
        kills=("PP601",),
    ),
    Case(
        "D10",
        "the number of experts is passed as the size of the expert groups",
        lambda: subject(topology={"dp": 2, "ep": 2}),
        groups_of_another_size,
        kills=("PP309",),
    ),
)
