"""End of a step in data-parallel training: a sharded optimizer, and sums that are issued when ready."""

from contextlib import nullcontext

import pytest

from tests.plans import subject

pytestmark = [pytest.mark.needs_paddle, pytest.mark.usefixtures("paddle_started")]

MODEL = {"vocab_size": 33, "ffn_size": 36, "seq_length": 4}
"""33 rows of 16 and 36 columns do not divide evenly by three and four."""
MOE = {"moe": {"num_experts": 4, "top_k": 2, "ffn_size": 18}}
PLANS = {
    "dp": ({"dp": 2}, {"kind": "1f1b"}, {}),
    "dp 3": ({"pp": 1, "dp": 3}, {"kind": "gpipe"}, {}),
    "sp, dp": ({"tp": 2, "dp": 2, "sequence_parallel": True}, {"kind": "zb_h1"}, {"vocab_size": 34}),
    "chunks": ({"dp": 2}, {"kind": "interleaved", "num_chunks": 2}, {}),
    "v, tied": ({"dp": 2}, {"kind": "zb_v", "num_chunks": 2}, {"tied_embedding": True}),
    "loop, tied": ({"dp": 2}, {"kind": "interleaved", "num_chunks": 2}, {"tied_embedding": True}),
    "cp": ({"pp": 1, "cp": 2, "dp": 2}, {"kind": "1f1b"}, {}),
    "experts": ({"pp": 1, "ep": 2, "dp": 2}, {"kind": "1f1b"}, MOE),
}
SHARDED = {"memory": {"shard_optimizer": "dp"}}
SHARDED_GRADIENTS = {"memory": {"shard_optimizer": "dp", "shard_gradients": "dp"}}
SHARDED_WEIGHTS = {"memory": SHARDED_GRADIENTS["memory"] | {"shard_weights": "dp"}}
COPIES = {"copies": ({"dp": 2}, {"kind": "dualpipe", "num_micro_batches": 4}, {})}


def make(name, *, steps=2, when="at_end", own=(), more=(), **sections):
    topology, schedule, model = (PLANS | COPIES)[name]
    run = {"steps": steps, **dict(more)}
    model = MODEL | model | dict(own)
    schedule = {"num_micro_batches": 2, **schedule, "reduce_gradients": when}
    return subject(topology=topology, schedule=schedule, model=model, run=run, **sections).unfolded().plan


def compared_with_references(plan):
    from tests.exec.in_memory import compared

    return compared(plan)


CLIPPED = {"clip_norm": 0.05}
SGD, WIDE = {"optimizer": "sgd"}, {"main_grad_dtype": "float64"}
UNTIED = [name for name in PLANS if "tied" not in name]


@pytest.mark.slow(
    but=["optimizer-dp-more0", "optimizer-chunks-more3", "optimizer-v, tied-more4", "optimizer-v, tied-more10",
         "optimizer-copies-more11", "optimizer-sp, dp-more2", "gradients-sp, dp-more16", "gradients-chunks-more20",
         "weights-sp, dp-more24"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("sharded", "name", "more"),
    [
        *(("optimizer", name, CLIPPED) for name in (*PLANS, *COPIES)),
        *(("optimizer", name, {}) for name in ("dp 3", "v, tied", "copies")),
        ("optimizer", "sp, dp", WIDE | CLIPPED),
        ("optimizer", "chunks", SGD),
        *(("gradients", name, CLIPPED) for name in UNTIED),
        ("gradients", "chunks", SGD),
        ("gradients", "sp, dp", WIDE),
        *(("weights", name, CLIPPED) for name in UNTIED),
    ],
)
def test_sharded_states_have_the_bits_of_the_reference(sharded, name, more):
    from pipeproof.stages.reference.bound import parallel_bound

    plan = make(
        name, more=more, **{"optimizer": SHARDED, "gradients": SHARDED_GRADIENTS, "weights": SHARDED_WEIGHTS}[sharded]
    )
    steps = compared_with_references(plan)
    assert all(step.bitwise for step in steps)
    assert max(one.unpartitioned_max_rel_diff for one in steps[0].gradients) <= parallel_bound(plan.spec)


@pytest.mark.needs_torch
@pytest.mark.slow(but=["sp, dp"])
@pytest.mark.parametrize("name", ["dp 3", "sp, dp", "chunks", "experts"])
def test_sharded_weights_change_no_bit_on_torch(name):
    from tests.exec.in_memory import run_all

    (kept, _), (released, adapters) = (
        run_all(make(name, more={"backend": "torch", **CLIPPED}, **memory))
        for memory in (SHARDED_GRADIENTS, SHARDED_WEIGHTS)
    )
    for ranks in zip(kept, released, strict=True):
        for one, other in zip(*ranks, strict=True):
            assert one.loss == other.loss
            assert [g.tobytes() for g in one.gradients.values()] == [g.tobytes() for g in other.gradients.values()]
    weights = [weight for stage in adapters[0].stages.values() for weight in stage.parameters.values()]
    assert {weight.main.untyped_storage().size() for weight in weights} == {0}


@pytest.mark.slow(but=["loop, tied", "sp, dp"])
@pytest.mark.parametrize("name", ["chunks", "v, tied", "loop, tied", "sp, dp", "experts"])
def test_sums_that_are_issued_when_ready_have_the_bits_of_the_reference(name):
    steps = compared_with_references(make(name, when="when_ready", more=CLIPPED))
    assert all(step.bitwise for step in steps)


@pytest.mark.slow
def test_neither_changes_a_bit_over_twenty_steps():
    plain = compared_with_references(make("chunks", steps=20))
    both = compared_with_references(make("chunks", steps=20, when="when_ready", **SHARDED))
    assert len(both) == 20
    assert all(step.bitwise for step in both)
    md5s = ([[(one.name, one.md5) for one in step.gradients] for step in steps] for steps in (plain, both))
    assert next(md5s) == next(md5s)
    assert [step.loss.tobytes() for step in plain] == [step.loss.tobytes() for step in both]


def test_a_share_may_be_empty():
    """Three ranks have 2, 2 and 0 of 4 elements."""
    plan = make("dp 3", own={"hidden_size": 4, "num_heads": 1, "ffn_size": 6}, **SHARDED)
    assert all(step.bitwise for step in compared_with_references(plan))


@pytest.mark.parametrize(("more", "codes"), [(WIDE, ["PP909"]), ({}, [])])
def test_sharded_weights_with_main_gradients_are_not_run(more, codes):
    from pipeproof.diagnostics.finding import PipeproofError
    from pipeproof.exec.rank.executor_support import require_executable

    with pytest.raises(PipeproofError) if codes else nullcontext() as refused:
        require_executable(subject(topology={"dp": 2}, run=more, **SHARDED_WEIGHTS))
    assert codes == ([finding.code for finding in refused.value.findings] if codes else [])
