"""``pipeproof state reshard --names``: weights out to the open format and in again, for any topology."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeproof.state.names.convention_maps import map_from_own_names, statements_between
from pipeproof.state.names.convention_tables import CONVENTIONS
from pipeproof.state.state_index import provenance_file
from tests.state.names.apply_map import apply_map
from tests.state.names.models import ERNIE, MODELS, ONE_CLASS, PHI3
from tests.state.reshard.plans import files_of, reshard, state_of, subject_of, write_plan

SIZES = {"num_layers": 4, "hidden_size": 8, "num_heads": 4, "ffn_size": 16, "vocab_size": 16}
LARGE = SIZES | MODELS["experts with biases"] | {"num_kv_heads": 2, "tied_embedding": True}
LARGE["moe"] = LARGE["moe"] | {"ffn_size": 6}
LATENT = SIZES | MODELS["latent with modules"]
LATENT["moe"] = LATENT["moe"] | {"ffn_size": 6}
ERNIE_MOE = ONE_CLASS["ERNIE 4.5 with experts"][0]["moe"]
OF_ONE_CLASS = {
    PHI3: SIZES | {"num_kv_heads": 2},
    ERNIE: SIZES | {"num_kv_heads": 2, "moe": ERNIE_MOE | {"ffn_size": 6}},
}


@pytest.mark.parametrize(
    ("convention", "model"),
    [*((convention, OF_ONE_CLASS.get(convention, LARGE)) for convention in CONVENTIONS), ("huggingface", LATENT)],
)
def test_weights_go_out_by_their_names_there_and_come_in_for_another_topology(tmp_path, convention, model):
    a, b = write_plan(tmp_path / "a.yaml", "ep2_tp2", model), write_plan(tmp_path / "b.yaml", "ep2_pp2", model)
    source, out = state_of(a, tmp_path / "of_a"), tmp_path / "model.safetensors"
    said = reshard(source, "-o", out, "--names", convention)
    assert "proved: " in said
    reshard(source, "--weights-only", "-o", tmp_path / "own.safetensors")
    ours = load_file(tmp_path / "own.safetensors")
    spec = subject_of(a).plan.spec
    expected = apply_map(map_from_own_names(convention, spec.model, spec.run.dtype), ours)
    theirs = load_file(out)
    assert theirs.keys() == expected.keys()
    assert all(np.array_equal(theirs[name], array) for name, array in expected.items())
    reshard(out, "--to", b, "--names", convention, "-o", tmp_path / "in")
    reshard(source, "--weights-only", "--to", b, "-o", tmp_path / "direct")
    assert files_of(tmp_path / "in") == files_of(tmp_path / "direct")


def test_a_directory_as_hugging_face_has_it_has_the_configuration_and_comes_in_again(tmp_path):
    a, out = write_plan(tmp_path / "a.yaml", "tp2", LARGE), tmp_path / "model"
    source = state_of(a, tmp_path / "of_a")
    reshard(source, "-o", out, "--names", "huggingface")
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json", "model.safetensors", "model.safetensors.provenance.json",
    ]  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert (config["architectures"], config["num_nextn_predict_layers"]) == (["Glm4MoeForCausalLM"], 1)
    reshard(out, "--to", a, "--names", "huggingface", "-o", tmp_path / "in")
    reshard(source, "--weights-only", "--to", a, "-o", tmp_path / "direct")
    assert files_of(tmp_path / "in") == files_of(tmp_path / "direct")
    assert "OUT that ends with" in reshard(source, "-o", tmp_path / "other", "--names", "megatron", status=2)


def test_padding_of_the_vocabulary_is_dropped_and_comes_in_as_zeros(tmp_path):
    a = write_plan(tmp_path / "a.yaml", "tp2", SIZES | {"unpadded_vocab_size": 13})
    source = state_of(a, tmp_path / "of_a")
    reshard(source, "-o", tmp_path / "theirs.safetensors", "--names", "huggingface")
    reshard(tmp_path / "theirs.safetensors", "--to", a, "--names", "huggingface", "-o", tmp_path / "in")
    for state, out in ((source, "before"), (tmp_path / "in", "after")):
        reshard(state, "--weights-only", "-o", tmp_path / f"{out}.safetensors")
    before, after = (load_file(tmp_path / f"{out}.safetensors") for out in ("before", "after"))
    assert before["embed.weight"][13:].any()
    before["embed.weight"][13:] = 0
    before["head.weight"][:, 13:] = 0
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], array) for name, array in after.items())


def written(tmp_path, model=LARGE):
    a, out = write_plan(tmp_path / "a.yaml", "one", model), tmp_path / "model.safetensors"
    reshard(state_of(a, tmp_path / "of_a"), "-o", out, "--names", "huggingface")
    provenance_file(out).unlink()  # the file is changed below
    return a, out, load_file(out)


def test_copies_that_differ_end_it_before_anything_is_written(tmp_path):
    a, out, theirs = written(tmp_path)
    save_file(theirs | {"lm_head.weight": theirs["model.embed_tokens.weight"] + 1}, out)
    said = reshard(out, "--to", a, "--names", "huggingface", "-o", tmp_path / "in", status=2)
    assert "PP929" in said
    assert "first in elements 0 to 128, from row 0, column 0, on" in said.replace("\n", " ")
    assert not (tmp_path / "in").exists()


def test_names_that_are_missing_or_unexpected_are_found_by_the_proof(tmp_path):
    a, out, theirs = written(tmp_path)
    gone = "model.layers.2.mlp.experts.10.up_proj.weight"
    save_file({name: array for name, array in theirs.items() if name != gone} | {"bias": np.ones(3)}, out)
    said = reshard(out, "--to", a, "--names", "huggingface", "-o", tmp_path / "in", status=1)
    assert gone in said.replace("\n", "").replace(" ", "")
    assert "`bias`" in said
    assert not (tmp_path / "in").exists()


@pytest.mark.parametrize("one", ["huggingface", "megatron"])
def test_statements_between_two_conventions_are_compared_with_them(tmp_path, one):
    model = SIZES | {"num_kv_heads": 2}
    a, file = write_plan(tmp_path / "a.yaml", "tp2", model), tmp_path / "statements.aoa"
    source = state_of(a, tmp_path / "of_a")
    reshard(source, "-o", tmp_path / "theirs.safetensors", "--names", one)
    spec = subject_of(a).plan.spec
    file.write_text(statements_between(one, "pipeproof", spec.model))
    reshard(tmp_path / "theirs.safetensors", "--to", a, "--aoa", file, "--names", one, "-o", tmp_path / "in")
    reshard(source, "--weights-only", "--to", a, "-o", tmp_path / "direct")
    assert files_of(tmp_path / "in") == files_of(tmp_path / "direct")


WRONG = {
    "the fused weight has all queries, then all keys, then all values": (
        ", fused_qkv, num_heads=4, num_key_value_groups=2",
        ", axis=1",
        "layer.0.attn.qkv.weight columns",
    ),
    "gate and up are exchanged": (
        "mlp.gate_proj.weight^T -> layer",
        "mlp.up_proj.weight^T -> layer",
        ".mlp.gate.weight",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_statements_that_take_one_thing_for_another_are_named(tmp_path, mistake):
    right, wrong, named = WRONG[mistake]
    a, file = write_plan(tmp_path / "a.yaml", "tp2", SIZES | {"num_kv_heads": 2}), tmp_path / "mine.aoa"
    source = state_of(a, tmp_path / "of_a")
    reshard(source, "-o", tmp_path / "theirs.safetensors", "--names", "huggingface")
    text = statements_between("huggingface", "pipeproof", subject_of(a).plan.spec.model)
    assert right in text
    text = text.replace(right, wrong)
    if "up_proj" in wrong:
        text = text.replace(f"{wrong}.$LAYER_ID.mlp.up.weight", f"{right}.$LAYER_ID.mlp.up.weight")
    file.write_text(text)
    words = [tmp_path / "theirs.safetensors", "--to", a, "--aoa", file, "--names", "huggingface"]
    said = reshard(*words, "-o", tmp_path / "in", status=1)
    assert named in said.replace("\n", " ")
    assert not (tmp_path / "in").exists()
