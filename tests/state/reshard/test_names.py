"""Statements and conventions of names behind ``pipeproof state reshard``."""

import numpy as np
from safetensors.numpy import load_file, save_file

from pipeproof.state.read_state import find_state, read_whole
from tests.state.reshard.plans import DENSE, reshard, state_of, write_plan


def whole(state):
    return {
        name: np.frombuffer(array.content.tobytes(), array.dtype).reshape(array.shape)
        for name, array in read_whole(find_state(state)).items()
    }


def test_statements_name_the_tensors_of_one_file(tmp_path):
    plan = write_plan(tmp_path / "a.yaml", "tp2_pp2", DENSE)
    source = state_of(plan, tmp_path / "of_a")
    weights = whole(source)
    statements = tmp_path / "names.aoa"
    statements.write_text("embed.weight^T -> table\nlayer.$LAYER_ID.mlp_norm.weight -> first.$LAYER_ID.norm\n")
    out = tmp_path / "out.safetensors"
    said = reshard(source, "--aoa", statements, "--weights-only", "-o", out)
    assert "proved: " in said
    made = load_file(out)
    assert (made["table"] == weights["embed.weight"].T).all()
    assert (made["first.3.norm"] == weights["layer.3.mlp_norm.weight"]).all()
    assert (made["head.weight"] == weights["head.weight"]).all()
    assert not [name for name in made if name.startswith("optimizer/") or name == "embed.weight"]


def test_statements_make_a_plans_weights_of_other_names(tmp_path):
    plan = write_plan(tmp_path / "a.yaml", "tp2", DENSE)
    weights = {name: one for name, one in whole(state_of(plan, tmp_path / "of_a")).items() if "/" not in name}
    theirs = {name.replace("layer.", "blocks."): one for name, one in weights.items()}
    save_file(theirs, tmp_path / "theirs.safetensors")
    statements = tmp_path / "names.aoa"
    kinds = sorted({name.split(".", 2)[2] for name in weights if name.startswith("layer.")})
    statements.write_text("".join(f"blocks.$LAYER_ID.{kind} -> layer.$LAYER_ID.{kind}\n" for kind in kinds))
    reshard(tmp_path / "theirs.safetensors", plan, "--aoa", statements, "-o", tmp_path / "made")
    made = whole(tmp_path / "made")
    assert made.keys() == weights.keys()
    assert all(made[name].tobytes() == weights[name].tobytes() for name in weights)


def test_names_of_hugging_face_go_out_and_come_in(tmp_path):
    a, b = write_plan(tmp_path / "a.yaml", "tp2", DENSE), write_plan(tmp_path / "b.yaml", "vpp", DENSE)
    source = state_of(a, tmp_path / "of_a")
    out = tmp_path / "theirs.safetensors"
    reshard(source, "--names", "huggingface", "-o", out)
    assert "model.embed_tokens.weight" in load_file(out)
    reshard(out, "--to", b, "--names", "huggingface", "-o", tmp_path / "made")
    made, weights = whole(tmp_path / "made"), whole(source)
    assert all(made[name].tobytes() == weights[name].tobytes() for name in made)
    assert made.keys() == {name for name in weights if not name.startswith("optimizer/")}


def test_statements_that_are_no_text_are_refused(tmp_path):
    plan = write_plan(tmp_path / "a.yaml", "tp2", DENSE)
    source = state_of(plan, tmp_path / "of_a")
    (tmp_path / "names.aoa").write_bytes(b"embed.weight -> \xff\n")
    for words in ((source, plan, "-o", tmp_path / "made"), (plan, plan, "--check")):
        said = reshard(*words, "--aoa", tmp_path / "names.aoa", status=2)
        assert "error[PP180]" in said
        assert "is not UTF-8 text" in said


def test_a_bare_file_has_no_model_to_name_tensors_by(tmp_path):
    save_file({"a": np.zeros(2)}, tmp_path / "bare.safetensors")
    said = reshard(tmp_path / "bare.safetensors", "--names", "huggingface", "-o", tmp_path / "x.safetensors", status=2)
    assert "PP924" in said
    assert "does not record its model" in said


def test_statements_are_compared_with_what_names_mean(tmp_path):
    plan = write_plan(tmp_path / "a.yaml", "tp2", DENSE)
    source = state_of(plan, tmp_path / "of_a")
    weights = {name: one for name, one in whole(source).items() if "/" not in name}
    save_file(weights, tmp_path / "theirs.safetensors")
    statements = tmp_path / "turned.aoa"
    statements.write_text("layer.1.attn.out.weight^T -> layer.1.attn.out.weight\n")  # 8 by 8: no shape tells
    words = [tmp_path / "theirs.safetensors", plan, "--aoa", statements, "-o", tmp_path / "made"]
    said = reshard(*words, "--names", "pipeproof", status=1)
    assert "PP211" in said
    assert "and is `layer.1.attn.out.weight` with its dims in another order, on rank 0" in said
    assert not (tmp_path / "made").exists()
    reshard(*words)
