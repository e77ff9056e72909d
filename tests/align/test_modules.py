"""Records of models with modules of multi-token prediction: the same wherever they are cut, faults found in them."""

import pytest

from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

CUTS = {
    "the norm behind a cut": (1, [["embed", "layer.0"], ["layer.1", "mtp.0"], ["empty.0", "norm", "head"]]),
    "a module behind a cut": (1, [["embed", "layer.0"], ["layer.1"], ["mtp.0", "empty.0", "norm", "head"]]),
    "between modules": (2, [["embed", "layer.0"], ["layer.1", "mtp.0"], ["mtp.1", "empty.0", "norm", "head"]]),
    "no cut behind the blocks": (2, [["embed", "layer.0"], ["layer.1", "mtp.0", "mtp.1", "empty.0", "norm", "head"]]),
}
SP = {"tp": 2, "sequence_parallel": True}


def plan_of(cut, topology=(), **model):
    num_modules, stages = CUTS[cut]
    return subject(
        model={"num_layers": 2, "mtp": {"num_modules": num_modules}, "empty_layers": {"tail": 1}, **model},
        topology={"pp": len(stages), **dict(topology)},
        stages=stages,
        schedule={"num_micro_batches": 2},
        run={"steps": 1},
    ).plan  # fmt: skip


def found(plan, directory, fault=None):
    from tests.align.planted import located
    from tests.align.recorded_plan import reference_run

    return located(plan, reference_run(plan), directory, fault)


@pytest.mark.parametrize("cut", CUTS)
def test_what_each_layer_gives_does_not_depend_on_the_cut(cut, tmp_path):
    """A module and the norm read one tensor on one stage, and its gradient is a sum; the addends are recorded."""
    status, printed, _ = found(plan_of(cut), tmp_path)
    assert status == 0, printed


def test_so_do_ranks_that_cut_the_sequence(tmp_path):
    status, printed, _ = found(
        plan_of("the norm behind a cut", SP, mtp={"num_modules": 1, "magic_send": True}), tmp_path
    )
    assert status == 0, printed


def test_the_reference_in_order_and_the_uncut_one_show_the_same():
    from pipeproof.stages.describe.layer_records import LayerWatch
    from pipeproof.stages.reference.unpartitioned import run_unpartitioned
    from tests.align.recorded_plan import reference_run

    plan, watch = plan_of("between modules"), LayerWatch()
    list(run_unpartitioned(plan.spec, watch))
    (uncut,), (ordered,) = [watch.take()], reference_run(plan).layers
    assert {key: array.tobytes() for key, array in uncut.items()} == {
        key: array.tobytes() for key, array in ordered.items()
    }
    own, other = uncut["mtp.0/backward/output/0/0"], uncut["empty.0/backward/output/0/0"]
    assert (own + other).tobytes() == uncut["layer.1/backward/input/0/0"].tobytes()


@pytest.mark.parametrize("cut", ["the norm behind a cut", "no cut behind the blocks"])
def test_twice_the_weight_of_modules_is_found_at_the_last_one(cut, tmp_path):
    from tests.align.planted import Planted, twice_the_weight_of_modules

    status, _, content = found(plan_of(cut), tmp_path, Planted("", twice_the_weight_of_modules, {}, ""))
    assert status == 1
    assert content["main"]["equal"] == content["mtp"]["equal"] == 1  # losses are shown without their weight
    first = content["tensors"]["first_difference"]
    last = f"mtp.{CUTS[cut][0] - 1}"
    assert (first["tensor"]["layer"], first["tensor"]["direction"], first["tensor"]["side"]) == (
        last,
        "backward",
        "input",
    )
    assert first["cause"]["family"] == "scale"
    assert "are 2 of B's, exactly" in first["cause"]["evidence"]
    assert not first["handed_on"]
