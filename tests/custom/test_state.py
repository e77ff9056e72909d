"""The state of custom layers fits any supported topology; other topologies are refused by name."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.rank.checkpointing import prepare_checkpoint
from pipeproof.exec.rank.job_files import CheckpointOptions
from pipeproof.specs.load_plan import load_plan, plan_from_dict
from pipeproof.state.read_state import find_state, read_rank_state, read_whole
from pipeproof.state.resume_check import require_resumable
from pipeproof.state.state_layout import shards_of_rank
from pipeproof.verify.certificate import graph_digest
from pipeproof.verify.subject import make_subject
from tests.cli.commands import invoke
from tests.state.tiny import cut, values, write_state

SHARDED = {"shard_optimizer": "dp"}
LAYERS = [
    {"name": "stem", "kind": "Stem", "out": [{"shape": ["b", 4]}], "parameters": [{"name": "weight", "shape": [3, 4]}]},
    {"name": "act", "kind": "relu", "out": [{"shape": ["b", 4]}]},
    {"name": "norm.2", "kind": "Norm", "out": [{"shape": ["b", 4]}],
     "parameters": [{"name": "scale", "shape": [5]}, {"name": "shift", "shape": [7, 3]}]},
    {"name": "optimizer", "kind": "Inner", "out": [{"shape": ["b", 4]}],
     "parameters": [{"name": "moment1", "shape": [2, 2]}]},
    {"name": "head", "kind": "Head", "parameters": [{"name": "bias", "shape": [3]}], "borrows": ["stem.weight"]},
]  # fmt: skip


def own_dict(layers, **sections):
    plan = {
        "pipeproof": 1,
        "model": {"kind": "layers", "layers": list(layers)},
        "topology": {"pp": 2},
        "schedule": {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 4},
        "loss": {"normalization": "mean_of_micro_batches"},
        "run": {"optimizer": "adamw", "steps": 9},
    }
    return plan | {name: {**plan.get(name, {}), **value} for name, value in sections.items()}


def made(layers, **sections):
    return make_subject(plan_from_dict(own_dict(layers, **sections)))


def changed(index, **about):
    return [{**layer, **about} if number == index else layer for number, layer in enumerate(LAYERS)]


CUTS = st.fixed_dictionaries(
    {
        "topology": st.builds(lambda pp, dp: {"pp": pp, "dp": dp}, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2])),
        "kind": st.sampled_from(["1f1b", "gpipe", "zb_v", "dualpipe_v"]),
        "memory": st.sampled_from([{}, SHARDED]),
    }
)


@settings(deadline=None, max_examples=10)
@given(one=CUTS, other=CUTS)
def test_ranks_of_any_topology_read_what_they_hold_of_a_state_of_any_other(tmp_path_factory, one, other):
    source, target = (at_cut(sections) for sections in (one, other))
    if source is None or target is None:
        return
    state = find_state(write_state(source, tmp_path_factory.mktemp("state")))
    require_resumable(state, target.plan, graph_digest(target))
    whole = values(source.plan, 1)
    for rank in range(target.plan.mesh.num_ranks):
        read = read_rank_state(state, target.plan, rank)
        for piece in shards_of_rank(target.plan, rank):
            got = read[piece.weight, piece.slot]
            assert (got.dtype, got.shape) == (piece.tensor.dtype, piece.shape)
            assert got.content.tobytes() == cut(piece.shard, whole).tobytes(), piece.shard
    assert {name: array.content.tobytes() for name, array in read_whole(state).items()} == {
        name: array.tobytes() for name, array in whole.items()
    }


def at_cut(sections):
    """The plan of a cut, None where its schedule cannot have these stages."""
    schedule = {"kind": sections["kind"], "num_micro_batches": 8 // sections["topology"]["dp"]}
    schedule |= {"num_chunks": 2} if sections["kind"] in {"zb_v", "dualpipe_v"} else {}
    try:
        return made(LAYERS, topology=sections["topology"], schedule=schedule, memory=sections["memory"])
    except PipeproofError:
        return None


def refusal(tmp_path, layers, source=None, **sections):
    """The finding when a plan does not resume from a state of ``LAYERS``."""
    write_state(source or made(LAYERS), tmp_path)
    with pytest.raises(PipeproofError) as caught:
        prepare_checkpoint(CheckpointOptions(resume=tmp_path), at := made(layers, **sections), graph_digest(at))
    finding = caught.value.findings[0]
    return f"{finding.code} {finding.message}; {finding.help}"


@pytest.mark.parametrize(("layers", "words"), [
    (changed(0, parameters=[{"name": "weight", "shape": [4, 3]}]),
     "model.layers.stem.parameters.weight was [3, 4] and is [4, 3]"),
    (changed(3, kind="Outer"), 'model.layers.optimizer.kind was "Inner" and is "Outer"'),
    (changed(3, name="inner"), 'model.layers.3 was "optimizer" and is "inner"'),
    ([LAYERS[0], LAYERS[2], LAYERS[1], *LAYERS[3:]], 'model.layers.1 was "act" and is "norm.2"'),
    (changed(4, borrows=[]), 'model.layers.head.borrows was ["stem.weight"] and is []'),
])  # fmt: skip
def test_other_layers_are_refused_by_name_before_anything_is_loaded(tmp_path, layers, words):
    found = refusal(tmp_path, layers)
    assert found.startswith("PP920 the state was saved by a run of another plan: ")
    assert words in found


def test_what_a_plan_does_not_say_of_layers_is_not_compared(tmp_path):
    bare = [{key: value for key, value in layer.items() if key != "kind"} for layer in LAYERS]
    write_state(made(bare), tmp_path)
    for layers in (bare, LAYERS):
        at = made(layers, topology={"pp": 4})
        require_resumable(find_state(tmp_path), at.plan, graph_digest(at))


def plan_file(path, **sections):
    path.write_text(json.dumps(own_dict(LAYERS, **sections)))
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
        ended = invoke("state", "reshard", at, *words)
        assert ended.exit_code == 0, ended.output
    lines = {place: invoke("state", "show", place, "--md5").output for place in (source, moved, back, again, file)}
    assert len(set(lines.values())) == 1
    assert "norm.2.scale" in lines[file]
    for place in (back, again):
        for name in [f"rank{rank}.safetensors" for rank in range(4)]:
            assert (place / name).read_bytes() == (source / name).read_bytes()
    at = make_subject(load_plan(other))
    require_resumable(find_state(bare), at.plan, graph_digest(at))
    assert {one.kind for one in find_state(bare).index.tensors.values()} == {"weight"}
