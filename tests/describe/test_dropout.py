"""Dropout masks depend only on the element: parts equal parts of the whole, and every key has its own mask."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.stages.describe.boundary import MicroBatchSize
from pipeproof.stages.describe.gpt import describe_gpt
from pipeproof.stages.describe.model_family import stored_activations
from pipeproof.stages.describe.op_work import layer_work
from pipeproof.stages.describe.synthetic import DropoutKeys, dropout_rate, dropout_sites
from tests.plans import plan_spec

RATE = 0.3


def ranges(high):
    return st.tuples(st.integers(0, high), st.integers(0, high)).map(sorted).filter(lambda ends: ends[0] < ends[1])


@given(positions=ranges(8), heads=ranges(4), queries=ranges(8))
@settings(deadline=None, max_examples=60)
def test_a_part_is_a_part_of_the_whole(positions, heads, queries):
    """Hidden size 10: rows of the mask do not begin where the generator's counts do."""
    keys = DropoutKeys(plan_spec(model={"hidden_size": 10, "head_size": 2}), 1, 2)
    whole = keys.of_tokens("layer.0.attn", RATE, (0, 8))
    assert whole.shape == (2, 8, 10)
    assert np.array_equal(keys.of_tokens("layer.0.attn", RATE, tuple(positions)), whole[:, slice(*positions)])
    square = keys.of_attention("layer.0.attn", RATE, (0, 4), (0, 8))
    assert square.shape == (2, 4, 8, 8)
    part = keys.of_attention("layer.0.attn", RATE, tuple(heads), tuple(queries))
    assert np.array_equal(part, square[:, slice(*heads), slice(*queries), : queries[1]])


def test_every_key_has_a_mask_of_its_own():
    def mask(*, step=0, index=0, layer="layer.0.attn", seed=0, rate=0.5):
        return DropoutKeys(plan_spec(run={"seed": seed}), step, index).of_tokens(layer, rate, (0, 8))

    others = [{}, {"step": 1}, {"index": 1}, {"layer": "layer.0.mlp"}, {"layer": "layer.1.attn"}, {"seed": 1}]
    masks = [mask(**other) for other in others]
    assert np.array_equal(mask(), masks[0])
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert 64 < np.count_nonzero(one != other) < 192, "of 256 elements, about half differ by chance"


def test_masks_of_tokens_and_of_attention_are_not_the_same_words():
    keys = DropoutKeys(plan_spec(), 0, 0)
    tokens, probabilities = keys.of_tokens("x", 0.5, (0, 8)), keys.of_attention("x", 0.5, (0, 4), (0, 8))
    assert not np.array_equal(tokens.reshape(-1), probabilities.reshape(-1)[: tokens.size])


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
def test_the_share_that_is_dropped_is_the_rate(rate):
    """Within five standard deviations of a binomial; elements dropped at a rate are dropped at every larger rate."""
    keys = DropoutKeys(plan_spec(model={"hidden_size": 512}, schedule={"micro_batch_size": 8}), 0, 0)
    kept = keys.of_tokens("x", rate, (0, 8))
    deviation = (rate * (1 - rate) / kept.size) ** 0.5
    assert abs(1 - kept.mean() - rate) < 5 * deviation
    assert not np.any(keys.of_tokens("x", rate / 2, (0, 8)) < kept)


def test_micro_batches_have_masks_of_their_own_sizes():
    sizes = {"num_micro_batches": 2, "last_micro_batch_size": 1, "seq_lengths": [8, 6]}
    uneven = plan_spec(schedule=sizes)
    assert DropoutKeys(uneven, 0, 3).of_tokens("x", RATE, (0, 6)).shape == (1, 6, 16)
    assert DropoutKeys(uneven, 0, 2).of_tokens("x", RATE, (0, 8)).shape == (2, 8, 16)


def test_one_number_is_that_of_all_places():
    assert plan_spec(model={"dropout": 0.2}) == plan_spec(
        model={"dropout": {"embedding": 0.2, "attention": 0.2, "hidden": 0.2}}
    )
    some = plan_spec(model={"dropout": {"hidden": 0.1}})
    assert (dropout_rate(some, "hidden"), dropout_rate(some, "attention")) == (0.1, 0.0)
    assert dropout_sites(some) == {"hidden"}
    assert dropout_sites(plan_spec()) == dropout_sites(plan_spec(model={"dropout": 0})) == frozenset()


def bytes_of(spec, layer, size=None):
    layers = [one for one in describe_gpt(spec) if one.name == layer]
    size = size or MicroBatchSize(spec.model.seq_length, spec.schedule.micro_batch_size)
    return {
        held.name: held.num_bytes for held in stored_activations(spec, layers, size) if held.lifetime.is_from_forward
    }


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_masks_take_a_byte_an_element(sequence_parallel):
    """16 tokens of 16 elements, on each of two ranks all of them or half; 2 x 4 heads x 8 x 8 probabilities."""
    topology = {"tp": 2, "sequence_parallel": sequence_parallel}
    unfused = {"memory": {"attention": "unfused"}, "topology": topology}
    without, dropped = plan_spec(**unfused), plan_spec(**unfused, model={"dropout": 0.1})
    own = 256 // (2 if sequence_parallel else 1)
    before, after = bytes_of(without, "layer.0"), bytes_of(dropped, "layer.0")
    probabilities = 2 * 2 * 8 * 8
    more = {"attn.dropout": own, "mlp.dropout": own, "attn.core": before["attn.core"] + probabilities * (1 + 4)}
    assert after == {**before, **more}
    assert bytes_of(dropped, "embed") == {**bytes_of(without, "embed"), "embed.dropout": own}


def test_flash_attention_keeps_no_mask():
    without, dropped = plan_spec(), plan_spec(model={"dropout": {"attention": 0.1}})
    assert bytes_of(without, "layer.0") == bytes_of(dropped, "layer.0")


def works_of(spec, layer, *, flash):
    return layer_work(spec, layer, MicroBatchSize(8, 2), 2, flash=flash)


def test_each_mask_is_multiplied_by_forward_and_back():
    """Reads a value and a byte, writes a value; nothing else changes, and W has no part in it."""
    without, dropped = plan_spec(), plan_spec(model={"dropout": 0.1})
    for layer, numbers in {
        "embed": {"embed.dropout": 256},
        "layer.0": {"attn.dropout": 256, "mlp.dropout": 256, "attn.core_dropout": 2 * 4 * 64},
    }.items():
        new = [work for work in works_of(dropped, layer, flash=False) if "dropout" in work.name]
        assert {(str(work.phase), work.name): (work.flops, work.num_bytes) for work in new} == {
            (phase, name): (numel, 5 * numel) for name, numel in numbers.items() for phase in "FI"
        }
        rest = [work for work in works_of(dropped, layer, flash=False) if work not in new]
        assert rest == list(works_of(without, layer, flash=False))
    assert "attn.core_dropout" not in {work.name for work in works_of(dropped, "layer.0", flash=True)}


def test_clamping_is_work_of_the_processor_and_not_of_memory():
    flops, num_bytes = (
        [
            {
                str(work.phase): getattr(work, what)
                for work in works_of(spec, "layer.0", flash=True)
                if "swiglu" in work.name
            }
            for spec in (plan_spec(), plan_spec(model={"swiglu_limit": 7.0}))
        ]
        for what in ("flops", "num_bytes")
    )
    assert num_bytes[0] == num_bytes[1]
    numel = 16 * 32
    assert [flops[0], flops[1]] == [{"F": 5 * numel, "I": 10 * numel}, {"F": 10 * numel, "I": 17 * numel}]
