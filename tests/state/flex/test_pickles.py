"""Pickles read without running them: the values of Python's own reader, and refusal of everything else."""

import collections
import contextlib
import io
import os
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.state.flex import pickles
from pipeproof.state.flex.pickles import GlobalName, PickledBytes, PickledObject, read_pickle, to_pickle
from pipeproof.state.state_codes import FlexError

ATOMS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=300)
KEYS = st.text(max_size=3) | st.integers(0, 9) | st.tuples(st.integers(0, 3), st.text(max_size=2))
VALUES = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner, inner, inner) | st.tuples(inner)
    | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("pickles") / "0.metadata"


@given(value=VALUES, protocol=st.sampled_from([2, 3, 4, 5]))
def test_plain_values_are_those_of_pythons_reader(file, value, protocol):
    file.write_bytes(pickle.dumps(value, protocol=protocol))
    assert read_pickle(file) == value


@given(value=VALUES)
def test_what_is_written_is_read_by_python(value):
    assert pickle.loads(to_pickle(value)) == value


@given(content=st.binary(min_size=1, max_size=70_000))
def test_bytes_are_found_and_not_read(file, content):
    file.write_bytes(pickle.dumps({"a": 1, "b": content}, protocol=4))
    span = read_pickle(file)["b"]
    assert isinstance(span, PickledBytes)
    assert file.read_bytes()[span.start : span.start + span.length] == content


class Asks:
    def __init__(self, *global_name):
        self._what = global_name

    def __reduce__(self):
        return self._what


@pytest.mark.parametrize("protocol", [2, 4])
def test_what_a_pickle_asks_for_is_named_and_not_run(tmp_path, protocol):
    file, made = tmp_path / "0.metadata", tmp_path / "made"
    file.write_bytes(pickle.dumps(Asks(os.mkdir, (str(made),)), protocol=protocol))
    asked = read_pickle(file)
    assert isinstance(asked, PickledObject)
    assert (asked.global_name.name, asked.arguments) == ("mkdir", (str(made),))
    assert not made.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b".",
        b"\x80\x04cos\nsystem\n(S'true'\ntR.",  # old text
        b"\x80\x04i",  # instance by name
        b"\x80\x04\x82\x01.",  # extension registry
        b"\x80\x04P1\n.",  # persistent id
        b"\x80\x04K\x01K\x02a.",
        b"\x80\x04}K\x01a.",
        b"\x80\x04K\x01}b.",
        b"\x80\x04(((tttt.",
        b"\x80\x04h\x05.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fabc.",
        b"\x80\x04}]K\x01s.",  # a list as a key
        b"\x80\x04(K\x01",
    ],
)
def test_what_is_damaged_or_unknown_is_refused(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(FlexError) as caught:
        read_pickle(tmp_path / "x")
    assert caught.value.findings[0].code == "PP926"


@given(value=VALUES, data=st.data())
def test_a_cut_or_changed_pickle_gives_a_value_or_is_refused(file, value, data):
    content = bytearray(pickle.dumps(value, protocol=4))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    with contextlib.suppress(FlexError):
        read_pickle(file)


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path, monkeypatch):
    content = pickle.dumps({"name": "x" * 30, "number": 2**40}, protocol=4)

    class Shrinks(io.BytesIO):
        def seek(self, position, whence=io.SEEK_SET):
            return len(content) if whence == io.SEEK_END else super().seek(position, whence)

    monkeypatch.setattr(pickles, "open_foreign", lambda path: Shrinks(path.read_bytes()))
    for length in range(len(content)):
        (tmp_path / "x").write_bytes(content[:length])
        with pytest.raises(FlexError, match=r"x is damaged, .*: it is cut short"):
            read_pickle(tmp_path / "x")


def test_an_instance_is_its_class_and_its_fields(tmp_path):
    (tmp_path / "x").write_bytes(pickle.dumps(collections.Counter("aab"), protocol=4))
    asked = read_pickle(tmp_path / "x")
    assert (asked.global_name, asked.arguments) == (GlobalName("collections", "Counter"), ({"a": 2, "b": 1},))


def test_whole_numbers_of_numpy_are_numbers_and_other_numbers_of_numpy_stay_calls(tmp_path):
    """Fleet's optimizers have them in ranges of elements."""
    whole = [np.int64(-3), np.int64(2**40), np.int8(-1), np.uint16(65535), np.int64(7)]
    (tmp_path / "x").write_bytes(pickle.dumps([*whole, np.float64(1.0), np.bool_(True)], protocol=4))
    *numbers, real, truth = read_pickle(tmp_path / "x")
    assert numbers == [int(number) for number in whole]
    assert all(type(number) is int for number in numbers)
    assert real.global_name.name == truth.global_name.name == "scalar"
