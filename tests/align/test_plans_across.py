"""One plan in two dim orders and on one rank and four: every tensor has a partner, and a wrong boundary is found."""

import functools
from pathlib import Path

import pytest
import yaml

from pipeproof.analysis.align.compare_records import align
from pipeproof.analysis.align.loss_pairs import Tolerance
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.verify.subject import make_subject
from tests.plans import subject

ROOT = Path(__file__).parents[2]
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


def test_the_seed_experiment_is_located_at_its_boundary(tmp_path):
    """Two wrong runs with one loss: 23 of 24 gradients differ, and `state align` finds why."""
    from tests.align.recorded_plan import record, reference_run

    for where in ("after", "before"):
        content = yaml.safe_load((ROOT / "examples" / "seed" / f"norm_{where}_partial.yaml").read_text())
        content["run"]["steps"] = 1
        plan = make_subject(plan_from_dict(content)).unfolded().plan
        record(plan, reference_run(plan), tmp_path / where)
    found = align(tmp_path / "after" / "run", tmp_path / "before" / "run", Tolerance())
    assert found.losses.equal
    equal = {name for name in found.tensors.with_equal_bits if name.startswith("gradient")}
    different = {name for name in found.tensors.with_other_bits if name.startswith("gradient")}
    assert (equal, len(different)) == ({"gradient of head.weight"}, 23)
    assert found.tensors.first.cause.family == "norm"  # the change itself
    for where in ("after", "before"):
        first = align(tmp_path / where / "run", tmp_path / where / "reference", Tolerance()).tensors.first
        assert (first.a.layer, first.a.direction, first.a.side) == ("empty.1", "forward", "input")  # of stage 1
        assert first.handed_on
        assert first.cause.family == "layout"
        assert "2048 of B's 4096 are lost" in first.cause.evidence
