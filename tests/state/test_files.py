"""The state on disk, without a framework: whole and covered once, found, refused; never half of it."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save, save_file

from pipeproof.specs.axis_layout import dtype_bytes
from pipeproof.state.byte_ranges import ByteArray, read_file, write_file
from pipeproof.state.read_state import find_state, read_rank_state, require_free_steps
from pipeproof.state.resume_check import require_resumable
from pipeproof.state.state_codes import StateError
from pipeproof.state.state_index import read_index
from pipeproof.state.state_layout import shards_of_rank, whole_state
from pipeproof.state.write_state import finish_state, partial_directory, remove_partial_states, write_rank_state
from pipeproof.verify.certificate import graph_digest
from tests.state.runs import MOE, plan_of, require_same_on_resume

PLANS = {
    "tp": {"topology": {"tp": 2}},
    "sharded": {"topology": {"dp": 2}, "memory": {"shard_optimizer": "dp"}, "model": {"tied_embedding": True}},
    "ep": {"topology": {"ep": 2, "tp": 2}, "model": {"moe": MOE, "num_kv_heads": 2}},
    "copies": {"schedule": {"kind": "dualpipe"}},
}


def numbers(plan):
    """Values of every tensor of a plan's state, whole: no two elements of one tensor are equal."""
    return {
        name: np.arange(prod(one.shape), dtype=one.dtype).reshape(one.shape) for name, one in whole_state(plan).items()
    }


def cut(piece, whole):
    region = tuple(slice(o, o + e) for o, e in zip(piece.shard.offsets, piece.shard.extents, strict=True))
    part = np.ascontiguousarray(whole[region])
    return part if piece.shard.flat is None else part.reshape(-1)[slice(*piece.shard.flat)]


def write(at, root, steps_done=1, **others):
    """The state of a subject as its ranks would write it, of ``numbers``, or of ``others`` by tensor."""
    whole = numbers(at.plan) | others
    for rank in range(at.plan.mesh.num_ranks):
        arrays = {
            piece.shard: ByteArray(
                piece.tensor.dtype, piece.shape, np.frombuffer(cut(piece, whole[piece.shard.tensor]).tobytes(), "u1")
            )
            for piece in shards_of_rank(at.plan, rank)
            if piece.writer == rank
        }
        write_rank_state(root, steps_done, "job", rank, arrays)
    return finish_state(root, steps_done, "job", at.plan, graph_digest(at), "1.0")


@pytest.mark.parametrize("changes", PLANS.values(), ids=PLANS)
def test_every_element_is_in_one_file_once_and_others_can_put_it_together(tmp_path, changes):
    at = plan_of(**changes)
    directory = write(at, tmp_path)
    index = read_index(directory)
    whole = numbers(at.plan)
    found = {name: np.full(array.shape, -1, array.dtype) for name, array in whole.items()}
    times = {name: np.zeros(array.shape, int) for name, array in whole.items()}
    for file in index.files:
        content = load_file(directory / file.name)
        assert set(content) == {shard.tensor for shard in file.shards}
        for shard in file.shards:
            region = tuple(slice(o, o + e) for o, e in zip(shard.offsets, shard.extents, strict=True))
            for target, values in ((found, content[shard.tensor]), (times, None)):
                part = np.array(target[shard.tensor][region])
                one = part.reshape(-1)[slice(*shard.flat) if shard.flat else slice(None)]
                one[...] = one + 1 if values is None else values.reshape(-1)
                target[shard.tensor][region] = part
    assert set(index.tensors) == set(whole)
    for name, array in whole.items():
        assert (times[name] == 1).all(), name
        assert (found[name] == array).all(), name


@pytest.mark.parametrize("changes", PLANS.values(), ids=PLANS)
def test_each_rank_reads_what_it_holds(tmp_path, changes):
    at = plan_of(**changes)
    write(at, tmp_path)
    state, whole = find_state(tmp_path), numbers(at.plan)
    require_resumable(state, at.plan, graph_digest(at))
    held = Counter()
    for rank in range(at.plan.mesh.num_ranks):
        shards = read_rank_state(state, at.plan, rank)
        for piece in shards_of_rank(at.plan, rank):
            got = shards[piece.weight, piece.slot]
            assert (got.dtype, got.shape) == (piece.tensor.dtype, piece.shape)
            assert got.content.tobytes() == cut(piece, whole[piece.shard.tensor]).tobytes()
            held[piece.shard.tensor] += 1
    assert set(held) == set(whole)


