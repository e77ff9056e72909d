"""The split of a step's arguments: random nested arguments, block masks, packed documents, and refusals."""

import dataclasses
import re
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask
from torch.utils import _pytree as pytree

from pipeproof.exec.train.torch.signatures import digests_of, require_same_digests
from pipeproof.exec.train.torch.stage_keywords import Signature, StageKeywords, StepInputs
from pipeproof.exec.train.torch.step_inputs import SplitRules, StepContract
from pipeproof.torch import MicroBatches, PipelineError, packed

pytestmark = pytest.mark.needs_torch

Pair = namedtuple("Pair", "left right")  # noqa: PYI024 - as scripts write it


class Anything(nn.Module):
    def forward(self, x, **kwargs): ...


class Last(nn.Module):
    def forward(self, h, mask=None, *, scale=1.0): ...


def contract(stages=None, *, has_loss_fn=True, split_dims=(), same=()):
    keywords = StageKeywords(
        [Signature.of(stage) for stage in stages or [Anything(), Anything()]], has_loss_fn=has_loss_fn
    )
    return StepContract(keywords, SplitRules(dict(split_dims), frozenset(same)))


def split(value, num=2, rows=4, **rules):
    """The micro-batches of one keyword argument, with ``rows`` rows in all."""
    data = contract(**rules).step_data(
        StepInputs((torch.zeros(rows),), None, {"value": value}, {}), num, rows, [0], is_last=False
    )
    return [kwargs["value"] for kwargs in data.kwargs[0]]


def refusal(value, num=2, rows=4, **rules):
    with pytest.raises(PipelineError) as error:
        split(value, num, rows, **rules)
    return str(error.value)


# --- random nested values ---


@dataclasses.dataclass
class Registered:
    inner: object
    factor: object


pytree.register_pytree_node(
    Registered, lambda value: ([value.inner, value.factor], None), lambda items, _: Registered(*items)
)


def containers(inner):
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1),
        st.builds(Pair, inner, inner),
        st.builds(Registered, inner, inner),
        st.builds(OrderedDict, st.dictionaries(st.sampled_from("ab"), inner, min_size=1)),
    )


def nested(rows):
    """Values by their structure: a tensor is a tuple of the sizes after the rows."""
    tensor = st.lists(st.integers(1, 4), max_size=2).map(
        lambda sizes: torch.randn(rows, *sizes, generator=torch.Generator().manual_seed(len(sizes)))
    )
    scalar = st.sampled_from([None, True, 3, 0.5, "text", torch.tensor(2.0), torch.float32])
    holding = st.recursive(tensor, lambda inner: containers(st.one_of(inner, tensor)), max_leaves=6)
    return st.one_of(tensor, scalar, holding, st.tuples(holding, scalar), st.builds(Pair, scalar, holding))


def rows_of(value, start, stop):
    """Rows of all tensors of a value, as in a plain loop over micro-batches."""
    return pytree.tree_map_only(torch.Tensor, lambda x: x[start:stop] if x.dim() else x, value)


def same(left, right):
    left, form = pytree.tree_flatten(left)
    right, other = pytree.tree_flatten(right)
    return form == other and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(left, right, strict=True)
    )


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_random_nested_values_are_split_as_a_loop_over_micro_batches_does(data):
    num, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    value = data.draw(nested(num * size))
    parts = split(value, num, num * size)
    for index, part in enumerate(parts):
        assert same(part, rows_of(value, index * size, (index + 1) * size))


def test_dims_by_name_and_path_and_texts_of_each_row():
    positions = torch.arange(24).reshape(3, 4, 2)
    assert split(positions, split_dims={"value": 1})[1].equal(positions[:, 2:])
    nested_value = {"axes": positions, "x": torch.arange(4)}
    part = split(nested_value, split_dims={"value.axes": -2})[1]
    assert part["axes"].equal(positions[:, 2:])
    assert part["x"].tolist() == [2, 3]
    flat = torch.arange(12)  # three values for each row
    assert split(flat, split_dims={"value": 0})[1].tolist() == [6, 7, 8, 9, 10, 11]
    assert split(["a", "b", "c", "d"], split_dims={"value": 0}) == [["a", "b"], ["c", "d"]]
    assert split([positions, ("a", "b")], same={"value.1"}, split_dims={"value.0": 1})[0][1] == ("a", "b")


