"""A state goes to ranks of any other topology as it is, and training resumes from it."""

import json
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.exec.rank.checkpointing import prepare_checkpoint, restore_state
from pipeproof.exec.rank.job_files import CheckpointOptions, Job, RunOptions
from pipeproof.stages.describe.synthetic import initial_weight
from pipeproof.state import byte_ranges as ranges
from pipeproof.state import read_state as shards
from pipeproof.state.read_state import find_state, read_rank_state, read_whole
from pipeproof.state.resume_check import require_resumable
from pipeproof.state.state_codes import StateError
from pipeproof.state.state_index import INDEX_FILE, StateIndex, index_text
from pipeproof.state.state_layout import shards_of_rank
from pipeproof.verify.certificate import Certificate, Verdict, graph_digest
from tests.features import merged
from tests.state.runs import MOE, plan_of, save, shown
from tests.state.test_files import cut, numbers, write

SP = {"tp": 2, "sequence_parallel": True}
SHARDED = {"shard_optimizer": "dp"}
MTP = {"mtp": {"num_modules": 1}, "tied_embedding": True}
BIG_MOE = {**MOE, "num_experts": 12}


@st.composite
def cuts(draw):
    """Sections of a plan that distribute the work, for one model and eight micro-batches in each step."""
    dp, ep = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    kind = draw(st.sampled_from(["1f1b", "zb_v", "dualpipe_v", "gpipe"]))
    schedule = {"kind": kind, "num_micro_batches": 8 // dp // ep}
    return {
        "topology": {"pp": draw(st.sampled_from([1, 2])), "tp": draw(st.sampled_from([1, 2, 4])), "dp": dp, "ep": ep},
        "schedule": {**schedule, **({"num_chunks": 2} if kind in {"zb_v", "dualpipe_v"} else {})},
        "memory": draw(st.sampled_from([{}, SHARDED])),
        "run": {"backend": draw(st.sampled_from(["paddle", "torch"]))},
    }


MODEL = {
    "moe": {**BIG_MOE, "dense_layers": 2},
    "num_heads": 4,
    "num_kv_heads": 4,
    "hidden_size": 12,
    "head_size": 2,
    **MTP,
}


def made(sections):
    try:
        return plan_of(model=MODEL, steps=3, **sections)
    except PipeproofError:  # a schedule that does not take as few micro-batches
        return None


@settings(deadline=None, max_examples=15)
@given(one=cuts(), other=cuts())
def test_ranks_of_any_topology_read_what_they_hold_of_a_state_of_any_other(tmp_path_factory, one, other):
    other["run"] = one["run"]
    source, target = made(one), made(other)
    if source is None or target is None:
        return
    root = tmp_path_factory.mktemp("state")
    write(source, root)
    state, whole = find_state(root), numbers(source.plan)
    require_resumable(state, target.plan, graph_digest(target))
    for rank in range(target.plan.mesh.num_ranks):
        read = read_rank_state(state, target.plan, rank)
        for piece in shards_of_rank(target.plan, rank):
            got = read[piece.weight, piece.slot]
            assert (got.dtype, got.shape) == (piece.tensor.dtype, piece.shape)
            assert got.content.tobytes() == cut(piece, whole[piece.shard.tensor]).tobytes(), piece.shard
    for name, array in read_whole(state).items():
        assert array.content.tobytes() == whole[name].tobytes()


EXPERTS = {"model": {"moe": {**BIG_MOE, "dense_layers": 1}, "num_heads": 2, "num_kv_heads": 2, **MTP}}
"""Blocks with experts and without, biases of routers, a module of multi-token prediction, and a tied head."""
PAIRS = {
    "columns and rows": ({"topology": {"tp": 4}}, {"topology": {"tp": 1, "pp": 1}}),
    "shares of parts": (
        {"topology": {"dp": 4}, "memory": SHARDED},
        {"topology": {"dp": 2, "tp": 2}, "memory": SHARDED},
    ),
    "experts of parts": (
        {"topology": {"ep": 2, "tp": 2}},
        {"topology": {"tp": 4, "pp": 1, "dp": 2}, "memory": SHARDED},
    ),
}


@pytest.mark.parametrize(("one", "other"), PAIRS.values(), ids=PAIRS)
def test_shards_are_read_in_blocks_of_any_size(tmp_path, monkeypatch, one, other):
    source, target = made(one), made(other)
    write(source, tmp_path)
    state = find_state(tmp_path)
    expected = [read_rank_state(state, target.plan, rank) for rank in range(target.plan.mesh.num_ranks)]
    scratch_bytes, direct = [], []
    read = ranges.RangeReader.read

    def noted(reader, path, start, content, *more):
        (scratch_bytes if content.base is reader._scratch else direct).append(content.nbytes)
        return read(reader, path, start, content, *more)

    monkeypatch.setattr(shards, "RangeReader", partial(ranges.RangeReader, scratch_bytes=48))
    monkeypatch.setattr(ranges, "_GAP", 16)
    monkeypatch.setattr(ranges.RangeReader, "read", noted)
    for rank, parts_of_rank in enumerate(expected):
        for key, array in read_rank_state(state, target.plan, rank).items():
            assert array.content.tobytes() == parts_of_rank[key].content.tobytes(), key
    assert max(scratch_bytes, default=0) <= 48
    assert max(direct) > 48


def resumed(tmp_path, source, target, last):
    """The source's ranks after two steps, the target's ranks after reading this state, and their results."""
    from pipeproof.exec.rank.framework_choice import start_framework
    from tests.exec.in_memory import run_all

    arrays = start_framework(source.plan.spec.run).arrays
    _, adapters = run_all(source.plan)
    directory = save(source, tmp_path / "source", adapters, arrays)
    state = find_state(directory)
    require_resumable(state, target.plan, graph_digest(target))
    begun = [None] * target.plan.mesh.num_ranks

    def prepare(adapter, arrays, rank):
        restore_state(adapter, arrays, target.plan, rank, state.directory)
        begun[rank] = adapter
        if all(begun):
            save(target, tmp_path / "begun", begun, arrays)

    _, adapters = run_all(target.plan, first_step=2, prepare=prepare)
    save(target, tmp_path / "target", adapters, arrays, last)
    return (read_whole(find_state(tmp_path / name)) for name in ("source", "begun", "target"))


def require_resumed(tmp_path, one, other, *, bitwise, backend="paddle", **common):
    """Steps 0 and 1 by one plan, 2 and 3 by another: all bits get there, and training continues as in one run."""
    from pipeproof.exec.rank.framework_choice import start_framework
    from tests.exec.in_memory import run_all

    source = plan_of(backend, 2, **merged(common, one))
    target, whole = (plan_of(backend, 4, **merged(common, sections)) for sections in (other, one))
    before, begun, after = resumed(tmp_path, source, target, 4)
    assert before.keys() == begun.keys() == after.keys()
    for name, array in before.items():
        assert (array.dtype, array.shape) == (begun[name].dtype, begun[name].shape)
        assert array.content.tobytes() == begun[name].content.tobytes(), name
    _, adapters = run_all(whole.plan)
    save(whole, tmp_path / "whole", adapters, start_framework(whole.plan.spec.run).arrays, 4)
    for name, array in read_whole(find_state(tmp_path / "whole")).items():
        if bitwise:
            assert array.content.tobytes() == after[name].content.tobytes(), name
        else:
            numbers = [both.content.view(array.dtype) for both in (array, after[name])]
            assert np.allclose(*numbers, rtol=1e-9, atol=1e-9), name


SAME_ORDER = {
    "pp 2, pp 1": ({}, {"topology": {"pp": 1}}),
    "pp 1, pp 4": ({"topology": {"pp": 1}}, {"topology": {"pp": 4}}),
    "1f1b, interleaved": ({}, {"schedule": {"kind": "interleaved", "num_chunks": 2}}),
    "another cut": ({}, {"stages": [["embed", "layer.0"], ["layer.1", "layer.2", "layer.3", "norm", "head"]]}),
    "shares, whole": ({"topology": {"dp": 2, "pp": 1}, "memory": SHARDED}, {"topology": {"dp": 2}}),
}
TWO = {"schedule": {"num_micro_batches": 2}}
OTHER_ORDER = {
    "tp 2, dp 2": ({"topology": {"tp": 2}}, {"topology": {"dp": 2}, **TWO}),
    "shares, zb_v with sp": (
        {"topology": {"dp": 2}, "memory": SHARDED, **TWO},
        {"topology": SP, "schedule": {"kind": "zb_v", "num_chunks": 2}},
    ),
    "ep 2, tp 2 with experts": ({"topology": {"ep": 2, "pp": 1}, **TWO, **EXPERTS}, {"topology": {"tp": 2}, **EXPERTS}),
    "pp 2, ep 2 and shares with experts": (
        EXPERTS,
        {"topology": {"ep": 2, "dp": 2}, "memory": SHARDED, "schedule": {"num_micro_batches": 1}, **EXPERTS},
    ),
}
"""All go on within rounding: in float64, where a thing that is lost or mixed up is seen."""


@pytest.mark.slow(but=["1f1b, interleaved", "another cut", "shares, whole"])
@pytest.mark.needs_paddle
@pytest.mark.parametrize(("one", "other"), SAME_ORDER.values(), ids=SAME_ORDER)
def test_on_another_topology_that_adds_in_the_same_order_training_continues_bit_for_bit(tmp_path, one, other):
    require_resumed(tmp_path, one, other, bitwise=True)


@pytest.mark.needs_torch
@pytest.mark.parametrize(("one", "other"), SAME_ORDER.values(), ids=SAME_ORDER)
def test_on_another_topology_that_adds_in_the_same_order_training_continues_bit_for_bit_on_torch(tmp_path, one, other):
    sixteen = {"dtype": "bfloat16", "main_grad_dtype": "float32"}
    require_resumed(tmp_path, one, other, bitwise=True, backend="torch", run=sixteen)


@pytest.mark.slow(but=["tp 2, dp 2"])
@pytest.mark.needs_paddle
@pytest.mark.parametrize(("one", "other"), OTHER_ORDER.values(), ids=OTHER_ORDER)
def test_on_any_other_topology_training_continues_but_for_rounding(tmp_path, one, other):
    require_resumed(tmp_path, one, other, bitwise=False, run={"dtype": "float64"})


@pytest.mark.needs_torch
@pytest.mark.parametrize(("one", "other"), OTHER_ORDER.values(), ids=OTHER_ORDER)
def test_on_any_other_topology_training_continues_but_for_rounding_on_torch(tmp_path, one, other):
    require_resumed(tmp_path, one, other, bitwise=False, backend="torch", run={"dtype": "float64"})


def weights_alone(directory, *, kinds=("weight",), **changes):
    """A state as a tool with other names leaves it: no optimizer, and the values of its maker."""
    index = find_state(directory).index
    kept = {name: one for name, one in index.tensors.items() if one.kind in kinds}
    files = tuple(
        file.model_copy(update={"shards": tuple(shard for shard in file.shards if shard.tensor in kept)})
        for file in index.files
    )
    bare = {"steps_done": 0, "framework": "others", "values": {}, "digest": "", "tensors": kept, "files": files}
    other = StateIndex.model_validate({**index.model_dump(), **bare, **changes}, strict=False)
    (directory / INDEX_FILE).write_text(index_text(other))
    return find_state(directory)


def require_begun_anew(tmp_path, backend):
    """Training from the very beginning, and from a state of the weights that it begins with, are one."""
    from tests.exec.in_memory import run_all

    at = plan_of(backend, 3, topology={"dp": 2}, memory=SHARDED, **EXPERTS)
    other = plan_of("torch", 1, topology={"ep": 2}, run={"seed": 5, "optimizer": "sgd"}, **EXPERTS)
    parameters = [one for layer in at.plan.layers for one in layer.parameters]
    directory = write(other, tmp_path, **{one.name: initial_weight(one, 0, "float32") for one in parameters})
    require_resumable(weights_alone(directory), at.plan, graph_digest(at))
    expected, _ = run_all(at.plan)

    def prepare(adapter, arrays, rank):
        restore_state(adapter, arrays, at.plan, rank, directory)

    outcomes, _ = run_all(at.plan, prepare=prepare)
    assert shown(outcomes) == shown(expected)


@pytest.mark.needs_paddle
def test_weights_alone_are_what_training_begins_with(tmp_path):
    require_begun_anew(tmp_path, "paddle")


@pytest.mark.needs_torch
def test_weights_alone_are_what_training_begins_with_on_torch(tmp_path):
    require_begun_anew(tmp_path, "torch")


def test_biases_of_experts_are_taken_where_there_are_some(tmp_path):
    at = plan_of(topology={"ep": 2}, **EXPERTS)
    directory = write(at, tmp_path)
    state = weights_alone(directory, kinds=("weight", "expert_bias"))
    require_resumable(state, at.plan, graph_digest(at))
    read = read_rank_state(state, at.plan, 0)
    assert read["layer.1.mlp", "bias"].content.view("float32").tolist() == list(range(12))
    assert not read["embed.weight", "moment1"].content.any()
    assert read["embed.weight", "beta1_power"].content.view("float32").tolist() == [np.float32(0.9)]


def test_weights_of_another_model_and_of_another_type_are_refused(tmp_path):
    at, wider = plan_of(), plan_of(model={"hidden_size": 16})
    directory = write(at, tmp_path)
    index = find_state(directory).index
    for bad, values, match in (
        (
            wider,
            {},
            r"rank 0 needs \[16, 16\] from \[0, 0\] on of embed.weight, .*; it is stored as weight, float32 \[16, 8\]",
        ),
        (wider, index.values, "these weights belong to another model: model.hidden_size was 8 and is 16$"),
        (
            plan_of(run={"dtype": "float64"}),
            {},
            "weight, float64 .16, 8.; it is stored as weight, float32 .16, 8.; .* more",
        ),
        (
            plan_of(model={"tied_embedding": True}),
            {},
            "it has head.weight, weight, .* and the plan has no tensor of that",
        ),
    ):
        state = weights_alone(directory, values=values)
        with pytest.raises(StateError, match=match):
            require_resumable(state, bad.plan, graph_digest(bad))
    relaxed = plan_of(model={"dropout": 0.1, "seq_length": 8}, run={"seed": 9, "optimizer": "sgd"})
    require_resumable(weights_alone(directory, values=index.values), relaxed.plan, graph_digest(relaxed))


def test_an_index_of_no_steps_has_nothing_of_an_optimizer(tmp_path):
    directory = write(plan_of(), tmp_path)
    with pytest.raises(ValueError, match=r"steps_done is 0, and optimizer/moment1/embed.weight is what an optimizer"):
        weights_alone(directory, kinds=("weight", "moment"))


def test_shards_of_sequences_matter_to_routers_that_ask_for_even_loads_alone(tmp_path):
    split = {"kind": "seq1f1b", "num_sequence_splits": 2}
    for name, moe, match in (
        ("even", MOE, "num_sequence_splits was 1 and is 2"),
        ("any", {**MOE, "aux_loss": 0.0}, None),
    ):
        write(plan_of(model={"moe": moe}), tmp_path / name)
        other = plan_of(model={"moe": moe}, schedule=split)
        if match is None:
            require_resumable(find_state(tmp_path / name), other.plan, graph_digest(other))
        else:
            with pytest.raises(StateError, match=match):
                require_resumable(find_state(tmp_path / name), other.plan, graph_digest(other))


def test_the_reference_begins_with_a_state_that_the_plan_alone_did_not_make(tmp_path):
    at, other = plan_of(steps=3), plan_of(steps=3, topology={"tp": 2})
    directory = write(at, tmp_path)

    def begins(which, state=directory):
        kept = prepare_checkpoint(CheckpointOptions(resume=state), which, graph_digest(which))
        Job(tmp_path, {}, Certificate("", 1, "", Verdict.PROVED), RunOptions(checkpoint=kept)).save()
        assert Job.load(tmp_path).checkpoint == kept  # as the ranks read it
        return kept.first_step, kept.reference_from_state

    assert begins(at) == (1, False)
    assert begins(other) == (1, True)
    index = find_state(directory).index
    (directory / INDEX_FILE).write_text(index_text(index.model_copy(update={"from_beginning": False})))
    assert begins(at) == (1, True)
    weights_alone(directory)
    assert begins(at) == (0, True)


def test_an_index_of_an_older_release_says_less(tmp_path):
    at, other = plan_of(steps=3, schedule={"seq_lengths": [4, 2, 4, 2]}), plan_of(steps=3, topology={"tp": 2})
    for subject in (at, other):
        directory = write(subject, tmp_path / graph_digest(subject)[:8])
        content = json.loads((directory / INDEX_FILE).read_text())
        del content["sha256"], content["from_beginning"]
        for key in ("schedule.seq_lengths", "schedule.last_micro_batch_size", "model.unpadded_vocab_size"):
            del content["values"][key]
        for tensor in content["tensors"].values():
            del tensor["cut"]
        (directory / INDEX_FILE).write_text(json.dumps(content))
        require_resumable(find_state(directory), subject.plan, graph_digest(subject))
