"""References that start from a state: runs on another topology than the saved one are compared with them."""

from itertools import islice

import numpy as np
import pytest

from pipeproof.comm.accumulation_order import sum_orders, tied_sums
from pipeproof.exec.compare.compare_gradients import compare_step, is_checked_by_bound
from pipeproof.exec.compare.reference_process import reference_start
from pipeproof.exec.rank.checkpointing import restore_state
from pipeproof.exec.rank.framework_choice import start_framework
from pipeproof.exec.rank.job_files import CheckpointOptions
from pipeproof.stages.reference.bound import parallel_bound
from pipeproof.state.byte_ranges import write_file
from pipeproof.state.read_state import find_state, read_whole
from pipeproof.state.state_index import INDEX_FILE, Shard, ShardFile
from tests.exec.in_memory import outcome_of, run_all
from tests.state.runs import plan_of, save

SP = {"tp": 2, "sequence_parallel": True}
MANY = {"num_experts": 12, "top_k": 2, "ffn_size": 8, "aux_loss": 0.1, "expert_bias_rate": 0.01}
MODULES = {"model": {"mtp": {"num_modules": 1, "loss_weight": 0.3}}}
MOE = {"model": {"moe": MANY, **MODULES["model"]}}
TIED = {"model": {"tied_embedding": True}}
SHARED_OUT = {"topology": {"dp": 2}, "schedule": {"num_micro_batches": 2}, "memory": {"shard_optimizer": "dp"}}
SHARDED_GRADIENTS = {**SHARED_OUT, "memory": {"shard_optimizer": "dp", "shard_gradients": "dp"}}
SHARDED_WEIGHTS = {**SHARED_OUT, "memory": SHARDED_GRADIENTS["memory"] | {"shard_weights": "dp"}}
ZB_V = {"schedule": {"kind": "zb_v", "num_chunks": 2}}
TORCH = {"run": {"backend": "torch"}, "schedule": {"micro_batch_size": 2}}
EP = {"topology": {"pp": 1, "ep": 2}, "schedule": {"num_micro_batches": 2}}


def merged(*changes):
    """The changes of several dicts of sections, section by section."""
    sections = dict.fromkeys(section for one in changes for section in one)
    return {section: {k: v for one in changes for k, v in one.get(section, {}).items()} for section in sections}


def saved_by(tmp_path, **changes):
    """Steps 0 and 1 of all ranks of a plan; where their state is."""
    half = plan_of(steps=2, **changes)
    _, adapters = run_all(half.plan)
    return save(half, tmp_path / "states", adapters, start_framework(half.plan.spec.run).arrays)


def references(plan, start=None):
    """The reference with the bits of the plan's ranks; the unpartitioned model if the plan is checked by the bound."""
    if plan.spec.run.backend == "torch":
        from pipeproof.stages.reference.torch_unpartitioned import run_unpartitioned

        return run_unpartitioned(plan.spec, None, start)
    from pipeproof.stages.reference.ordered import Orders, run_ordered

    orders = sum_orders(plan)
    return run_ordered(plan.spec, Orders(orders.loss, orders.by_parameter(plan), tied_sums(plan)), None, start)


def resumed(state, plan, spoilt=None, first_step=2):
    """The ranks' next two steps from a state, against a reference from the same one.

    ``spoilt`` names the tensor with one wrong element, on one rank alone.
    """

    def prepare(adapter, arrays, rank):
        restore_state(adapter if spoilt is None else Spoiling(adapter, arrays, *spoilt), arrays, plan, rank, state)

    outcomes, _ = run_all(plan, first_step=first_step, prepare=prepare)
    results = []
    for of_step, reference in zip(outcomes[first_step:], references(plan, start(state, plan)), strict=True):
        results.append(compare_step(plan, reference.step, of_step, *[outcome_of(reference)] * 2))
    assert [result.step for result in results] == [first_step, first_step + 1]
    return results


def start(state, plan):
    return reference_start(CheckpointOptions(resume=state, reference_from_state=True), plan.spec)


class Spoiling:
    """A rank that gets the state with another exponent of one element, the largest."""

    def __init__(self, adapter, arrays, weight, slot):
        self.adapter, self.arrays, self.key = adapter, arrays, (weight, slot)

    def restore_state(self, state):
        if self.key in state:
            tensor = state[self.key]
            content, numbers = self.arrays.to_bytes(tensor).copy(), self.arrays.to_numpy(tensor)
            content.reshape(numbers.size, -1)[np.abs(numbers).argmax(), -1] ^= 1
            spoilt = self.arrays.from_bytes(content, tuple(tensor.shape), self.arrays.dtype(tensor))
            state = {**state, self.key: spoilt}
        self.adapter.restore_state(state)