def test_values_by_micro_batch_may_be_nested():
    values = [{"boxes": torch.zeros(7, 4)}, {"boxes": torch.zeros(2, 4)}]
    assert split({"all": MicroBatches(values)})[1]["all"] is values[1]
    assert "3 micro-batches" in refusal(MicroBatches([1, 2, 3]))


def test_jagged_tensors_are_split_by_rows():
    parts = [torch.randn(n, 2) for n in (3, 1, 2, 4)]
    value = torch.nested.nested_tensor(parts, layout=torch.jagged)
    second = split(value)[1].unbind()
    assert [x.shape[0] for x in second] == [2, 4]
    assert second[1].equal(parts[3])


# --- refused ---


class Opaque:
    def __init__(self):
        self.rows = torch.zeros(4)


class Subclass(dict):
    pass


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(8, 4), "value has 8 rows .shape .8, 4.., and the step has 4: 2 micro-batches of 2"),
        (torch.zeros(3, 4, 2), "split_dims={'value': 1} for the rows in dim 1"),
        ({"inner": [torch.zeros(4), torch.zeros(6)]}, "value.inner.1 has 6 rows"),
        (["a", "b", "c", "d"], "list of 4 values.*split_dims={'value': 0}"),
        ((224, 224), "tuple of 2 values"),
        ({"names": ["a", "b"]}, "value.names is a list of 2 values"),
        (Opaque(), "value is a Opaque.*same_kwargs=.'value'.*register_pytree_node"),
        (Subclass(x=torch.zeros(4)), r"value is a Subclass.*pass dict\(..\)"),
        (np.zeros(4), "from_numpy"),
        (torch.eye(4).to_sparse(), "layout torch.sparse_coo"),
        (lambda b: b, "same_kwargs"),
        (torch.zeros(4, 4, 2, dtype=torch.int64), r"dims \[0, 1\] may be the rows"),
    ],
)
def test_a_value_with_unknown_rows_is_refused(value, words):
    text = refusal(value)
    assert re.search(words, text), text
    assert "MicroBatches(" in text
    assert "same_kwargs=['value" in text
    path = re.search(r"same_kwargs=\['([^']*)'\]", text).group(1)  # the advice works
    split(value, same={path} if "." not in path or "inner" not in path else {"value.inner"})


def test_offsets_are_refused_even_if_there_are_as_many_as_rows():
    offsets = torch.tensor([0, 3, 5, 7, 8, 10])
    keywords = {"cu_seqlens": offsets}
    with pytest.raises(PipelineError, match=r"cu_seqlens .*packed\(..\)"):
        contract().step_data(StepInputs((torch.zeros(6),), None, keywords, {}), 2, 6, [0], is_last=False)


def test_rules_are_checked():
    keywords = StageKeywords([Signature.of(Last())], has_loss_fn=True)
    with pytest.raises(PipelineError, match=r"'postion_ids'.*there are h, mask, scale and target"):
        SplitRules({"postion_ids": 1}, frozenset()).require_valid(keywords)
    with pytest.raises(PipelineError, match="use one of them"):
        SplitRules({"x": 1}, frozenset({"x"})).require_valid(contract().keywords)
    assert "no such value" in refusal({"x": torch.zeros(4)}, split_dims={"value.y": 1})
    assert "whose shape is [3, 4]" in refusal(torch.zeros(3, 4), split_dims={"value": 2})
    assert "size 3 in dim 0" in refusal(torch.zeros(3, 4), split_dims={"value": 0})


# --- block masks ---


def documents(rows, length=16):
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(3, (rows, length), generator=generator).sort().values


