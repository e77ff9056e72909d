"""The order in which the ordered reference adds, and what a stage refuses.

That stages have the reference's bits is in ``tests/exec/test_reference_bits.py`` and ``test_cuts.py``.
"""

import numpy as np
import pytest

from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.synthetic import loss_scale, micro_batch
from pipeproof.stages.paddle.stage import PaddleStage
from pipeproof.stages.reference.bound import parallel_bound
from pipeproof.stages.reference.ordered import OrderedModel, Orders, run_ordered
from pipeproof.stages.reference.unpartitioned import run_unpartitioned
from tests.stages.references import make_plan, run_in_order, same_bits

pytestmark = pytest.mark.needs_paddle


def test_without_parallelism_the_ordered_model_is_bitwise_the_unpartitioned_one():
    plan = make_plan(run={"steps": 3})
    for ordered, unpartitioned in zip(run_in_order(plan), run_unpartitioned(plan), strict=True):
        assert ordered.loss.tobytes() == unpartitioned.loss.tobytes()
        assert same_bits(ordered.gradients, unpartitioned.gradients) == []
        assert same_bits(ordered.weights, unpartitioned.weights) == []


def test_another_order_of_micro_batches_is_added_in_that_order():
    """One parameter is added in another order: its bits change with every order, the others keep theirs."""
    plan = make_plan(schedule={"num_micro_batches": 4}, run={"steps": 1})
    (plain,) = run_in_order(plan)
    names = parameter_names(plan)
    in_order = (range(4),)
    orders = Orders(in_order, dict.fromkeys(names, in_order) | {"norm.weight": ((3, 1, 0, 2),)})
    (other,) = run_ordered(plan, orders)
    assert same_bits(other.gradients, plain.gradients) == ["norm.weight"]
    one_by_one = [one_micro_batch(plan, k)["norm.weight"] for k in (3, 1, 0, 2)]
    assert other.gradients["norm.weight"].tobytes() == sum(one_by_one[1:], one_by_one[0]).tobytes()


def test_copies_add_their_own_micro_batches_and_then_their_sums():
    """Gradients and loss, in an order that neither one copy nor the other order of copies has."""
    plan = make_plan(schedule={"num_micro_batches": 5}, run={"steps": 1})
    copies = ((3, 1, 0), (4, 2))
    (ours,) = run_ordered(plan, Orders(copies, dict.fromkeys(parameter_names(plan), copies)))
    first, second = ([one_micro_batch(plan, k) for k in order] for order in copies)
    differs = []
    for name, gradient in ours.gradients.items():
        a, b, c = (of_one[name] for of_one in first)
        d, e = (of_one[name] for of_one in second)
        assert gradient.tobytes() == (((a + b) + c) + (d + e)).tobytes(), name
        differs.append(gradient.tobytes() != ((((a + b) + c) + d) + e).tobytes())
    assert any(differs)


@pytest.mark.parametrize("num_splits", [2, 4])
@pytest.mark.parametrize("order", ["sbh", "bsh"])
def test_a_model_of_sequence_splits_is_the_unpartitioned_one_except_rounding(order, num_splits):
    """Attention of a split sees all before it, and its keys and values have the gradients of all after it."""
    plan = make_plan(
        model={"activation_order": order},
        schedule={"num_sequence_splits": num_splits, "kind": "seq1f1b"},
        run={"steps": 1, "dtype": "float64"},
    )
    units = (range(plan.schedule.num_micro_batches * num_splits),)
    (ours,) = run_ordered(plan, Orders(units, dict.fromkeys(parameter_names(plan), units)))
    (unpartitioned,) = run_unpartitioned(plan)
    bound = parallel_bound(plan)
    assert 0.0 < bound < 1e-12
    assert abs(ours.loss - unpartitioned.loss) <= bound * unpartitioned.loss
    for name, gradient in unpartitioned.gradients.items():
        assert np.abs(ours.gradients[name] - gradient).max() <= bound * np.abs(gradient).max(), name
    assert same_bits(ours.gradients, unpartitioned.gradients) != []


def parameter_names(plan):
    return [parameter.name for layer in describe_gpt(plan) for parameter in layer.parameters]


def one_micro_batch(plan, index):
    """The gradients of one micro-batch alone."""
    model = OrderedModel(plan)
    model.zero_gradients()
    ((loss,),) = model.losses([micro_batch(plan, 0, index)])
    (loss * loss_scale(plan, 0, index)).backward()
    return {name: model.joined(name, splits) for name, splits in model.gradients().items()}


def test_every_step_and_micro_batch_shows_in_the_gradients():
    plan = make_plan(run={"steps": 2})
    more = make_plan(run={"steps": 2}, schedule={"num_micro_batches": 5})
    first, second = run_unpartitioned(plan)
    assert same_bits(first.gradients, second.gradients) == list(first.gradients)
    assert same_bits(first.gradients, next(run_unpartitioned(more)).gradients) == list(first.gradients)


@pytest.mark.parametrize(("names", "given"), [(["embed"], True), (["norm", "head"], False)])
def test_a_stage_takes_an_activation_exactly_where_it_does_not_embed(names, given):
    plan = make_plan()
    stage = PaddleStage(plan, [layer for layer in describe_gpt(plan) if layer.name in names])
    with pytest.raises(ValueError, match="first layer is not 'embed'"):
        stage.forward(object() if given else None, micro_batch(plan, 0, 0), step=0, index=0)
