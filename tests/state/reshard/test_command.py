"""``pipeproof state reshard`` on small states: its files have the bytes that a run of the other plan saves."""

import json

import pytest
from safetensors.numpy import load_file, save_file

from pipeproof.state.read_state import find_state, read_whole
from pipeproof.state.resume_check import require_resumable
from pipeproof.verify.certificate import graph_digest
from tests.state.reshard.plans import DENSE, TOPOLOGIES, files_of, reshard, state_of, subject_of, write_plan
from tests.state.reshard.test_names import whole
from tests.state.tiny import files_below

PAIRS = [*zip(TOPOLOGIES, [*TOPOLOGIES][1:], strict=False), ("ep2_pp2", "one"), ("sd4", "ep2_tp2"), ("vpp", "pp2_sd2")]


@pytest.mark.slow(only=["dp2-sd4", "sd4-tp2", "vpp-pp2_sd2_0"])
@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_a_state_cut_again_is_the_one_that_the_other_plan_saves(tmp_path, one, other):
    a, b = write_plan(tmp_path / "a.yaml", one), write_plan(tmp_path / "b.yaml", other)
    source, expected = state_of(a, tmp_path / "of_a"), state_of(b, tmp_path / "of_b")
    before = files_below(source)
    said = reshard(tmp_path / "of_a", "--to", b, "-o", tmp_path / "made")
    assert files_of(tmp_path / "made") == files_of(expected)
    assert files_below(source) == before
    assert "proved: " in said
    assert f"pipeproof run {b} --resume {tmp_path / 'made'}" in said
    assert not [*tmp_path.glob(".*")]
    made, saved = (json.loads((place / "index.json").read_text()) for place in (tmp_path / "made", expected))
    for key in ("steps_done", "digest", "mesh", "values", "tensors", "files", "framework"):
        assert made[key] == saved[key], key
    assert made["from_beginning"] is False


def test_a_state_becomes_one_file_and_the_file_a_state_again(tmp_path):
    a, b = write_plan(tmp_path / "a.yaml", "pp2_sd2"), write_plan(tmp_path / "b.yaml", "ep2_tp2")
    source, expected = state_of(a, tmp_path / "of_a"), state_of(b, tmp_path / "of_b")
    one, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    reshard(source, "-o", one)
    reshard(expected, "-o", other)
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys() == json.loads((source / "index.json").read_text())["tensors"].keys()
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)
    reshard(one, b, "-o", tmp_path / "made", "--jobs", 1)
    assert files_of(tmp_path / "made") == files_of(expected)
    assert json.loads((tmp_path / "made" / "index.json").read_text())["steps_done"] == 3


def test_weights_alone_are_a_state_at_step_0_from_whatever_they_come(tmp_path):
    a, b = write_plan(tmp_path / "a.yaml", "sd4"), write_plan(tmp_path / "b.yaml", "tp2_pp2", learning_rate=0.5)
    source = state_of(a, tmp_path / "of_a")
    reshard(source, "--to", b, "--weights-only", "-o", tmp_path / "direct")
    weights = {name: array for name, array in whole(source).items() if not name.startswith("optimizer/")}
    save_file(weights, tmp_path / "bare.safetensors")
    said = reshard(tmp_path / "bare.safetensors", "--to", b, "-o", tmp_path / "of_bare")
    assert "has no step number: only its weights are used" in said
    reshard(source, "--weights-only", "-o", tmp_path / "w.safetensors")
    reshard(tmp_path / "w.safetensors", "--to", b, "-o", tmp_path / "of_file")
    for name in ("direct", "of_bare", "of_file"):
        made = find_state(tmp_path / name)
        assert (made.index.steps_done, made.index.is_weights_only, made.index.from_beginning) == (0, True, False)
        require_resumable(made, subject_of(b).plan, graph_digest(subject_of(b)))
        found = {name: array.content.tobytes() for name, array in read_whole(made).items()}
        assert found == {name: array.tobytes() for name, array in weights.items()}


def test_a_directory_as_hugging_face_has_it_is_read(tmp_path):
    plan = write_plan(tmp_path / "a.yaml", "tp2", DENSE)
    source = state_of(plan, tmp_path / "of_a")
    weights = {name: array for name, array in whole(source).items() if not name.startswith("optimizer/")}
    names, folder = sorted(weights), tmp_path / "model"
    folder.mkdir()
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, of_one in files.items():
        save_file({name: weights[name] for name in of_one}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, of_one in files.items() for name in of_one}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    reshard(folder, "--to", plan, "-o", tmp_path / "made")
    found = {name: array.content.tobytes() for name, array in read_whole(find_state(tmp_path / "made")).items()}
    assert found == {name: array.tobytes() for name, array in weights.items()}


def test_the_proof_alone_writes_nothing(tmp_path):
    a, b = write_plan(tmp_path / "a.yaml", "tp2"), write_plan(tmp_path / "b.yaml", "ep2_pp2")
    assert "proved: " in reshard(a, b, "--check")
    source = state_of(a, tmp_path / "of_a")
    before = sorted(tmp_path.rglob("*"))
    content = json.loads(reshard(source, b, "--check", "--format", "json"))
    assert content["proved"] is True
    assert content["num_tensors"] == len(json.loads((source / "index.json").read_text())["tensors"])
    assert sorted(tmp_path.rglob("*")) == before


def test_a_model_of_other_layers_is_refused_before_anything_is_written(tmp_path):
    a = write_plan(tmp_path / "a.yaml", "tp2", DENSE)
    b = write_plan(tmp_path / "b.yaml", "one", {**DENSE, "num_layers": 5})
    source = state_of(a, tmp_path / "of_a")
    assert "model.num_layers was 4 and is 5" in reshard(source, b, "-o", tmp_path / "made", status=2)
    assert "PP213" in reshard(a, b, "--check", status=1)
    bare = tmp_path / "bare.safetensors"
    save_file({name: array for name, array in whole(source).items() if not name.startswith("optimizer/")}, bare)
    said = reshard(bare, b, "-o", tmp_path / "made", status=1)
    assert "nothing was written" in said
    assert not (tmp_path / "made").exists()
    assert not [*tmp_path.glob(".*")]


def test_padding_of_the_vocabulary_is_removed_and_added(tmp_path):
    padded = {**DENSE, "unpadded_vocab_size": 14}
    a = write_plan(tmp_path / "a.yaml", "tp2", padded)
    b = write_plan(tmp_path / "b.yaml", "one", {**padded, "vocab_size": 18})
    source = state_of(a, tmp_path / "of_a")
    reshard(source, b, "-o", tmp_path / "made")
    was, made = whole(source), whole(tmp_path / "made")
    for name in ("embed.weight", "optimizer/moment1/embed.weight"):
        assert made[name].shape == (18, 8)
        assert (made[name][:14] == was[name][:14]).all()
        assert not made[name][14:].any()
    require_resumable(find_state(tmp_path / "made"), subject_of(b).plan, graph_digest(subject_of(b)))