def block_mask(document, rows):
    def same_document(b, h, q, k):
        return (document[b, q] == document[b, k]) & (q >= k)

    return create_block_mask(same_document, rows, None, 16, 16, device="cpu", BLOCK_SIZE=4)


def test_a_block_mask_is_split_along_its_rows():
    document = documents(6)
    mask = block_mask(document, 6)
    for index, part in enumerate(split(mask, 3, 6)):
        expected = block_mask(document[2 * index : 2 * index + 2], 2)
        assert part.shape == expected.shape
        for name, value in vars(expected).items():
            if isinstance(value, torch.Tensor):
                assert getattr(part, name).equal(value), name
        dense = [create_mask(each.mask_mod, 2, 1, 16, 16, device="cpu") for each in (part, expected)]
        assert dense[0].equal(dense[1])


def test_a_block_mask_of_one_row_is_shared_and_of_other_rows_refused():
    shared = block_mask(documents(1), None)
    assert all(part is shared for part in split({"mask": shared})[0].values())
    assert "BlockMask of 3 rows, and the step has 4" in refusal(block_mask(documents(3), 3))


# --- which stage gets a value ---


class First(nn.Module):
    def forward(self, tokens, position_ids=None): ...


class Middle(nn.Module):
    def forward(self, h, **kwargs): ...


class Head(nn.Module):
    def forward(self, h, *, attention_mask=None): ...


def test_a_collators_dict_goes_to_the_stages_by_their_signatures():
    batch = {"input_ids": torch.arange(4), "attention_mask": torch.ones(4), "labels": torch.arange(4)}
    data = contract([First(), Middle(), Head()]).step_data(
        StepInputs((), None, batch, {}), 2, 4, [0, 1, 2], is_last=True
    )
    assert [x.tolist() for (x,) in data.args] == [[0, 1], [2, 3]]
    assert [t.tolist() for t in data.targets] == [[0, 1], [2, 3]]
    assert {number: list(kwargs[0]) for number, kwargs in data.kwargs.items()} == {
        1: ["attention_mask"],
        2: ["attention_mask"],
    }


class WithLabels(nn.Module):
    def forward(self, h, labels=None): ...


def test_labels_go_to_a_last_stage_that_returns_the_loss():
    data = contract([First(), WithLabels()], has_loss_fn=False).step_data(
        StepInputs((), None, {"input_ids": torch.arange(4), "labels": torch.arange(4)}, {}), 2, 4, [0, 1], is_last=True
    )
    assert data.kwargs[1][1]["labels"].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("kwargs", "stage_kwargs", "words"),
    [
        ({"attention_musk": torch.ones(4)}, {}, "no stage accepts the keyword argument 'attention_musk'.*scale"),
        ({}, {1: {"flag": True}}, "'flag' for stage 1"),
        ({}, {2: {"scale": 1.0}}, "key 2.*from 0 to 1"),
        ({"tokens": torch.ones(4)}, {}, "no stage accepts the keyword argument 'tokens'"),
    ],
)
def test_a_keyword_that_no_stage_accepts_is_refused(kwargs, stage_kwargs, words):
    with pytest.raises(PipelineError, match=words):
        contract([First(), Last()]).step_data(
            StepInputs((torch.zeros(4),), None, kwargs, stage_kwargs), 2, 4, [1], is_last=False
        )


def test_stages_have_keyword_arguments_of_their_own():
    data = contract([Anything(), Last()]).step_data(
        StepInputs((torch.zeros(4),), None, {"scale": 2.0}, {1: {"scale": torch.arange(4)}}), 2, 4, [0, 1], is_last=True
    )
    assert data.kwargs[0][0] == {"scale": 2.0}
    assert data.kwargs[1][1]["scale"].tolist() == [2, 3]


# --- the example ---


