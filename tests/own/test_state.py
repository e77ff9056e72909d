"""The state of own layers: it comes back bit for bit, on any topology that can take it, and else is refused by name."""

import functools
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.exec.kept import KeptState, go_on, prepared
from pipeproof.specs.finding import BadPlanAtError, PipeproofError
from pipeproof.specs.load import PlanFileError, load_plan, plan_from_dict
from pipeproof.state.checkpoint import open_checkpoint
from pipeproof.state.fits import require_fits
from pipeproof.state.layout import pieces_of
from pipeproof.state.load import find_state, read_whole
from pipeproof.state.parts import read_part
from pipeproof.state.reshard.places import places
from pipeproof.state.reshard.sides import side_of_plan
from pipeproof.verify.certificate import plan_digest
from pipeproof.verify.subject import make_subject
from tests.cli.commands import invoke
from tests.exec.processes import Run
from tests.own.plans import described, own_dict
from tests.state.runs import save, shown
from tests.state.tiny import cut, values, write_state

SHARDED = {"shard_optimizer": "dp"}
TWO = {"num_micro_batches": 2}
CHUNKS = {"kind": "interleaved", "num_chunks": 2}
LAYERS = [
    {"name": "stem", "kind": "Stem", "out": [{"shape": ["b", 4]}], "parameters": [{"name": "weight", "shape": [3, 4]}]},
    {"name": "act", "kind": "relu", "out": [{"shape": ["b", 4]}]},
    {"name": "norm.2", "kind": "Norm", "out": [{"shape": ["b", 4]}],
     "parameters": [{"name": "scale", "shape": [5]}, {"name": "shift", "shape": [7, 3]}],
     "buffers": [{"name": "mean", "shape": [4]}, {"name": "count", "shape": [], "dtype": "int64"}]},
    {"name": "optimizer", "kind": "Inner", "out": [{"shape": ["b", 4]}],
     "parameters": [{"name": "moment1", "shape": [2, 2]}]},
    {"name": "head", "kind": "Head", "parameters": [{"name": "bias", "shape": [3]}], "borrows": ["stem.weight"]},
]  # fmt: skip


def made(layers, build="nowhere.py:build", steps=4, **sections):
    sections["run"] = {"optimizer": "adamw", "steps": steps, **sections.get("run", {})}
    return make_subject(plan_from_dict(own_dict(build, 4, layers, **sections)))


@functools.cache
def layers_of(build):
    return described(build, 4)


def drift(steps=4, **sections):
    return made(layers_of("drift.py"), "drift.py", steps, **sections)


def changed(index, **about):
    return [{**layer, **about} if number == index else layer for number, layer in enumerate(LAYERS)]


CUTS = st.fixed_dictionaries(
    {
        "topology": st.builds(lambda pp, dp: {"pp": pp, "dp": dp}, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2])),
        "kind": st.sampled_from(["1f1b", "gpipe", "zb_v", "dualpipe_v"]),
        "memory": st.sampled_from([{}, SHARDED]),
    }
)


@settings(deadline=None, max_examples=15)
@given(one=CUTS, other=CUTS, has_buffers=st.booleans())
def test_ranks_of_any_topology_read_what_they_hold_of_a_state_of_any_other(tmp_path_factory, one, other, has_buffers):
    source, target = (at_cut(sections, has_buffers=has_buffers) for sections in (one, other))
    if source is None or target is None:
        return
    state = find_state(write_state(source, tmp_path_factory.mktemp("state")))
    if has_buffers and one["topology"]["dp"] != other["topology"]["dp"]:
        with pytest.raises(PipeproofError, match=r"has a `norm.2.mean` of its own \(and 1 more buffers\)"):
            require_fits(state, target.plan, plan_digest(target))
        return
    require_fits(state, target.plan, plan_digest(target))
    whole = values(source.plan, 1)
    for rank in range(target.plan.mesh.num_ranks):
        read = read_part(state, target.plan, rank)
        for piece in pieces_of(target.plan, rank):
            got = read[piece.weight, piece.slot]
            assert (got.dtype, got.shape) == (piece.tensor.dtype, piece.shape)
            assert got.content.tobytes() == cut(piece.shard, whole).tobytes(), piece.shard
    assert {name: array.content.tobytes() for name, array in read_whole(state).items()} == {
        name: array.tobytes() for name, array in whole.items()
    }


