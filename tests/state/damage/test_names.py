"""Names that a terminal would obey are refused, wherever they come from."""

import json

import numpy as np
import pytest

from pipeproof.state.byte_ranges import ByteArray, write_file
from pipeproof.state.open_checkpoint import open_checkpoint
from pipeproof.state.state_codes import StateError
from pipeproof.state.state_index import parse_index

ODD = ["a\x1b[2J", "a\nb", "a\x07", "a\u202eb"]


@pytest.mark.parametrize("name", ODD)
def test_a_name_that_is_not_printable_is_refused_in_a_file(tmp_path, name):
    write_file(tmp_path / "m.safetensors", {name: ByteArray("float32", (1,), np.zeros(4, np.uint8))})
    with pytest.raises(StateError, match="not printable") as caught:
        open_checkpoint(tmp_path / "m.safetensors")
    assert str(caught.value).isprintable()


def test_names_of_any_language_are_names(tmp_path):
    arrays = {name: ByteArray("float32", (1,), np.zeros(4, np.uint8)) for name in ("权重", "a b", "été+1")}
    write_file(tmp_path / "m.safetensors", arrays)
    assert open_checkpoint(tmp_path / "m.safetensors").tensors.keys() == arrays.keys()


@pytest.mark.parametrize("name", ODD)
def test_a_name_that_is_not_printable_is_refused_in_an_index(name):
    index = {
        "pipeproof_state": 1, "steps_done": 1, "digest": "", "framework": "paddle", "versions": {}, "mesh": {},
        "values": {}, "tensors": {name: {"kind": "weight", "dtype": "float32", "shape": [1]}}, "files": [],
    }  # fmt: skip
    with pytest.raises(StateError, match="is not a name of a tensor") as caught:
        parse_index(json.dumps(index), "it", "")
    assert str(caught.value).isprintable()