def test_experts_are_by_their_global_numbers_and_tied_weights_once():
    at = plan_of(topology={"ep": 2}, model={"moe": MOE, "tied_embedding": True}).plan
    pieces = [piece for rank in range(4) for piece in shards_of_rank(at, rank)]
    up = {piece.shard for piece in pieces if piece.shard.tensor == "layer.0.mlp.experts.up.weight"}
    assert sorted((shard.offsets[0], shard.extents[0]) for shard in up) == [(0, 2), (2, 2)]
    assert {piece.writer for piece in pieces if piece.shard.tensor == "embed.weight"} == {0}
    assert len([piece for piece in pieces if piece.shard.tensor == "embed.weight"]) == 4


@settings(deadline=None, max_examples=25)
@given(dp=st.integers(1, 5), hidden=st.sampled_from([8, 24]), vocabulary=st.integers(3, 9))
def test_shares_of_a_sharded_optimizer_cover_each_weight_whatever_their_sizes(dp, hidden, vocabulary):
    at = plan_of(
        topology={"dp": dp}, memory={"shard_optimizer": "dp"}, model={"hidden_size": hidden, "vocab_size": vocabulary}
    )
    ranges = {}
    for rank in range(at.plan.mesh.num_ranks):
        for piece in shards_of_rank(at.plan, rank):
            if piece.slot == "moment1" and piece.writer == rank:
                ranges.setdefault(piece.weight, []).append(piece.shard.flat or (0, prod(piece.tensor.shape)))
    for name, shares in ranges.items():
        shares.sort()
        assert shares[0][0] == 0
        assert shares[-1][1] == prod(whole_state(at.plan)[name].shape)
        assert all(one[1] == other[0] for one, other in itertools.pairwise(shares))


def refused(tmp_path, match, at=None, path=None):
    at = at or plan_of()
    with pytest.raises(StateError, match=match) as caught:
        require_resumable(find_state(path or tmp_path), at.plan, graph_digest(at))
    assert caught.value.findings[0].help
    return caught.value


def edit(directory, change):
    file = directory / "index.json"
    content = json.loads(file.read_text())
    content.pop("sha256", None)  # of the index itself: the content behind it is checked, too
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"run": {"seed": 8}}, "run.seed was 0 and is 8"),
        ({"run": {"learning_rate": 0.5, "seed": 8}}, "run.learning_rate was 0.01 and is 0.5, run.seed was 0 and is 8"),
        ({"run": {"optimizer": "sgd"}}, 'run.optimizer was "adamw" and is "sgd"'),
        ({"run": {"dtype": "float64"}}, 'run.dtype was "float32" and is "float64"'),
        ({"model": {"hidden_size": 16}}, "model.hidden_size was 8 and is 16"),
        ({"backend": "torch"}, "saved by paddle, and the plan runs on torch"),
        ({"model": {"moe": MOE}}, "model.moe.aux_loss was missing and is 0.1, .*, and 7 more keys"),
        ({"steps": 1}, "is the state after step 0, and the plan has 1 steps"),
    ],
)
def test_the_state_of_another_run_is_refused(tmp_path, changes, match):
    write(plan_of(), tmp_path)
    refused(tmp_path, match, plan_of(**changes))


def test_more_steps_another_device_or_a_replay_are_no_other_run(tmp_path):
    at = plan_of(backend="torch", run={"device": "cpu"})
    write(at, tmp_path)
    more = plan_of(backend="torch", steps=9)
    require_resumable(find_state(tmp_path), more.plan, graph_digest(more))


def test_files_that_are_missing_cut_short_changed_or_of_other_tensors_are_named(tmp_path):
    directory = write(plan_of(), tmp_path)
    file = directory / "rank1.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-3])
    refused(
        tmp_path, rf"rank1.safetensors is cut short: it has {len(content) - 3} bytes, and {len(content)} in the index"
    )
    file.write_bytes(content + b"abc")
    refused(tmp_path, "rank1.safetensors is longer")
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused(tmp_path, "rank1.safetensors was changed: its SHA-256 is not the")
    file.unlink()
    refused(tmp_path, r"rank1.safetensors is missing; it holds \d+ tensors, layer.2.attn_norm.weight first")


def test_who_may_read_the_index_may_read_the_files(tmp_path):
    before = os.umask(0o027)
    try:
        directory = write(plan_of(), tmp_path)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in directory.iterdir()} == {0o640}