def bits(step):
    arrays = {"loss": step.loss, **step.gradients, **step.routers, **{f"of {k}": v for k, v in step.weights.items()}}
    return step.step, {name: (array.dtype, array.tobytes()) for name, array in arrays.items()}


ONWARD = {
    "pp2 to pp2 zb_v, tied, MTP": ({}, ZB_V, merged(TIED, MODULES)),
    "pp2 to tp2 sp, grouped heads": (
        {}, {"topology": {"pp": 1, **SP}}, {"model": {"num_heads": 4, "num_kv_heads": 2}},
    ),
    "tp2 sp to dp2 sharded, clip": ({"topology": {"pp": 1, **SP}}, SHARED_OUT, {"run": {"clip_norm": 0.5}}),
    "dp2 sharded to tp2, sgd": (SHARED_OUT, {"topology": {"pp": 1, "tp": 2}}, {"run": {"optimizer": "sgd"}}),
    "pp2 to ep2, experts, MTP, tied": ({}, EP, merged(MOE, TIED)),
    "ep2 to tp2, experts, MTP": (EP, {"topology": {"pp": 1, "tp": 2}}, MOE),
    "sharded gradients to dp2 sharded": (SHARDED_GRADIENTS, SHARED_OUT, {}),
    "tp2 to sharded gradients, clip": (
        {"topology": {"pp": 1, "tp": 2}}, SHARDED_GRADIENTS, {"run": {"clip_norm": 0.5}},
    ),
    "sharded weights to tp2": (SHARDED_WEIGHTS, {"topology": {"pp": 1, "tp": 2}}, {}),
    "sharded to sharded weights": (SHARED_OUT, SHARDED_WEIGHTS, {}),
    "sharded to pp2, main gradients": (SHARED_OUT, {}, {"run": {"main_grad_dtype": "float64"}}),
}  # fmt: skip


@pytest.mark.slow(
    but=[
        "pp2 to pp2 zb_v, tied, MTP",
        "pp2 to tp2 sp, grouped heads",
        "tp2 sp to dp2 sharded, clip",
        "dp2 sharded to tp2, sgd",
        "sharded to pp2, main gradients",
    ]
)
@pytest.mark.needs_paddle
@pytest.mark.parametrize(("before", "after", "both"), ONWARD.values(), ids=ONWARD)
def test_ranks_on_another_topology_have_the_bits_of_the_ordered_reference_from_their_state(
    tmp_path, before, after, both
):
    state = saved_by(tmp_path, **merged(before, both))
    results = resumed(state, plan_of(steps=4, **merged(after, both)).plan)
    assert [result.bitwise for result in results] == [True, True]


IN_ORDER = {
    "tp2 sp to pp2, MTP": ({"topology": {"pp": 1, **SP}}, {}, MODULES),
    "dp2 sharded to pp2, bfloat16": (SHARED_OUT, {}, {"run": {"dtype": "bfloat16"}}),
    "ep2 to pp2, experts, main gradients": (
        EP, {}, merged(MOE, {"run": {"dtype": "bfloat16", "main_grad_dtype": "float32"}}),
    ),
    "dp2 sharded to interleaved, sgd": (
        SHARED_OUT, {"schedule": {"kind": "interleaved", "num_chunks": 2}},
        {"run": {"optimizer": "sgd", "dtype": "float16", "main_grad_dtype": "float32"}},
    ),
}  # fmt: skip


@pytest.mark.needs_torch
@pytest.mark.parametrize(("before", "after", "both"), IN_ORDER.values(), ids=IN_ORDER)
def test_ranks_on_torch_that_add_in_order_have_the_bits_of_the_unpartitioned_model_from_their_state(
    tmp_path, before, after, both
):
    state = saved_by(tmp_path, **merged(before, both, TORCH))
    after = plan_of(steps=4, **merged(after, both, TORCH)).plan
    assert not is_checked_by_bound(after)
    assert [result.bitwise for result in resumed(state, after)] == [True, True]


@pytest.mark.needs_torch
@pytest.mark.parametrize("after", [{"topology": {"pp": 1, "tp": 2}}, SHARED_OUT, EP], ids=["tp2", "sharded", "ep2"])
def test_ranks_on_torch_in_another_order_are_within_the_bound_of_the_unpartitioned_model_from_their_state(
    tmp_path, after
):
    both = merged(MOE, TIED, TORCH, {"run": {"dtype": "float64"}})
    state = saved_by(tmp_path, **both)
    plan = plan_of(steps=4, **merged(after, both)).plan
    assert is_checked_by_bound(plan)
    first, _ = resumed(state, plan)
    assert first.agrees(parallel_bound(plan.spec))
    assert not resumed(state, plan, ("norm.weight", ""))[0].agrees(parallel_bound(plan.spec))


