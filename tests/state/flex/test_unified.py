"""PaddleNLP's Unified Checkpoint: written, read back, and compared by MD5 with Paddle's flex checkpoint."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pipeproof.state.checkpoint import tensor_md5s
from pipeproof.state.open_checkpoint import open_checkpoint
from pipeproof.state.state_codes import StateError
from tests.cli.commands import printed
from tests.state.reshard.plans import DENSE, reshard, state_of, write_plan

MOE = {**DENSE, "moe": {"num_experts": 12, "top_k": 2, "ffn_size": 8}}


def write(directory, group, tensors, **more):
    """One file of PaddleNLP's with its index."""
    directory.mkdir(exist_ok=True)
    name = f"{group}-00001-of-00001.safetensors"
    save_file(tensors, directory / name, {"format": "np"})
    index = {"metadata": {"total_size": 0}, "weight_map": dict.fromkeys(tensors, name), **more}
    (directory / f"{group}.safetensors.index.json").write_text(json.dumps(index))


def states(*weights, shape=(2, 3)):
    moments = {f"{name}/{slot}_0": np.full(shape, k, np.float32) for name in weights
               for k, slot in enumerate(("moment1", "moment2"))}  # fmt: skip
    return moments | {
        f"{name}/{beta}_pow_acc_0": np.ones(1, np.float32) for name in weights for beta in ("beta1", "beta2")
    }


def full(directory):
    """A training in 16 bits: weights, their main weights, and states."""
    write(directory, "model", {"a.weight": np.ones((2, 3), np.float16)})
    write(directory, "master_weights", {"a.weight": np.full((2, 3), 1.0001, np.float32)})
    write(directory, "optimizer", states("a.weight"), master_weights=True)
    return directory


def test_it_has_the_tensors_of_the_flex_checkpoint_of_another_topology(tmp_path):
    a, b = write_plan(tmp_path / "a.yaml", "ep2_tp2"), write_plan(tmp_path / "b.yaml", "sd2_tp2(ep2)")
    source = state_of(a, tmp_path / "states")
    said = reshard(source, "-o", tmp_path / "uc", "--save-format", "unified")
    reshard(source, "--to", b, "-o", tmp_path / "flex", "--save-format", "flex")
    assert "of PaddleNLP" in printed("state", "show", str(tmp_path / "uc"))
    assert said.rstrip().endswith(": equal")
    found = tensor_md5s(open_checkpoint(tmp_path / "uc"))
    assert found == tensor_md5s(open_checkpoint(tmp_path / "flex")) == tensor_md5s(open_checkpoint(source))
    assert printed("state", "diff", str(tmp_path / "uc"), str(tmp_path / "flex")).startswith("all 230 tensors")
    index = json.loads((tmp_path / "uc" / "optimizer.safetensors.index.json").read_text())
    assert index["master_weights"] is False
    assert index["weight_map"]["norm.weight/beta1_pow_acc_0"] == "optimizer-00001-of-00001.safetensors"
    stored = load_file(tmp_path / "uc" / "optimizer-00001-of-00001.safetensors")
    assert stored["norm.weight/beta1_pow_acc_0"].shape == (1,)
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in stored.values())


def test_a_plan_takes_its_weights(tmp_path):
    a, b = write_plan(tmp_path / "a.yaml", "pp2_sd2"), write_plan(tmp_path / "b.yaml", "sd2_tp2(ep2)")
    source = state_of(a, tmp_path / "states")
    reshard(source, "-o", tmp_path / "uc", "--save-format", "unified")
    reshard(tmp_path / "uc", "--to", b, "-o", tmp_path / "back")
    reshard(source, "--to", b, "-o", tmp_path / "direct", "--weights-only")
    assert tensor_md5s(open_checkpoint(tmp_path / "back")) == tensor_md5s(open_checkpoint(tmp_path / "direct"))


def test_names_of_a_convention_are_those_of_optimizer_states_too_and_experts_have_numbers_of_the_model(tmp_path):
    """Each expert of each rank is under its own number, with the moments of its own rows."""
    source = state_of(write_plan(tmp_path / "a.yaml", "ep2_tp2", MOE), tmp_path / "states")
    assert "warning" not in reshard(source, "--names", "huggingface", "-o", tmp_path / "uc", "--save-format", "unified")
    weights, stored = (
        load_file(tmp_path / "uc" / f"{group}-00001-of-00001.safetensors") for group in ("model", "optimizer")
    )
    assert stored.keys() == {f"{name}/{slot}" for name in weights for slot in
                             ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0")}  # fmt: skip
    one = tmp_path / "whole.safetensors"
    reshard(source, "-o", one)
    whole = load_file(one)
    for number in range(12):
        moment = stored[f"model.layers.1.block_sparse_moe.experts.{number}.w2.weight/moment2_0"]
        assert np.array_equal(moment.T, whole["optimizer/moment2/layer.1.mlp.experts.down.weight"][number])
    counter = whole["optimizer/beta1_power/layer.0.attn.qkv.weight"]
    assert stored["model.layers.0.self_attn.k_proj.weight/beta1_pow_acc_0"].item() == counter


def test_main_weights_are_taken_and_not_their_roundings(tmp_path):
    opened = open_checkpoint(full(tmp_path / "uc"))
    assert opened.tensors["a.weight"].dtype == "float32"
    assert set(opened.tensors) == {"a.weight", *(f"optimizer/{slot}/a.weight" for slot in
                                                 ("moment1", "moment2", "beta1_power", "beta2_power"))}  # fmt: skip


def _without_master(directory):
    for file in directory.glob("master_weights*"):
        file.unlink()


def _without_index(directory):
    (directory / "optimizer.safetensors.index.json").unlink()


FAULTS = {
    "main weights that are not there": (_without_master, "states main weights"),
    "states of each rank": (_without_index, "and no optimizer.safetensors.index.json"),
    "a weight that is not there": (lambda d: write(d, "optimizer", states("b.weight")), "of b.weight, and no such"),
    "another optimizer": (
        lambda d: write(d, "optimizer", {"a.weight/velocity_0": np.ones((2, 3), np.float32)}), "velocity_0",
    ),
    "a scalar with rows": (
        lambda d: write(d, "optimizer", {"a.weight/beta1_pow_acc_0": np.ones(3, np.float32)}), "is a scalar",
    ),
    "main weights of another shape": (
        lambda d: write(d, "master_weights", {"a.weight": np.ones((3, 2), np.float32)}), "as main weight",
    ),
    "experts of two ranks under one number": (
        lambda d: save_file({"experts.0.weight": np.ones(2), "a.weight": np.ones((2, 3), np.float16)},
                            d / "model-00001-of-00001.safetensors"),
        "holds experts.0.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_missing_or_contradicts_is_refused(tmp_path, name):
    spoil, message = FAULTS[name]
    directory = full(tmp_path / "uc")
    open_checkpoint(directory)
    spoil(directory)
    with pytest.raises(StateError, match=message):
        open_checkpoint(directory)


def test_states_of_pytorch_are_refused_and_their_weights_are_not(tmp_path):
    plan = write_plan(tmp_path / "a.yaml", "tp2", backend="torch")
    source = state_of(plan, tmp_path / "states")
    said = printed("state", "reshard", str(source), "-o", str(tmp_path / "uc"), "--save-format", "unified", status=2)
    assert "PP927" in said
    assert "--weights-only" in said
    reshard(source, "-o", tmp_path / "uc", "--save-format", "unified", "--weights-only")
    assert not (tmp_path / "uc" / "optimizer.safetensors.index.json").exists()
