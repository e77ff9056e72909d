"""An index that anything was done to is refused, or says the same; one that was forged ends in no crash."""

import json
import shutil
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.state.state_index import StateIndex, index_text
from tests.state.damage.readers import READERS, OtherValuesError, opened_or_refused, refusal_of
from tests.state.runs import plan_of
from tests.state.tiny import values, write_state

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 2, 3, 8, -1, 2**31, 2**63, 2**64, 10**400, 0.5, 1e308, "", "0", "..", "/", "\x00", "é"]),
    st.sampled_from(
        ["weight", "moment", "float32", "bfloat16", "embed.weight", "rank0.safetensors", "rank1.safetensors"]
    ),
    st.just([]),
    st.just({}),
    st.lists(st.integers(0, 9), max_size=3),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    at = plan_of(steps=9, topology={"tp": 2}, model={"num_layers": 2, "vocab_size": 8}, backend="torch")
    root = tmp_path_factory.mktemp("made")
    directory = write_state(at, root / "good", 2)
    shutil.copytree(directory, root / "bad")
    return at, directory, values(at.plan, 2), root / "bad"


def places(tree, at=()):
    """Every place of a JSON document, as keys from the top."""
    yield at
    inner = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inner:
        yield from places(value, (*at, key))


def mutated(tree, data):
    """One thing of a document changed: a value, a key, the order or number of a list's items; two values exchanged."""
    every = list(places(tree))[1:]
    # one of each kind of place is as likely as another: else nearly all are numbers of some part
    kinds = sorted({_kind(place) for place in every})
    kind = data.draw(st.sampled_from(kinds), label="kind of place")
    place = data.draw(st.sampled_from([one for one in every if _kind(one) == kind]), label="place")
    parent = _at(tree, place[:-1])
    what = data.draw(st.sampled_from(["replace", "remove", "exchange", "twice", "rename"]), label="what")
    if what == "remove":
        del parent[place[-1]]
    elif what == "exchange":
        other = data.draw(st.sampled_from([one for one in every if _kind(one) == kind]), label="other")
        its = _at(tree, other[:-1])
        parent[place[-1]], its[other[-1]] = its[other[-1]], parent[place[-1]]
    elif what == "twice" and isinstance(parent, list):
        parent.insert(place[-1], parent[place[-1]])
    elif what == "rename" and isinstance(parent, dict):
        parent[data.draw(st.sampled_from(["x", "", *map(str, parent)]), label="name")] = parent.pop(place[-1])
    else:
        parent[place[-1]] = data.draw(LEAVES, label="value")
    return tree


def _kind(place):
    return tuple("#" if isinstance(key, int) or depth == 1 else key for depth, key in enumerate(place))


def _at(tree, place):
    for key in place:
        tree = tree[key]
    return tree


def judged(made, text):
    at, _, whole, bad = made
    if isinstance(text, str):
        (bad / "index.json").write_text(text, encoding="utf-8")
    else:
        (bad / "index.json").write_bytes(text)
    opened_or_refused(bad)
    return [refusal_of(reader, at, bad, whole, 2) for reader in READERS]


def good_text(made):
    return (made[1] / "index.json").read_text()


@settings(deadline=None, max_examples=90)
@given(data=st.data())
def test_an_index_that_was_edited_is_refused_or_says_the_same(made, data):
    tree = json.loads(good_text(made))
    edited = mutated(json.loads(good_text(made)), data)
    refusals = judged(made, json.dumps(edited))
    if edited.get("sha256") is not None and edited != tree:  # null is as if it was left out
        assert all(refusals)


@settings(deadline=None, max_examples=90)
@given(data=st.data())
def test_an_index_with_a_digest_recomputed_is_refused_or_taken_and_nothing_else(made, data):
    """Who forges it may say anything, and so values may be others; there is no crash, and no shard twice or missing."""
    edited = mutated(json.loads(good_text(made)), data)
    edited.pop("sha256", None)
    try:
        text = index_text(StateIndex.model_validate_json(json.dumps(edited)))
    except ValueError:
        text = json.dumps(edited)
    with suppress(OtherValuesError):
        judged(made, text)


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "[" * 100_000, "\x00", '{"pipeproof_state": 1}', "\ufeff{}"])
def test_what_is_no_index_is_refused(made, text):
    assert all(judged(made, text))


def test_who_edits_an_index_on_purpose_leaves_its_digest_out(made):
    tree = json.loads(good_text(made))
    tree["versions"]["note"] = "from the archive"
    assert all(judged(made, json.dumps(tree)))
    del tree["sha256"]
    assert not any(judged(made, json.dumps(tree)))
