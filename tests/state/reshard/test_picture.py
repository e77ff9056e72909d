"""``pipeproof state reshard --plot``: what it draws is where every element goes, counted one by one."""

import os
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.specs.dtypes import dtype_bytes
from pipeproof.state.regions import Region
from pipeproof.state.reshard import flow_picture as page
from pipeproof.state.reshard.flow_picture import _rectangles
from pipeproof.state.reshard.flows import ZEROS, flows_between
from pipeproof.state.reshard.padding import padding_map
from pipeproof.state.reshard.shard_layout import layout_of_plan
from pipeproof.state.tensor_map import RegionCopy, StateMap, TensorMap
from pipeproof.state.write_state import values_of
from pipeproof.views.svg import LETTER, shortened
from tests.state.reshard.plans import DENSE, WITH_ALL, reshard, state_of, subject_of, write_plan

PAIRS = [("tp2_pp2", "ep2_tp2", WITH_ALL), ("sd4", "tp2", DENSE), ("ep2_pp2", "sd4", WITH_ALL)]


def owners(side, name, shape):
    """For each element of a tensor the number of its holder."""
    found = np.full(shape, -1)
    for part in side.shards[name]:
        for _, region in part.shard.regions():
            found[tuple(map(slice, region.offsets, region.stops))] = part.rank
    assert (found >= 0).all()
    return found


@pytest.mark.parametrize(("one", "other", "model"), PAIRS)
def test_bands_are_as_wide_as_the_elements_that_go_there(tmp_path, one, other, model):
    a, b = (subject_of(write_plan(tmp_path / f"{name}.yaml", name, model)).plan for name in (one, other))
    source, target = layout_of_plan(a, "a"), layout_of_plan(b, "b")
    flows = flows_between(source, padding_map(source.tensors, values_of(a.spec), b.spec.model), target)
    expected, num_whole = Counter(), 0
    for name, entry in target.tensors.items():
        pairs = list(zip(owners(source, name, entry.shape).flat, owners(target, name, entry.shape).flat, strict=True))
        num_whole += len(set(pairs)) == 1
        for sender, receiver in pairs:
            expected[f"rank {sender}", f"rank {receiver}"] += dtype_bytes(entry.dtype)
    assert flows.num_bytes == expected
    assert flows.num_whole == num_whole
    assert flows.senders == tuple(sorted({sender for sender, _ in expected}))


def test_a_turned_and_padded_tensor_has_its_givers_where_their_elements_come_to_lie(tmp_path):
    """Of a [2, 3] tensor, cut by columns in two, the transpose with a row of zeros behind."""
    plan = subject_of(write_plan(tmp_path / "a.yaml", "tp2", {**DENSE, "hidden_size": 8})).plan
    side = layout_of_plan(plan, "a")
    name = "head.weight"
    rows, columns = side.tensors[name].shape
    whole = Region((0, 0), (columns, rows))
    zeros = Region((columns, 0), (1, rows))
    made = TensorMap("float32", (columns + 1, rows), (RegionCopy(whole, name, Region((0, 0), (rows, columns)), (1, 0)),
                                                     RegionCopy(zeros, None, zeros)))  # fmt: skip
    entry = side.tensors[name].model_copy(update={"shape": (columns + 1, rows)})
    shard = side.shards[name][0].shard.model_copy(update={"offsets": (0, 0), "extents": (columns + 1, rows)})
    taken = side.shards[name][0].__class__(shard, None, Path("model.safetensors"))
    target = side.__class__("b", {name: entry}, {name: (taken,)})
    flows = flows_between(side, StateMap({name: made}), target)
    half = columns // 2
    assert [(flow.region, flow.sender) for flow in flows.resharded[0].flows] == [
        (Region((0, 0), (half, rows)), "rank 0"), (Region((half, 0), (half, rows)), "rank 1"), (zeros, ZEROS),
    ]  # fmt: skip
    assert flows.senders == ("rank 0", "rank 1", ZEROS)


