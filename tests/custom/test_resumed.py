"""Custom layers that resume from a saved state have the bits of training without a stop."""

import json
from dataclasses import replace

import pytest

from pipeproof.diagnostics.finding import BadPlanAtError
from pipeproof.exec.launch.job_files import CheckpointOptions, Job, RunOptions, StepOutcome, dump_plan
from pipeproof.exec.rank.checkpointing import prepare_checkpoint, restore_state
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.state.read_state import find_state, read_whole
from pipeproof.state.resume_check import require_resumable
from pipeproof.verify.certificate import Verdict, certificate_of, graph_digest
from tests.cli.commands import invoke
from tests.custom.plans import FILES, described, own_dict
from tests.custom.states import CHUNKS, SHARDED, TWO, drift, layers_of, made
from tests.state.runs import save, shown
from tests.state.tiny import write_state

pytestmark = pytest.mark.needs_paddle


def test_what_training_changes_is_declared():
    declared = {layer["name"]: layer for layer in layers_of("drift.py")}
    both = [{"name": "count", "shape": [], "dtype": "int64"}, {"name": "mean", "shape": [6]}]
    assert declared["drift.1"]["buffers"] == declared["drift.4"]["buffers"] == both
    statistics = [{"name": "_mean", "shape": [6]}, {"name": "_variance", "shape": [6]}]
    assert declared["batchnorm1d.2"]["buffers"] == statistics
    assert [declared[name]["kind"] for name in ("linear.0", "tanh.6", "head.7")] == ["Linear", "tanh", "Head"]
    assert all("buffers" not in declared[name] for name in ("linear.0", "dropout.3", "tanh.6", "head.7"))


TWICE = """
from paddle import nn

def loss(output, labels):
    return (output - labels).square().mean()

def data(step, index, rng):
    x = rng.standard_normal((2, 4)).astype("float32")
    return x, x

def build():
    norm = nn.BatchNorm1D(4, weight_attr=False, bias_attr=False)
    return [nn.Linear(4, 4), norm, nn.Linear(4, 4), norm], loss, data
"""


def test_a_layer_that_is_listed_twice_has_buffers_for_each_place(tmp_path):
    """The result must not depend on both positions being on one rank."""
    from pipeproof.stages.custom.built_layers import BuiltModel

    (tmp_path / "twice.py").write_text(TWICE)
    layers = described(f"{tmp_path}/twice.py:build", 2)
    assert [[buffer["name"] for buffer in layer.get("buffers", [])] for layer in layers[1::2]] == [
        ["_mean", "_variance"]
    ] * 2
    model = BuiltModel(plan_from_dict(own_dict(f"{tmp_path}/twice.py:build", 2, layers)).spec)
    value = model.run(model.layers[0], model.inputs(0, 0), step=0, index=0)
    first, second = (layer.untrained() for layer in model.layers[1::2])
    model.run(model.layers[1], value, step=0, index=0)
    assert first["batchnorm1d.1._mean"].abs().sum() > 0
    assert second["batchnorm1d.3._mean"].abs().sum() == 0


def all_steps(at, first_step=0, state=None):
    """Every rank's outcomes and adapters, from a state on where it is given; and the framework's arrays."""
    from pipeproof.exec.rank.framework_choice import start_framework
    from tests.exec.in_memory import run_all

    def prepare(adapter, arrays, rank):
        restore_state(adapter, arrays, at.plan, rank, state.directory)

    arrays = start_framework(at.plan.spec.run).arrays
    return (*run_all(at.plan, first_step=first_step, prepare=None if state is None else prepare), arrays)


PLANS = {
    "two stages": {},
    "chunks, clipped": {"schedule": CHUNKS, "run": {"clip_norm": 0.5}},
    "replicas, sharded": {"topology": {"pp": 2, "dp": 2}, "schedule": {"kind": "zb_h1", **TWO}, "memory": SHARDED},
}


@pytest.mark.parametrize("sections", PLANS.values(), ids=PLANS)
def test_resumed_training_has_the_bits_of_training_in_one_go(tmp_path, sections):
    two = resumed(tmp_path, drift(4, **sections), drift(2, **sections))
    num = sections.get("topology", {}).get("dp", 1)
    means = two["drift.1.mean"].content.view("float32").reshape(num, -1)
    assert len({row.tobytes() for row in means}) == num


