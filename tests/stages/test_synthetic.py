"""Weights and tokens depend only on their purpose."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.synthetic import IGNORED, initial_weight, loss_scale, micro_batch
from tests.plans import plan_spec

NORMALIZATIONS = ["global_tokens", "mean_of_micro_batches"]


def parameters(plan):
    return {p.name: p for layer in describe_gpt(plan) for p in layer.parameters}


def test_weights_do_not_depend_on_the_topology():
    one, four = (
        plan_spec(topology={"pp": 1}),
        plan_spec(topology={"pp": 2, "tp": 2, "dp": 3, "sequence_parallel": True}),
    )
    assert set(parameters(one)) == set(parameters(four))
    for name, parameter in parameters(one).items():
        again = initial_weight(parameters(four)[name], 7, "float32")
        assert initial_weight(parameter, 7, "float32").tobytes() == again.tobytes()


def test_every_weight_has_numbers_of_its_own_and_every_seed_too():
    drawn = [p for p in parameters(plan_spec()).values() if p.init_std is not None]
    starts = {initial_weight(p, seed, "float64").ravel()[0] for p in drawn for seed in (0, 1)}
    assert len(starts) == 2 * len(drawn)


def test_weights_have_the_described_spread_and_norms_are_ones():
    every = parameters(plan_spec(model={"hidden_size": 64, "vocab_size": 256}))
    embedding = initial_weight(every["embed.weight"], 0, "float64")
    assert embedding.std() == pytest.approx(every["embed.weight"].init_std, rel=0.05)
    assert abs(embedding.mean()) < 0.001
    assert (initial_weight(every["norm.weight"], 0, "float32") == 1.0).all()


def test_float32_weights_are_the_rounded_float64_ones():
    parameter = parameters(plan_spec())["head.weight"]
    wide = initial_weight(parameter, 3, "float64")
    assert initial_weight(parameter, 3, "float32").tobytes() == wide.astype(np.float32).tobytes()


def test_batches_differ_by_step_index_and_seed_and_repeat_exactly():
    plan = plan_spec(run={"seed": 4})
    tokens = [micro_batch(plan, step, index).tokens.tobytes() for step in range(3) for index in range(8)]
    tokens.append(micro_batch(plan_spec(run={"seed": 5}), 0, 0).tokens.tobytes())
    assert len(set(tokens)) == len(tokens)
    assert micro_batch(plan, 0, 0).tokens.tobytes() == tokens[0]


def test_counts_are_uneven_within_the_base_plan():
    plan = plan_spec()
    assert len({micro_batch(plan, 0, index).num_counted for index in range(4)}) > 1


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_every_micro_batch_has_its_own_size_on_all_data_parallel_ranks(normalization):
    plan = plan_spec(
        topology={"dp": 2},
        schedule={"num_micro_batches": 3, "micro_batch_size": 2, "last_micro_batch_size": 1, "seq_lengths": [8, 3, 5]},
        loss={"normalization": normalization},
    )
    batches = [micro_batch(plan, 0, index) for index in range(6)]
    assert [batch.tokens.shape for batch in batches] == [(2, 8), (2, 3), (1, 5)] * 2
    assert all(1 <= batch.num_counted <= batch.labels.size for batch in batches)
    assert sum(batch.num_counted * loss_scale(plan, 0, i) for i, batch in enumerate(batches)) == pytest.approx(1.0)
    whole = micro_batch(plan_spec(topology={"dp": 2}, schedule={"num_micro_batches": 3}), 0, 0)
    assert batches[0].tokens.tobytes() == whole.tokens.tobytes(), "a size changes no other micro-batch"


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_expert_parallel_ranks_have_micro_batches_of_their_own_in_one_mean(normalization):
    plan = plan_spec(
        topology={"dp": 2, "ep": 3}, schedule={"num_micro_batches": 2}, loss={"normalization": normalization}
    )
    batches = [micro_batch(plan, 0, index) for index in range(12)]
    assert len({batch.tokens.tobytes() for batch in batches}) == 12
    assert sum(batch.num_counted * loss_scale(plan, 0, i) for i, batch in enumerate(batches)) == pytest.approx(1.0)


plans = st.builds(
    lambda rows, length, vocab, num, dp, seed, normalization: plan_spec(
        model={"seq_length": length, "vocab_size": vocab},
        topology={"dp": dp},
        schedule={"micro_batch_size": rows, "num_micro_batches": num},
        loss={"normalization": normalization},
        run={"seed": seed},
    ),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(2, 50),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2**63 - 1),
    st.sampled_from(NORMALIZATIONS),
)


@given(plans, st.integers(0, 3), st.integers(0, 5))
def test_labels_are_the_next_tokens_of_a_leading_part_of_each_row(plan, step, index):
    batch = micro_batch(plan, step, index)
    assert batch.tokens.shape == batch.labels.shape == (plan.schedule.micro_batch_size, plan.model.seq_length)
    assert batch.tokens.dtype == batch.labels.dtype == np.int64
    assert ((batch.tokens >= 0) & (batch.tokens < plan.model.vocab_size)).all()
    assert 1 <= batch.num_counted <= batch.labels.size
    for tokens, labels in zip(batch.tokens, batch.labels, strict=True):
        counted = int((labels != IGNORED).sum())
        assert (labels[counted:] == IGNORED).all()
        shifted = min(counted, len(tokens) - 1)
        assert (labels[:shifted] == tokens[1 : shifted + 1]).all()


@given(plans)
def test_the_scales_make_one_mean_of_all_counted_tokens_or_of_micro_batches(plan):
    num_global = plan.topology.dp * plan.schedule.num_micro_batches
    counts = [micro_batch(plan, 1, index).num_counted for index in range(num_global)]
    scales = [loss_scale(plan, 1, index) for index in range(num_global)]
    assert sum(c * s for c, s in zip(counts, scales, strict=True)) == pytest.approx(1.0)
    if plan.loss.normalization == "global_tokens":
        assert len(set(scales)) == 1
    else:
        shares = [c * s for c, s in zip(counts, scales, strict=True)]
        assert shares == pytest.approx([1.0 / num_global] * num_global)