def test_an_index_that_is_not_one_is_refused_by_the_place(tmp_path):
    directory = write(plan_of(), tmp_path)
    file = directory / "index.json"
    good = file.read_text()
    refused(tmp_path / "nowhere", "there is no state at", path=tmp_path / "nowhere")
    for bad, match in (
        (good[: len(good) // 2], "is not the index of a state: the whole of it: Invalid JSON"),
        (good.replace('"steps_done": 1', '"steps_done": "1"'), "steps_done: Input should be a valid integer"),
        (good.replace('"pipeproof_state": 1', '"pipeproof_state": 2'), "pipeproof_state: Input should be 1"),
        (good.replace("rank0.safetensors", "../rank0"), "files.0.name: String should match pattern"),
    ):
        file.write_text(bad)
        refused(tmp_path, match)


def test_an_index_without_a_shard_or_with_another_type_of_it_is_refused(tmp_path):
    directory = write(plan_of(), tmp_path)
    good = (directory / "index.json").read_text()
    edit(directory, lambda content: content["tensors"]["norm.weight"].update(shape=[9]))
    refused(
        tmp_path, r"needs \[8\] from \[0\] on of norm.weight, weight, float32 \[8\]; it is stored as weight, .* \[9\]"
    )
    (directory / "index.json").write_text(good)
    edit(directory, lambda content: content["tensors"].pop("optimizer/moment2/norm.weight"))
    refused(tmp_path, "of optimizer/moment2/norm.weight, moment, float32 .8.; it is missing")
    (directory / "index.json").write_text(good)
    edit(directory, lambda content: content["files"][1]["shards"].pop())
    refused(tmp_path, r"rank 1 needs \[\] from \[\] on of optimizer/beta2_power/head.weight; no file has that region")


def test_tensors_that_no_rank_needs_and_shards_that_overlap_or_are_outside_are_refused(tmp_path):
    at = plan_of(topology={"pp": 1, "tp": 2})
    directory = write(at, tmp_path)
    good = (directory / "index.json").read_text()

    def of_second(content, name):
        return next(one for one in content["files"][1]["shards"] if one["tensor"] == name)

    def more(content):
        content["tensors"]["other.weight"] = content["tensors"]["head.weight"]
        content["tensors"]["another.weight"] = content["tensors"]["head.weight"]

    edit(directory, more)
    match = r"it has other.weight, weight, float32 \[8, 16\], and the plan has no tensor .*; 1 more tensors are not"
    refused(tmp_path, match, at)
    (directory / "index.json").write_text(good)
    edit(directory, lambda content: of_second(content, "head.weight").update(offsets=[0, 7]))
    refused(
        tmp_path, r"rank 0 needs \[8, 1\] from \[0, 7\] on of head.weight; rank0.* and rank1.* have that region, 2", at
    )
    (directory / "index.json").write_text(good)
    edit(directory, lambda content: of_second(content, "head.weight").update(offsets=[0, 9]))
    refused(tmp_path, r"rank1.safetensors must have \[8, 8\] from \[0, 9\] on of head.weight, whose shape is", at)
    (directory / "index.json").write_text(good)
    edit(directory, lambda content: of_second(content, "head.weight").update(offsets=[0, 8], extents=[8, 7]))
    refused(tmp_path, r"rank 1 needs \[8, 1\] from \[0, 15\] on of head.weight; no file has that region", at)


def test_what_changes_between_the_check_and_the_loading_is_refused(tmp_path):
    at = plan_of()
    directory = write(at, tmp_path)
    state = find_state(tmp_path)
    require_resumable(state, at.plan, graph_digest(at))
    file = directory / "rank1.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"F32"', b'"I32"'))
    with pytest.raises(StateError, match=r"rank1.safetensors has .* as int32 .*, and the index lists float32"):
        read_rank_state(state, at.plan, 1)
    file.write_bytes(content[:-1])
    with pytest.raises(StateError, match=r"rank1.safetensors is cut short"):
        read_rank_state(state, at.plan, 1)
    file.unlink()
    with pytest.raises(StateError, match=r"rank1.safetensors cannot be read"):
        read_rank_state(state, at.plan, 1)


def test_a_file_whose_tensors_are_not_those_of_the_index_is_refused(tmp_path):
    at = plan_of(topology={"pp": 1})
    directory = write(at, tmp_path)

    def swap(content):
        content["files"][0]["shards"][0]["tensor"] = "layer.0.attn_norm.weight"
        content["tensors"]["embed.weight"] = content["tensors"]["layer.0.attn_norm.weight"]

    edit(directory, swap)
    refused(tmp_path, "embed.weight", at)


def test_the_newest_state_is_taken_and_an_older_one_can_be_named(tmp_path):
    at = plan_of(steps=9)
    one, two = write(at, tmp_path, 2), write(at, tmp_path, 4)
    assert find_state(tmp_path).directory == two
    assert find_state(one).steps_done == 2
    require_free_steps(tmp_path, 5, 9)
    with pytest.raises(StateError, match="step-00000004 holds a state already"):
        require_free_steps(tmp_path, 3, 9)


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_save_that_is_cut_off_leaves_the_state_before_and_nothing_that_looks_finished(tmp_path, written):
    at = plan_of(steps=9)
    write(at, tmp_path, 2)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for rank in range(written):
        arrays = {
            piece.shard: ByteArray(
                piece.tensor.dtype, piece.shape, np.zeros(prod(piece.shape) * dtype_bytes(piece.tensor.dtype), "u1")
            )
            for piece in shards_of_rank(at.plan, rank)
            if piece.writer == rank
        }
        write_rank_state(tmp_path, 4, "other", rank, arrays)
    assert find_state(tmp_path).steps_done == 2
    assert {path: path.read_bytes() for path in before} == before
    remove_partial_states(tmp_path, "other")
    assert not partial_directory(tmp_path, 4, "other").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def test_a_state_is_never_written_over(tmp_path):
    at = plan_of()
    directory = write(at, tmp_path)
    before = {path: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(OSError, match="not empty"):
        write(at, tmp_path)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


@pytest.mark.parametrize("names", [("b", "é\n", "a"), ("bool", "uint8", "int16", "float16", "float32", "int64"), ()])
def test_a_file_has_the_bytes_that_the_library_writes(names, tmp_path):
    types = [name if name in ("bool", "uint8", "int16", "float16", "float32") else "int64" for name in names]
    arrays = {
        name: np.arange(6 * rows).reshape(rows, 6).astype(dtype)
        for rows, (name, dtype) in enumerate(zip(names, types, strict=True))
    }
    stored = {
        name: ByteArray(array.dtype.name, array.shape, array.reshape(-1).view("u1")) for name, array in arrays.items()
    }
    size, sha256 = write_file(tmp_path / "x", stored)
    content = (tmp_path / "x").read_bytes()
    assert content == save(arrays)
    assert (size, sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_an_array_that_is_not_of_its_shape_is_not_written_as_one(tmp_path):
    with pytest.raises(AssertionError, match="has not the size of its shape"):
        write_file(tmp_path / "x", {"a": ByteArray("float32", (3,), np.zeros(8, np.uint8))})


def test_arrays_of_every_type_are_read_and_what_is_none_is_refused(tmp_path):
    arrays = {
        name: np.arange(6).reshape(2, 3).astype(name)
        for name in ("bool", "uint8", "int8", "int16", "int32", "uint64", "float16", "float32", "float64")
    }
    save_file(arrays, tmp_path / "x")
    found = read_file(tmp_path / "x")
    assert {name: (one.dtype, one.shape) for name, one in found.items()} == {name: (name, (2, 3)) for name in arrays}
    assert all(found[name].content.tobytes() == array.tobytes() for name, array in arrays.items())
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes().replace(b'"I16"', b'"X16"'))
    with pytest.raises(StateError, match="int16 has the type 'X16'"):
        read_file(tmp_path / "x")


SP = {"tp": 2, "sequence_parallel": True}
BOTH = {
    "zb_v, tied": {"schedule": {"kind": "zb_v", "num_chunks": 2}, "model": {"tied_embedding": True}},
    "dualpipe_v": {"schedule": {"kind": "dualpipe_v", "num_chunks": 2}},
    "sequence parallel, dropout": {"topology": SP, "model": {"dropout": {"hidden": 0.3, "attention": 0.2}}},
    "experts, biases": {"topology": {"ep": 2}, "model": {"moe": MOE}},
    "sharded optimizer, tied": {
        "topology": {"dp": 2}, "memory": {"shard_optimizer": "dp"}, "model": {"tied_embedding": True},
    },
    "sgd, clip": {"run": {"optimizer": "sgd", "clip_norm": 0.5}},
}  # fmt: skip
SIXTEEN = {
    "bfloat16": {"run": {"dtype": "bfloat16"}},
    "bfloat16, main gradients, sharded": {
        "topology": {"dp": 2}, "memory": {"shard_optimizer": "dp"},
        "run": {"dtype": "bfloat16", "main_grad_dtype": "float32"},
    },
    "float16, main gradients, experts": {
        "topology": {"ep": 2}, "model": {"moe": MOE}, "run": {"dtype": "float16", "main_grad_dtype": "float32"},
    },
}  # fmt: skip


@pytest.mark.slow(but=["zb_v, tied", "dualpipe_v", "sgd, clip", "sharded optimizer, tied"])
@pytest.mark.needs_paddle
@pytest.mark.parametrize("changes", BOTH.values(), ids=BOTH)
def test_resumed_training_has_the_bits_of_training_in_one_go(tmp_path, changes):
    require_same_on_resume(tmp_path, **changes)


@pytest.mark.needs_paddle
def test_main_gradients_of_float64_come_back(tmp_path):
    require_same_on_resume(tmp_path, run={"main_grad_dtype": "float64"}, topology={"tp": 2})


@pytest.mark.needs_torch
@pytest.mark.parametrize("changes", (BOTH | SIXTEEN).values(), ids=BOTH | SIXTEEN)
def test_resumed_training_has_the_bits_of_training_in_one_go_on_torch(tmp_path, changes):
    require_same_on_resume(tmp_path, backend="torch", **changes)