def resumed(tmp_path, whole, half):
    """Steps 0 to 3 in one go, and with an end after step 1: the same bits and files; the whole state at the end."""
    expected, at_end, arrays = all_steps(whole)
    _, adapters, _ = all_steps(half)
    state = find_state(save(half, tmp_path / "half", adapters, arrays))
    require_resumable(state, whole.plan, graph_digest(whole))
    outcomes, resumed, _ = all_steps(whole, 2, state)
    assert shown(outcomes[2:]) == shown(expected[2:])
    one, two = (save(whole, tmp_path / name, of, arrays, 4) for name, of in (("one", at_end), ("two", resumed)))
    names = sorted(path.name for path in one.iterdir())
    assert len(names) == whole.plan.mesh.num_ranks + 1
    assert [(one / name).read_bytes() for name in names] == [(two / name).read_bytes() for name in names]
    return read_whole(find_state(two))


def test_buffers_of_every_type_come_back(tmp_path):
    build = f"{FILES}/keeps.py:types"
    layers, sections = described(build, 4), {"topology": {"pp": 2, "dp": 2}, "schedule": TWO}
    types = [(one["name"], one.get("dtype"), len(one["shape"])) for one in layers[1]["buffers"]]
    assert types == [("flags", "bool", 1), ("turn", "bool", 0), ("large", "int64", 1), ("count", "int32", 0),
                     ("sums", "float64", 1), ("scale", "float64", 0)]  # fmt: skip
    found = resumed(tmp_path, *(made(layers, build, steps, **sections) for steps in (4, 2)))
    assert {(found[f"types.1.{name}"].dtype, len(found[f"types.1.{name}"].shape)) for name, _, _ in types} == {
        (dtype, dims + 1) for _, dtype, dims in types
    }


OTHERS = {
    "four stages": {"topology": {"pp": 4}},
    "chunks": {"schedule": CHUNKS},
    "one stage": {"topology": {"pp": 1}},
}


@pytest.mark.parametrize("sections", OTHERS.values(), ids=OTHERS)
def test_on_other_stages_training_goes_on_bit_for_bit(tmp_path, sections, in_one_go):
    states, after = in_one_go
    target = drift(4, **sections)
    require_resumable(states, target.plan, graph_digest(target))
    _, adapters, arrays = all_steps(target, 2, states)
    found = read_whole(find_state(save(target, tmp_path, adapters, arrays, 4)))
    assert {name: (one.dtype, one.shape, one.content.tobytes()) for name, one in found.items()} == after


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory):
    """The state after step 1, and each tensor after step 3."""
    root, half, whole = tmp_path_factory.mktemp("whole"), drift(2), drift(4)
    _, adapters, arrays = all_steps(half)
    states = find_state(save(half, root / "half", adapters, arrays))
    _, adapters, arrays = all_steps(whole)
    after = read_whole(find_state(save(whole, root / "whole", adapters, arrays, 4)))
    return states, {name: (one.dtype, one.shape, one.content.tobytes()) for name, one in after.items()}


def test_the_reference_begins_with_the_state(tmp_path, in_one_go):
    """Its losses are those of the ranks that go on; what layers give depends on the buffers.

    The processes of a run are this one here: the one that tries the layers, and the reference.
    """
    from pipeproof.exec.compare.reference_process import run_reference
    from pipeproof.exec.compare.reference_start import reference_start
    from pipeproof.exec.launch import custom_layers_check as own_check
    from pipeproof.stages.reference.unpartitioned import run_unpartitioned

    states, _ = in_one_go
    target = drift(3, topology={"pp": 4})
    kept = prepare_checkpoint(CheckpointOptions(resume=states.directory), target, graph_digest(target))
    assert (kept.first_step, kept.reference_from_state) == (2, True)
    certificate = certificate_of(target, graph_digest(target), Verdict.PROVED)
    job = Job(tmp_path, dump_plan(plan_from_dict(drift_dict(3, {"pp": 4}))), certificate, RunOptions(checkpoint=kept))
    job.save()
    assert own_check.main([str(tmp_path)]) == 0
    assert sorted(json.loads(job.custom_layers_file.read_text())) == ["weights"]
    outcomes, _, _ = all_steps(target, 2, states)
    (loss,) = (one.loss for one in outcomes[2] if one.loss is not None)
    steps = []
    run_reference(job, steps.append)
    assert (steps, StepOutcome.load(job.step_file("unpartitioned", 2)).loss) == ([2], loss)
    start = reference_start(kept, target.plan.spec)
    forgotten = {name: array for name, array in start.weights.items() if not name.endswith("mean")}
    (other,) = run_unpartitioned(target.plan.spec, start=replace(start, weights=forgotten))
    assert other.loss != loss


def drift_dict(steps, topology):
    run = {"optimizer": "adamw", "steps": steps}
    return own_dict("drift.py", 4, layers_of("drift.py"), topology=topology, run=run)


