"""One plan in two dim orders and on one rank and four: every tensor has a partner, and a wrong boundary is found."""

import functools

import pytest

from pipeproof.analysis.align.compare_records import align
from pipeproof.analysis.align.loss_pairs import Tolerance
from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The directory of a run's record, made once for each set of keys."""
    from tests.align.recorded_plan import record, reference_run

    @functools.cache
    def of(order, ranks, backward="full"):
        topology = {"pp": 2, "tp": 2, "sequence_parallel": True} if ranks == 4 else {"pp": 1}
        plan = subject(
            model={"num_layers": 2, "activation_order": order}, topology=topology,
            schedule={"num_micro_batches": 2}, transport={"forward": "full", "backward": backward}, run={"steps": 1},
        ).unfolded().plan  # fmt: skip
        directory = tmp_path_factory.mktemp("plan") / "record"
        record(plan, reference_run(plan), directory)
        return directory / "run"

    return of


@pytest.mark.parametrize(("a", "b"), [(("sbh", 4), ("bsh", 4)), (("bsh", 1), ("sbh", 4))])
def test_every_tensor_has_a_partner_and_differs_by_rounding_at_most(recorded, a, b):
    found = align(recorded(*a), recorded(*b), Tolerance(rounding=True))
    assert found.equal
    assert (found.tensors.only_a, found.tensors.only_b) == (0, 0)
    assert found.tensors.num_compared > 50


def test_a_wrong_boundary_is_found_from_a_run_in_another_order(recorded):
    found = align(recorded("sbh", 4, "partial"), recorded("bsh", 1), Tolerance(rounding=True))
    assert found.losses.equal
    first = found.tensors.first
    assert (first.a.layer, first.a.direction, first.a.side) == ("layer.0", "backward", "input")
    assert first.handed_on
    assert first.cause.family == "layout"