def test_the_example_obeys_the_same_rules():
    one = StepInputs((torch.zeros(2, 3),), None, {"position_ids": torch.zeros(3, 2, 3)}, {})
    with pytest.raises(PipelineError, match=r"position_ids of the example has 3 rows.*its micro-batch has 2"):
        contract().example_data(one, 4, 2)
    data, rows = contract(split_dims={"position_ids": 1}).example_data(one, 4, 2)
    assert rows == 2
    assert data.kwargs[1][3]["position_ids"].shape == (3, 2, 3)
    by_index = StepInputs((MicroBatches([torch.zeros(2), torch.zeros(3)]),), None, {}, {})
    with pytest.raises(PipelineError, match=r"\[2, 3\] rows"):
        contract().example_data(by_index, 2, 2)


# --- packed documents ---


def collated(documents_of_part):
    """A collator's output for some documents: one row of tokens, positions, offsets, and the longest length."""
    sizes = [len(each) for each in documents_of_part]
    return {
        "input_ids": torch.cat(documents_of_part)[None],
        "labels": torch.cat(documents_of_part)[None],
        "position_ids": torch.cat([torch.arange(size) for size in sizes])[None],
        "seq_idx": torch.cat([torch.full((size,), index) for index, size in enumerate(sizes)])[None],
        "cu_seq_lens_q": torch.tensor([0, *sizes]).cumsum(0).int(),
        "max_length_q": max(sizes),
    }


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.integers(1, 4), st.booleans())
def test_packed_micro_batches_are_what_a_collator_makes_of_their_documents(sizes, num, has_offsets):
    every = [torch.arange(size) + 10 * index for index, size in enumerate(sizes)]
    batch = collated(every)
    if not has_offsets:  # documents begin where positions fall
        del batch["cu_seq_lens_q"]
    if len(sizes) < num:
        with pytest.raises(PipelineError, match=f"{len(sizes)} documents are fewer than {num}"):
            packed(**batch, num_micro_batches=num)
        return
    result = packed(**batch, num_micro_batches=num)
    begin = 0
    for index in range(num):
        count = int(result["seq_idx"][index].max()) + 1
        part = collated(every[begin : begin + count])
        assert all(same(result[name][index], part[name]) for name in batch)
        begin += count
    assert begin == len(sizes)


def test_packs_keep_their_form_and_documents_are_divided_by_tokens():
    ids, offsets = torch.arange(10), torch.tensor([0, 3, 5, 7, 8, 10], dtype=torch.int32)
    result = packed(ids, offsets, num_micro_batches=2, position_ids=True, max_seqlen=True)
    assert [x.tolist() for x in result["cu_seqlens"]] == [[0, 3, 5], [0, 2, 3, 5]]
    assert result["position_ids"][1].tolist() == [0, 1, 0, 0, 1]
    assert result["max_seqlen"] == (3, 2)
    packs = packed(ids.reshape(2, 5), offsets, num_micro_batches=2)
    assert packs["input_ids"][1].tolist() == [[5, 6, 7, 8, 9]]
    assert packs["cu_seqlens"][1].tolist() == [0, 2, 3, 5]
    for tokens, cut, words in (
        (ids.reshape(2, 5), torch.tensor([0, 4, 10]), "from one pack into the next at token 5"),
        (ids, torch.tensor([0, 4, 9]), r"\[0, 4, 9\].*to 10"),
        (ids.reshape(5, 2), offsets, "5 packs"),
    ):
        with pytest.raises(PipelineError, match=words):
            packed(tokens, cut, num_micro_batches=2)


# --- digests ---


def test_ranks_with_other_rows_are_named():
    def digests(**kwargs):
        return digests_of(contract().keywords.assigned(StepInputs((), None, kwargs, {})))

    x = torch.arange(6).reshape(3, 2)
    ranks = [digests(x=x, y={"a": [x]}), digests(x=x.clone(), y={"a": [x + 0]}, labels=x), digests(x=x, labels=x)]
    require_same_digests(ranks)
    with pytest.raises(PipelineError, match=r"y differs between .* on ranks \[0, 1\], .* on ranks \[2\]"):
        require_same_digests([*ranks[:2], digests(y={"a": [x.flip(0)]})])