def at_cut(sections, *, has_buffers):
    """The plan of a cut, None where its schedule cannot have these stages."""
    layers = LAYERS if has_buffers else [{k: v for k, v in one.items() if k != "buffers"} for one in LAYERS]
    schedule = {"kind": sections["kind"], "num_micro_batches": 8 // sections["topology"]["dp"]}
    schedule |= {"num_chunks": 2} if sections["kind"] in {"zb_v", "dualpipe_v"} else {}
    try:
        return made(layers, topology=sections["topology"], schedule=schedule, memory=sections["memory"])
    except PipeproofError:
        return None


def refusal(tmp_path, layers, source=None, **sections):
    """Why a plan does not go on from a state of ``LAYERS``."""
    write_state(source or made(LAYERS), tmp_path)
    with pytest.raises(PipeproofError) as caught:
        prepared(KeptState(resume=tmp_path), at := made(layers, **sections), plan_digest(at))
    finding = caught.value.findings[0]
    return f"{finding.code} {finding.message}; {finding.help}"


@pytest.mark.parametrize(("layers", "words"), [
    (changed(0, parameters=[{"name": "weight", "shape": [4, 3]}]),
     "model.layers.stem.parameters.weight was [3, 4] and is [4, 3]"),
    (changed(3, kind="Outer"), 'model.layers.optimizer.kind was "Inner" and is "Outer"'),
    (changed(3, name="inner"), 'model.layers.3 was "optimizer" and is "inner"'),
    ([LAYERS[0], LAYERS[2], LAYERS[1], *LAYERS[3:]], 'model.layers.1 was "act" and is "norm.2"'),
    (changed(4, borrows=[]), 'model.layers.head.borrows was ["stem.weight"] and is []'),
    (changed(2, buffers=[LAYERS[2]["buffers"][0]]), "model.layers.norm.2.buffers.count.dtype"),
])  # fmt: skip
def test_other_layers_are_refused_by_name_before_anything_is_loaded(tmp_path, layers, words):
    found = refusal(tmp_path, layers)
    assert found.startswith("PP920 the state was saved by a run of another plan: ")
    assert words in found


def test_what_replicas_changed_is_for_as_many_replicas(tmp_path):
    found = refusal(tmp_path, LAYERS, topology={"pp": 1, "dp": 2}, schedule=TWO)
    assert "PP920 each data-parallel replica has a `norm.2.mean` of its own" in found
    assert "the state was saved with topology.dp 1, and the plan has 2; give topology.dp 1" in found


def test_of_copies_of_a_stage_there_is_no_one_state(tmp_path):
    at = made(LAYERS, schedule={"kind": "dualpipe"})
    with pytest.raises(PipeproofError) as caught:
        prepared(KeptState(root=tmp_path / "states"), at, plan_digest(at))
    finding = caught.value.findings[0]
    assert (finding.code, finding.location is None) == ("PP909", True)  # the plan is of no file
    assert "dualpipe has copies of the stage of `norm.2.mean`" in finding.message
    plans = [plan_file(tmp_path / f"{kind}.json", schedule={"kind": kind}) for kind in ("1f1b", "dualpipe")]
    ended = invoke("reshard", *plans, "--check")
    assert ended.exit_code == 2
    assert "error[PP924]: dualpipe has copies" in ended.output


def test_the_proof_sees_replicas_that_are_exchanged():
    side = side_of_plan(made(LAYERS, topology={"pp": 2, "dp": 2}).plan, "B")
    assert list(places(side)) == []
    one, other = side.parts["norm.2.mean"]
    parts = {**side.parts, "norm.2.mean": (replace(one, shard=other.shard), replace(other, shard=one.shard))}
    (finding,) = places(replace(side, parts=parts))
    assert finding.code == "PP211"
    assert "rank 0 of B computes with `norm.2.mean` rows 0..0, and its part is said to be rows 1..1" in finding.message


def test_what_a_plan_does_not_say_of_layers_is_not_compared(tmp_path):
    bare = [{key: value for key, value in layer.items() if key != "kind"} for layer in LAYERS]
    write_state(made(bare), tmp_path)
    for layers in (bare, LAYERS):
        at = made(layers, build="/moved/there.py:build", topology={"pp": 4})
        require_fits(find_state(tmp_path), at.plan, plan_digest(at))


def test_a_buffer_and_a_weight_have_two_names():
    with pytest.raises(PlanFileError, match=r"the buffer `stem\.weight` is declared twice"):
        made(changed(0, buffers=[{"name": "weight", "shape": [1]}]))


# With Paddle.


@pytest.mark.needs_paddle
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


@pytest.mark.needs_paddle
def test_a_layer_that_is_listed_twice_has_buffers_for_each_place(tmp_path):
    """Whether both places are on one rank must not matter."""
    from pipeproof.stages.own.model import OwnModel

    (tmp_path / "twice.py").write_text(TWICE)
    layers = described(f"{tmp_path}/twice.py:build", 2)
    assert [[buffer["name"] for buffer in layer.get("buffers", [])] for layer in layers[1::2]] == [
        ["_mean", "_variance"]
    ] * 2
    model = OwnModel(plan_from_dict(own_dict(f"{tmp_path}/twice.py:build", 2, layers)).spec)
    value = model.run(model.layers[0], model.inputs(0, 0), step=0, index=0)
    first, second = (layer.untrained() for layer in model.layers[1::2])
    model.run(model.layers[1], value, step=0, index=0)
    assert first["batchnorm1d.1._mean"].abs().sum() > 0
    assert second["batchnorm1d.3._mean"].abs().sum() == 0


def all_steps(at, first_step=0, state=None):
    """Every rank's outcomes and adapters, from a state on where it is given; and the framework's arrays."""
    from pipeproof.exec.frameworks import start_framework
    from tests.exec.in_memory import run_all

    def prepare(adapter, arrays, rank):
        go_on(adapter, arrays, at.plan, rank, state.directory)

    arrays = start_framework(at.plan.spec.run).arrays
    return (*run_all(at.plan, first_step=first_step, prepare=None if state is None else prepare), arrays)


PLANS = {
    "two stages": {},
    "chunks, clipped": {"schedule": CHUNKS, "run": {"clip_norm": 0.5}},
    "replicas, sharded": {"topology": {"pp": 2, "dp": 2}, "schedule": {"kind": "zb_h1", **TWO}, "memory": SHARDED},
}


@pytest.mark.needs_paddle
@pytest.mark.parametrize("sections", PLANS.values(), ids=PLANS)
def test_resumed_training_has_the_bits_of_training_in_one_go(tmp_path, sections):
    whole, half = drift(4, **sections), drift(2, **sections)
    expected, at_end, arrays = all_steps(whole)
    _, adapters, _ = all_steps(half)
    save(half, tmp_path / "half", adapters, arrays)
    state = find_state(tmp_path / "half")
    require_fits(state, whole.plan, plan_digest(whole))
    outcomes, resumed, _ = all_steps(whole, 2, state)
    assert shown(outcomes[2:]) == shown(expected[2:])
    one, two = (save(whole, tmp_path / name, of, arrays, 4) for name, of in (("one", at_end), ("two", resumed)))
    names = sorted(path.name for path in one.iterdir())
    assert len(names) == whole.plan.mesh.num_ranks + 1
    assert [(one / name).read_bytes() for name in names] == [(two / name).read_bytes() for name in names]
    replicas = whole.plan.mesh.size("dp")
    means = read_whole(find_state(two))["drift.1.mean"].content.view("float32").reshape(replicas, -1)
    assert len({row.tobytes() for row in means}) == replicas


OTHERS = {
    "four stages": {"topology": {"pp": 4}},
    "chunks": {"schedule": CHUNKS},
    "one stage": {"topology": {"pp": 1}},
}


@pytest.mark.needs_paddle
@pytest.mark.parametrize("sections", OTHERS.values(), ids=OTHERS)
def test_on_other_stages_training_goes_on_bit_for_bit(tmp_path, sections, in_one_go):
    states, after = in_one_go
    target = drift(4, **sections)
    require_fits(states, target.plan, plan_digest(target))
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


@pytest.mark.needs_paddle
def test_the_reference_begins_with_the_state(tmp_path, in_one_go):
    """Its losses are those of the ranks that go on; what layers give depends on the buffers."""
    from pipeproof.exec.reference_start import start_of
    from pipeproof.stages.reference.uncut import run_uncut

    states, _ = in_one_go
    target = drift(3, topology={"pp": 4})
    start = start_of(KeptState(resume=states.directory), target.plan.spec)
    outcomes, _, _ = all_steps(target, 2, states)
    (reference,) = run_uncut(target.plan.spec, start=start)
    assert (reference.step, [one.loss for one in outcomes[2] if one.loss is not None]) == (2, [reference.loss])
    forgotten = {name: array for name, array in start.weights.items() if not name.endswith("mean")}
    (other,) = run_uncut(target.plan.spec, start=replace(start, weights=forgotten))
    assert other.loss != reference.loss


@pytest.mark.needs_paddle
def test_what_a_plan_does_not_declare_is_refused_before_a_rank_starts_and_at_the_save(tmp_path):
    from pipeproof.exec.own_check import try_layers

    layers = [{**one, "buffers": []} if one["name"] == "drift.4" else one for one in layers_of("drift.py")]
    at = made(layers, "drift.py", 1, topology={"pp": 1})
    try_layers(at.plan.spec)
    with pytest.raises(BadPlanAtError, match=r"training changes `drift.4.count` \(int64\)") as caught:
        try_layers(at.plan.spec, keeps_state=True)
    assert (caught.value.findings[0].code, caught.value.path) == ("PP912", ("model", "layers", 4))
    _, (adapter,), _ = all_steps(at)
    with pytest.raises(BadPlanAtError, match=r"training changes `drift.4.count` \(int64\)"):
        adapter.state()


@pytest.mark.needs_paddle
@pytest.mark.parametrize(("about", "words"), [
    ({"kind": "Shift"}, "layer `drift.4` is a Drift, and Shift is declared"),
    ({"buffers": [{"name": "sum", "shape": [6]}]}, "layer `drift.4` has no buffer `drift.4.sum`"),
    ({"buffers": [{"name": "mean", "shape": [5]}]}, "`drift.4.mean` is float32 [6], and float32 [5] is declared"),
])  # fmt: skip
def test_layers_are_held_to_what_is_declared_of_their_state(about, words):
    from pipeproof.exec.own_check import try_layers

    layers = [{**one, **about} if one["name"] == "drift.4" else one for one in layers_of("drift.py")]
    with pytest.raises(BadPlanAtError) as caught:
        try_layers(made(layers, "drift.py").plan.spec)
    assert words in caught.value.findings[0].message


def plan_file(path, **sections):
    plan = own_dict("nowhere.py:build", 4, LAYERS, run={"optimizer": "adamw", "steps": 9}, **sections)
    path.write_text(json.dumps(plan))
    return path


def test_reshard_there_and_back_leaves_every_byte(tmp_path):
    """Through another topology, and through one file."""
    one = plan_file(tmp_path / "one.json", topology={"pp": 2, "dp": 2}, memory=SHARDED)
    other = plan_file(tmp_path / "other.json", topology={"pp": 4, "dp": 2}, schedule={"kind": "gpipe"})
    source = write_state(make_subject(load_plan(one)), tmp_path / "states", 3)
    moved, back, again, bare = (tmp_path / name for name in ("moved", "back", "again", "bare"))
    file = tmp_path / "model.safetensors"
    for at, *words in (
        (one, other, "--check"),
        (source, "--to", other, "-o", moved),
        (moved, "--to", one, "-o", back),
        (source, "-o", file),
        (file, "--to", one, "-o", again),
        (source, "--to", other, "--weights-only", "-o", bare),
    ):
        ended = invoke("reshard", at, *words)
        assert ended.exit_code == 0, ended.output
    lines = {place: invoke("state", place, "--md5").output for place in (source, moved, back, again, file)}
    assert len(set(lines.values())) == 1
    assert "norm.2.mean" in lines[file]
    for place in (back, again):
        for name in [f"rank{rank}.safetensors" for rank in range(4)]:
            assert (place / name).read_bytes() == (source / name).read_bytes()
    at = make_subject(load_plan(other))
    require_fits(find_state(bare), at.plan, plan_digest(at))
    assert {one.kind for one in find_state(bare).index.tensors.values()} == {"weight", "buffer"}
    entries = open_checkpoint(file).tensors
    assert {entries[name].shape for name in ("norm.2.count", "stem.weight")} == {(2,), (3, 4)}
    assert "buffer   float32        1         8     32" in invoke("state", file).output


@pytest.mark.needs_paddle
def test_a_run_goes_on_from_a_state_on_other_stages(tmp_path, in_one_go):
    states, after = in_one_go
    run = {"optimizer": "adamw", "steps": 4}
    plan = own_dict("drift.py", 4, layers_of("drift.py"), topology={"pp": 1}, run=run)
    ended = Run(tmp_path / "run", plan, "--resume", str(states.directory), "--save", str(tmp_path / "states")).end()
    assert ended.status == 0, ended.output
    assert "went on from the state after step 1; the reference, too" in ended.output
    assert [step["bitwise"] for step in ended.report["steps"]] == [True, True]
    found = read_whole(find_state(tmp_path / "states"))
    assert {name: (one.dtype, one.shape, one.content.tobytes()) for name, one in found.items()} == after
