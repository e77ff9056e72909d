"""Stages with nearly equal work: the best of all cuts, and models whose ends cost more than their blocks."""

import random
from itertools import combinations, pairwise

import pytest
import torch

from pipeproof.exec.train.torch.cut_transformers import stages_of_transformers
from pipeproof.exec.train.torch.model_parts import balanced
from tests.train.test_block_layers import t5
from tests.train.test_cut_transformers import model_of

pytestmark = [pytest.mark.needs_torch, pytest.mark.needs("transformers")]


def loads(work, sizes):
    before, *blocks, after = work
    ends = [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    own = [sum(blocks[begin:end]) for begin, end in pairwise(ends)]
    own[0] += before
    own[-1] += after
    return own


def all_sizes(num_blocks, num_stages):
    for bars in combinations(range(num_blocks + num_stages - 1), num_stages - 1):
        yield tuple(end - begin - 1 for begin, end in pairwise((-1, *bars, num_blocks + num_stages - 1)))


def rank(work, sizes):
    own = loads(work, sizes)
    edges = (sizes[0] if work[0] else 0) + (sizes[-1] if work[-1] else 0)
    if len(sizes) == 1:
        edges = sizes[0] if work[0] or work[-1] else 0
    return max(own), sizes.count(0), sum(each**2 for each in own), edges, tuple(-size for size in sizes)


@pytest.mark.parametrize("seed", range(200))
def test_the_sizes_are_the_best_of_all_cuts(seed):
    rng = random.Random(seed)
    num_blocks = rng.randint(1, 8)
    num_stages, most = rng.randint(1, num_blocks), rng.choice((2, 4, 100))
    work = [rng.randint(0, 5), *(rng.randint(1, most) for _ in range(num_blocks)), rng.choice((0, rng.randint(0, 300)))]
    every = [*all_sizes(num_blocks, num_stages)]
    full = [sizes for sizes in every if 0 not in sizes]
    best = min(every if min(rank(work, s)[0] for s in every) < min(rank(work, s)[0] for s in full) else full,
               key=lambda sizes: rank(work, sizes))  # fmt: skip
    assert balanced(work, num_stages).sizes == best


@pytest.mark.parametrize("num_blocks", range(1, 13))
def test_equal_blocks_are_cut_evenly_and_the_first_stages_have_more(num_blocks):
    for num_stages in range(1, num_blocks + 1):
        sizes = balanced([0, *[7] * num_blocks, 0], num_stages).sizes
        assert sizes == tuple(num_blocks // num_stages + (n < num_blocks % num_stages) for n in range(num_stages))


def sizes_of(model, num_stages, **options):
    stages = stages_of_transformers(model, num_stages, **options)
    return [len(stage.blocks) for stage in stages.values()]


def test_a_large_vocabulary_leaves_fewer_blocks_to_the_last_stage():
    assert sizes_of(model_of(num_hidden_layers=8, vocab_size=800), 2) == [6, 2]
    assert sizes_of(model_of(num_hidden_layers=8, vocab_size=800), 2, blocks_per_stage="even") == [4, 4]
    assert sizes_of(model_of(num_hidden_layers=8, vocab_size=20_000), 3) == [4, 4, 0]
    assert sizes_of(model_of(num_hidden_layers=8, vocab_size=4), 2) == [4, 4]


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma3"])
def test_every_device_gives_one_cut(name):
    with torch.device("meta"):
        meta = model_of(name, num_hidden_layers=7, layer_types=None, vocab_size=300)
    real = model_of(name, num_hidden_layers=7, layer_types=None, vocab_size=300)
    assert sizes_of(meta, 3) == sizes_of(real, 3)
    assert sizes_of(real, 3)[-1] < 2


def test_an_encoder_and_a_decoder_share_the_stages_by_their_work():
    long = {"input_ids": torch.full((2, 40), 5), "decoder_input_ids": torch.full((2, 4), 5)}
    short = {name: ids.flip(0)[:, :4] for name, ids in long.items()} | {"decoder_input_ids": torch.full((2, 40), 5)}
    assert sizes_of(t5(), 3, example=long) == [1, 1, 2]
    assert sizes_of(t5(), 3, example=short) == [2, 1, 1]


def test_a_forward_that_reads_values_is_counted_with_them(monkeypatch):
    monkeypatch.setattr("pipeproof.exec.train.torch.cut_transformers.without_values", lambda _: 1 / 0)
    assert sizes_of(model_of(num_hidden_layers=8, vocab_size=800), 2) == [6, 2]


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="blocks_per_stage is 'evenly': give 'even'"):
        stages_of_transformers(model_of(), 2, blocks_per_stage="evenly")
