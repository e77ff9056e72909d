"""`pipeproof state show`: its output on checkpoints, and its exit status."""

import functools
import hashlib
import json
import os
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.commands import printed
from tests.state.runs import plan_of
from tests.state.tiny import values, write_state

SHARDED = plan_of(steps=9, topology={"dp": 2}, memory={"shard_optimizer": "dp"}, model={"num_layers": 12})


said = functools.partial(printed, "state", "show")
compared = functools.partial(printed, "state", "diff")


@pytest.fixture
def state(tmp_path):
    return write_state(SHARDED, tmp_path / "states", 2)


def test_it_says_what_a_state_is_and_folds_layers_that_are_alike(state):
    output = said(state.parent)
    assert "step-00000002: a state, 435 tensors in 4 files" in output
    assert "after 2 steps, saved with paddle" in output
    assert "dp 2 x pp 2" in output
    rows = [line.split() for line in output.splitlines()]
    weights = [array for name, array in values(SHARDED.plan, 2).items() if not name.startswith("optimizer/")]
    numel = sum(array.size for array in weights)
    assert ["weight", "float32", str(len(weights)), f"{numel:,}", f"{4 * numel:,}"] in rows
    qkv = next(line for line in output.splitlines() if "attn.qkv" in line)
    assert qkv.split()[:6] == ["layer.{0..11}.attn.qkv.weight", "12", "float32", "8", "x", "24"]
    assert "moment1 (flat in 2), moment2 (flat in 2), beta1_power, beta2_power" in qkv


def test_json_has_every_tensor(state):
    content = json.loads(said(state, "--format", "json"))
    assert (content["kind"], content["steps_done"], content["mesh"]["dp"]) == ("state", 2, 2)
    assert len(content["tensors"]) == 435
    assert content["tensors"]["optimizer/moment1/norm.weight"] == {
        "kind": "moment", "dtype": "float32", "shape": [8], "parts": 2, "cut": "flat in 2",
    }  # fmt: skip


def test_md5_lines_are_those_of_the_whole_tensors(state):
    whole = values(SHARDED.plan, 2)
    lines = [f"{name}  {hashlib.md5(whole[name].tobytes()).hexdigest()}" for name in sorted(whole)]
    of_all = hashlib.md5("".join(f"{line}\n" for line in lines).encode()).hexdigest()
    assert said(state, "--md5").splitlines() == [*lines, f"all {len(lines)} tensors  {of_all}"]
    assert json.loads(said(state, "--md5", "--format", "json"))["md5"] == of_all


def test_experts_are_folded_by_their_numbers_and_holes_are_not_hidden(tmp_path):
    names = [f"model.layers.{layer}.experts.{expert}.w1" for layer in range(4) for expert in range(11)]
    save_file({name: np.ones((2, 3), np.float32) for name in names[:-1]}, tmp_path / "m.safetensors")
    output = said(tmp_path / "m.safetensors")
    assert re.search(r"model\.layers\.\*\.experts\.\*\.w1 +43", output)
    save_file({name: np.ones((2, 3), np.float32) for name in names}, tmp_path / "m.safetensors")
    assert re.search(r"model\.layers\.\{0\.\.3\}\.experts\.\{0\.\.10\}\.w1 +44", said(tmp_path / "m.safetensors"))


def test_two_states_of_other_topologies_are_the_same_and_of_other_steps_are_not(tmp_path, state):
    other = plan_of(steps=9, topology={"tp": 2}, schedule={"num_micro_batches": 8}, model={"num_layers": 12})
    same = write_state(other, tmp_path / "other", 2)
    assert compared(state, same) == "all 435 tensors have the same type, shape and bits\n"
    later = write_state(other, tmp_path / "other", 3)
    output = compared(state, later, status=1)
    assert "one is the state after 2 steps, the other after 3" in output
    assert "and 415 more tensors" in output
    assert json.loads(compared(state, same, "--format", "json"))["equal"] is True
    assert len(json.loads(compared(state, later, "--format", "json", status=1))["differ"]) == 435


def test_all_files_that_are_damaged_are_listed(state):
    assert "each of its 4 files has the size, SHA-256 and tensors of the index" in said(state, "--verify")
    (state / "rank0.safetensors").unlink()
    (state / "rank1.safetensors").write_bytes((state / "rank1.safetensors").read_bytes()[:-1])
    content = bytearray((state / "rank3.safetensors").read_bytes())
    content[-1] ^= 1
    (state / "rank3.safetensors").write_bytes(content)
    output = said(state, "--verify", status=1)
    for what in ("rank0.safetensors is missing", "rank1.safetensors is cut short", "rank3.safetensors was changed"):
        assert what in output
    assert "3 faults" in output
    assert len(json.loads(said(state, "--verify", "--format", "json", status=1))["faults"]) == 3
    assert "rank0.safetensors" in said(state, status=2)


def test_what_is_no_checkpoint_is_bad_input(tmp_path):
    assert "there is no state at" in said(tmp_path, status=2)
    (tmp_path / "x.safetensors").write_text("hello")
    assert "x.safetensors is cut short, or no safetensors file" in said(tmp_path / "x.safetensors", status=2)
    for options in ((), ("--verify",), ("--md5", "--format", "json")):
        assert "there is no state at" in said(tmp_path / "nowhere", *options, status=2)
    assert f"there is no file {tmp_path / 'no.safetensors'}" in said(tmp_path / "no.safetensors", status=2)
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "pipe.safetensors is a pipe or a device" in said(tmp_path / "pipe.safetensors", status=2)
    (tmp_path / "plan.yaml").write_text("pipeproof: 1")
    plan = tmp_path / "plan.yaml"
    for output in (said(plan, status=2), compared(tmp_path, plan, status=2)):
        assert "plan.yaml is not a checkpoint" in output
    assert "the path is empty" in said("", status=2)