def test_buffers_that_a_state_of_weights_alone_has_not_stay_as_built(tmp_path):
    """The variance of a batch norm begins with 1; ranks and the reference begin alike."""
    from pipeproof.exec.compare.reference_start import reference_start
    from pipeproof.stages.reference.unpartitioned import run_unpartitioned

    bare = [{key: value for key, value in layer.items() if key != "buffers"} for layer in layers_of("drift.py")]
    source = write_state(made(bare, "drift.py"), tmp_path / "source")
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(own_dict("drift.py", 4, bare, run={"optimizer": "adamw", "steps": 4})))
    assert invoke("state", "reshard", source, "--to", file, "--weights-only", "-o", tmp_path / "bare").exit_code == 0
    state, at = find_state(tmp_path / "bare"), drift(1)
    require_resumable(state, at.plan, graph_digest(at))
    outcomes, adapters, _ = all_steps(at, 0, state)
    (reference,) = run_unpartitioned(
        at.plan.spec, start=reference_start(CheckpointOptions(resume=state.directory), at.plan.spec)
    )
    assert [one.loss for one in outcomes[0] if one.loss is not None] == [reference.loss]
    assert adapters[0].state()["batchnorm1d.2._variance", ""].min() > 0.5


@pytest.mark.parametrize(("function", "words"), [
    ("two_places", "layer `intwoplaces.1` has another `intwoplaces.1.other.mean` in micro-batch 1 of step 0"),
    ("made_late", "layer `madelate.1` has another `madelate.1.mean`"),
    ("counts", "layer `counts.1` has another output in micro-batch 1"),
    ("draws", "layer `draws.1` has another output"),
    ("built_otherwise", "1 of 7 weights and buffers differ, the first `builtotherwise.1.scale`"),
])  # fmt: skip
def test_layers_that_keep_what_no_state_would_have_are_refused_before_a_rank_starts(function, words):
    from pipeproof.exec.launch.custom_layers_check import try_layers

    build = f"{FILES}/keeps.py:{function}"
    with pytest.raises(BadPlanAtError) as caught:
        try_layers(made(described(build, 4), build).plan.spec, saves_state=True)
    assert words in caught.value.findings[0].message
    assert caught.value.findings[0].help


@pytest.mark.parametrize("function", ["caches", "types"])
def test_caches_and_declared_buffers_are_no_such_thing(function):
    from pipeproof.exec.launch.custom_layers_check import try_layers

    build = f"{FILES}/keeps.py:{function}"
    layers = described(build, 4)
    assert ("buffers" in layers[1]) == (function == "types")
    try_layers(made(layers, build).plan.spec, saves_state=True)


def test_what_a_plan_does_not_declare_is_refused_before_a_rank_starts_and_at_the_save(tmp_path):
    from pipeproof.exec.launch.custom_layers_check import try_layers

    layers = [{**one, "buffers": []} if one["name"] == "drift.4" else one for one in layers_of("drift.py")]
    at = made(layers, "drift.py", 1, topology={"pp": 1})
    try_layers(at.plan.spec)
    with pytest.raises(BadPlanAtError, match=r"training changes `drift.4.count` \(int64\)") as caught:
        try_layers(at.plan.spec, saves_state=True)
    assert "add `{name: count, shape: [], dtype: int64}` to its `buffers`" in caught.value.findings[0].help
    assert (caught.value.findings[0].code, caught.value.path) == ("PP912", ("model", "layers", 4))
    _, (adapter,), _ = all_steps(at)
    with pytest.raises(BadPlanAtError, match=r"training changes `drift.4.count` \(int64\)"):
        adapter.state()


@pytest.mark.parametrize(("about", "words"), [
    ({"kind": "Shift"}, "layer `drift.4` is a Drift, and Shift is declared"),
    ({"buffers": [{"name": "sum", "shape": [6]}]}, "layer `drift.4` has no buffer `drift.4.sum`"),
    ({"buffers": [{"name": "mean", "shape": [5]}]}, "`drift.4.mean` is float32 [6], and float32 [5] is declared"),
])  # fmt: skip
def test_layers_are_held_to_what_is_declared_of_their_state(about, words):
    from pipeproof.exec.launch.custom_layers_check import try_layers

    layers = [{**one, **about} if one["name"] == "drift.4" else one for one in layers_of("drift.py")]
    with pytest.raises(BadPlanAtError) as caught:
        try_layers(made(layers, "drift.py").plan.spec)
    assert words in caught.value.findings[0].message
