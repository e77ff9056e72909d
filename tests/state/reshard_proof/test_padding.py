"""Vocabularies that are padded to other sizes: ids go over, padding does not."""

import numpy as np
import pytest

from pipeproof.diagnostics.finding import PipeproofError
from pipeproof.diagnostics.source import PlanFileError
from pipeproof.stages.describe.synthetic import micro_batch
from pipeproof.state.regions import Region
from pipeproof.state.reshard.reshard_proof import prove
from pipeproof.state.reshard.reshard_targets import padding_map, with_vocabulary_of
from pipeproof.state.reshard.shard_layout import layout_of_plan
from pipeproof.state.tensor_map import RegionCopy, compose, invert, map_differences
from pipeproof.state.write_state import values_of
from tests.state.reshard_proof.plans import lowered

UNTIED = {"num_layers": 1, "tied_embedding": False}


def padded(tp, size, ids=19):
    """A plan whose vocabulary of 19 ids is padded for so many TP ranks."""
    return lowered({"pp": 1, "tp": tp}, {**UNTIED, "vocab_size": size, "unpadded_vocab_size": ids})


def map_between(one, other):
    source = layout_of_plan(one, "a")
    return source, padding_map(source.tensors, values_of(one.spec), other.spec.model), layout_of_plan(other, "b")


@pytest.mark.parametrize(("sizes"), [(20, 24), (24, 20), (19, 24), (24, 19), (20, 20)])
def test_the_proof_holds_between_all_paddings_of_the_same_ids(sizes):
    one, other = (padded(2 if size % 2 == 0 else 1, size) for size in sizes)
    assert prove(*map_between(one, other)) == ()


def test_ids_go_over_one_to_one_and_padding_is_zeros_of_weights_and_moments():
    _, found, _ = map_between(padded(2, 20), padded(4, 24))
    ids, padding = Region((0, 0), (19, 16)), Region((19, 0), (5, 16))
    for name in ("embed.weight", "optimizer/moment1/embed.weight"):
        assert found.tensors[name].copies == (RegionCopy(ids, name, ids), RegionCopy(padding, None, padding))
        assert found.dropped[name] == (Region((19, 0), (1, 16)),)
    for name in ("head.weight", "optimizer/moment2/head.weight"):
        assert found.tensors[name].shape == (16, 24)
        assert found.tensors[name].copies[1] == RegionCopy(Region((0, 19), (16, 5)), None, Region((0, 19), (16, 5)))
    assert found.tensors["optimizer/step/head.weight"].shape == ()


def test_forward_and_back_is_the_identity_but_for_padding():
    source, there, _ = map_between(padded(2, 20), padded(4, 24))
    back = invert(there, source.tensors)
    differ = list(map_differences(compose(there, back), padding_map(source.tensors, {}, padded(2, 20).spec.model)))
    assert {at.region for at in differ} == {Region((19, 0), (1, 16)), Region((0, 19), (16, 1))}
    assert all(at.first.source is None for at in differ)


@pytest.mark.parametrize(
    ("ids", "said"),
    [((None, None), "not given and is not given"), ((19, None), "19 and is not given"), ((19, 18), "19 and is 18")],
)
def test_other_sizes_are_refused_where_ids_are_not_said_to_be_the_same(ids, said):
    with pytest.raises(PipeproofError) as refused:
        map_between(padded(2, 20, ids[0]), padded(4, 24, ids[1]))
    (finding,) = refused.value.findings
    assert finding.code == "PP214"
    assert f"model.vocab_size was 20 and is 24, and model.unpadded_vocab_size was {said}" in finding.message


def test_the_values_of_a_state_are_those_of_a_plan_that_pads_otherwise():
    values, model = values_of(padded(2, 20).spec), padded(4, 24).spec.model
    assert with_vocabulary_of(values, model)["model.vocab_size"] == 24
    assert with_vocabulary_of(values_of(padded(2, 20, 18).spec), model)["model.vocab_size"] == 20


def test_no_token_is_of_the_padding_and_without_the_key_draws_are_those_of_ever():
    plain, some = padded(1, 19, None).spec, padded(4, 24).spec
    for step in range(3):
        one, other = micro_batch(plain, step, 1), micro_batch(some, step, 1)
        assert other.tokens.max() < 19
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.labels, other.labels)


def test_more_ids_than_rows_are_refused():
    with pytest.raises(PlanFileError, match="unpadded_vocab_size 25 is more than"):
        padded(4, 24, 25)