@pytest.mark.slow(but=["norm.weight--2", "layer.3.mlp.experts.down.weight-moment2-3"])
@pytest.mark.needs_paddle
@pytest.mark.parametrize(
    ("weight", "slot", "seen_in"),
    [
        ("norm.weight", "", 2),
        ("layer.1.mlp", "bias", 2),
        ("layer.0.attn.qkv.weight", "moment1", 3),
        ("layer.3.mlp.experts.down.weight", "moment2", 3),
        ("norm.weight", "beta2_power", 3),
    ],
)
def test_one_other_element_on_a_rank_is_another_result(tmp_path, weight, slot, seen_in):
    state = saved_by(tmp_path, **MOE)
    results = resumed(state, plan_of(steps=4, **merged(EP, MOE)).plan, (weight, slot))
    assert [result.bitwise for result in results] == [seen_in > 2, False]


@pytest.mark.needs_torch
@pytest.mark.parametrize(
    ("slot", "seen_in"), [("", 2), ("moment1", 3), ("moment2", 3), ("step", 3)]
)  # fmt: skip
def test_one_other_element_on_a_rank_is_another_result_on_torch(tmp_path, slot, seen_in):
    state = saved_by(tmp_path, **merged(SHARED_OUT, TORCH))
    results = resumed(state, plan_of(steps=4, **TORCH).plan, ("norm.weight", slot))
    assert [result.bitwise for result in results] == [seen_in > 2, False]


def require_same_as_from_the_beginning(tmp_path, **changes):
    state, whole = saved_by(tmp_path, **changes), plan_of(steps=4, **changes).plan
    from_beginning = [bits(step) for step in islice(references(whole), 2, None)]
    assert [bits(step) for step in references(whole, start(state, whole))] == from_beginning


@pytest.mark.slow(but=["dp"])
@pytest.mark.needs_paddle
@pytest.mark.parametrize(
    "changes", [merged({"topology": SP}, MOE, TIED), merged(SHARED_OUT, {"run": {"clip_norm": 0.5}})], ids=["tp", "dp"]
)
def test_the_ordered_reference_from_the_state_of_its_plan_has_the_bits_of_that_from_the_beginning(tmp_path, changes):
    require_same_as_from_the_beginning(tmp_path, **changes)


@pytest.mark.needs_torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_unpartitioned_torch_model_resumes_too(tmp_path, dtype):
    require_same_as_from_the_beginning(tmp_path, **merged(MOE, TORCH, {"run": {"dtype": dtype}}))


@pytest.mark.needs_paddle
def test_the_unpartitioned_paddle_model_resumes_too(tmp_path):
    from pipeproof.stages.reference.unpartitioned import run_unpartitioned

    state, whole = saved_by(tmp_path, **MOE), plan_of(steps=4, **MOE).plan
    from_beginning = [bits(step) for step in islice(run_unpartitioned(whole.spec), 2, None)]
    assert [bits(step) for step in run_unpartitioned(whole.spec, None, start(state, whole))] == from_beginning


def weights_alone(directory, state):
    """The weights of a state, all in one file, as from another program: no steps, no optimizer, no biases."""
    saved = find_state(state)
    arrays = {name: one for name, one in read_whole(saved).items() if saved.index.tensors[name].kind == "weight"}
    directory.mkdir()
    size, sha256 = write_file(directory / "all.safetensors", arrays)
    shards = tuple(Shard(tensor=k, offsets=(0,) * len(one.shape), extents=one.shape) for k, one in arrays.items())
    file = ShardFile(name="all.safetensors", rank=0, size_bytes=size, sha256=sha256, shards=shards)
    tensors = {name: saved.index.tensors[name] for name in arrays}
    changes = {"steps_done": 0, "tensors": tensors, "files": (file,), "sha256": None}
    (directory / INDEX_FILE).write_text(saved.index.model_copy(update=changes).model_dump_json(exclude_none=True))
    return directory


def require_begun_with_weights(tmp_path, **changes):
    state, plan = saved_by(tmp_path, **changes), plan_of(steps=2, **changes).plan
    weights = weights_alone(tmp_path / "weights", state)
    assert [result.bitwise for result in resumed(weights, plan, first_step=0)] == [True, True]
    began, trained = start(weights, plan), start(state, plan)
    assert (began.step, began.optimizer_state) == (0, {})
    first = next(references(plan, began))
    assert all(first.weights[name].tobytes() == trained.weights[name].tobytes() for name in began.weights)


@pytest.mark.needs_paddle
def test_weights_alone_begin_step_0_and_the_optimizer_begins_with_it(tmp_path):
    require_begun_with_weights(tmp_path, **merged(MOE, TIED))


@pytest.mark.needs_torch
def test_they_do_so_on_torch_too(tmp_path):
    require_begun_with_weights(tmp_path, **merged(MOE, TORCH))