@given(st.data())
def test_a_region_is_drawn_as_its_rows(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    extents = tuple(data.draw(st.integers(1, size - start)) for size, start in zip(shape, offsets, strict=True))
    held = np.zeros(shape, bool)
    held[tuple(slice(start, start + extent) for start, extent in zip(offsets, extents, strict=True))] = True
    rows = np.flatnonzero(held.reshape(-1, shape[-1]).any(axis=1))
    runs = list(_rectangles(Region(offsets, extents), shape))
    assert [row for first, num in runs for row in range(first, first + num)] == rows.tolist()
    assert all(one + num < other for (one, num), (other, _) in pairwise(runs))


@pytest.fixture
def there(tmp_path, monkeypatch):
    write_plan(tmp_path / "a.yaml", "tp2_pp2", DENSE)
    write_plan(tmp_path / "b.yaml", "one", DENSE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_picture_says_who_gives_what_to_whom(there):
    said = reshard("a.yaml", "b.yaml", "--check", "--plot", "moves.svg")
    assert "picture written to moves.svg" in said
    svg = (there / "moves.svg").read_text()
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert {"rank 3 (tp 1, pp 1)", "rank 0", "layer.{0..1}.attn.qkv.weight", "8 x 16", "2→0"} <= set(texts)
    assert "prefers-color-scheme:dark" in svg
    state_of(there / "a.yaml", there / "states")
    reshard("states", "-o", "m.safetensors", "--names", "huggingface", "--plot", "out.svg", "--format", "json")
    assert "m.safetensors" in (there / "out.svg").read_text()


def test_what_was_not_proved_is_not_drawn(there):
    write_plan(there / "deeper.yaml", "one", {**DENSE, "num_layers": 5})
    reshard("a.yaml", "deeper.yaml", "--check", "--plot", "moves.svg", status=1)
    assert not (there / "moves.svg").exists()


def test_a_picture_that_cannot_be_made_is_refused_before_anything_moves(there, monkeypatch):
    state_of(there / "a.yaml", there / "states")
    for file, said in (("moves.png", "ends with .svg"), ("no/moves.svg", "there is no directory"), (".", "directory")):
        assert said in reshard("states", "b.yaml", "-o", "made", "--plot", file, status=2)
    monkeypatch.setattr(page, "MAX_HOLDERS", 3)
    said = reshard("states", "b.yaml", "-o", "made", "--plot", "moves.svg", status=2)
    assert "4 ranks or files that hold shards, and a picture shows 3" in " ".join(said.split())
    assert "omit --plot" in said
    assert not (there / "made").exists()


@pytest.mark.parametrize("name", [b'<&">.yaml', b"\xff\x1b[31m.yaml", "长".encode() * 60 + b".yaml"])
def test_names_of_other_people_are_letters_in_the_picture_and_nothing_else(there, name):
    plan = os.fsdecode(name)
    write_plan(there / plan, "tp2", DENSE)
    reshard(plan, "b.yaml", "--check", "--plot", "moves.svg")
    picture = ET.parse(there / "moves.svg")
    whole, *words = [mark.text for tag in ("title", "text") for mark in picture.iterfind(f".//{{*}}{tag}")]
    shown = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in plan)
    assert whole.startswith(f"{shown} to b.yaml: ")
    assert max(map(len, words)) < 120


@given(st.text("aW.长", max_size=40), st.integers(11, 300))
def test_a_shortened_name_has_room_and_both_its_ends(name, room):
    widths = {"a": 11 * LETTER, ".": 5.5 * LETTER, "W": 11, "长": 11}
    width = sum(widths[letter] for letter in name)
    short = shortened(name, room)
    assert (short == name) == (width <= room)
    if width > room:
        begin, end = short.split("…")
        assert name.startswith(begin)
        assert name.endswith(end)
        assert len(begin) - len(end) in (0, 1)
        assert sum(widths[letter] for letter in begin + end) + 11 <= room + 1e-9
