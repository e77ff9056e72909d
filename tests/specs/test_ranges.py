"""Long lists in few words."""

from hypothesis import given
from hypothesis import strategies as st

from pipeproof.diagnostics.problems import names_text, ranges_text


def test_by_hand():
    assert ranges_text([0, 1, 2, 3, 6, 8, 9]) == "0-3,6,8-9"
    assert ranges_text([]) == ""
    assert names_text(["embed", "layer.0", "layer.1", "layer.2", "norm", "head"]) == "embed, layer.0-2, norm, head"
    assert names_text(["layer.3", "layer.5", "layer.9", "layer.10"]) == "layer.3, layer.5, layer.9-10"
    assert names_text(["layer.0", "block.1"]) == "layer.0, block.1"


@given(st.sets(st.integers(0, 60)).map(sorted))
def test_nothing_is_lost(numbers):
    found = []
    for part in filter(None, ranges_text(numbers).split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    assert found == numbers
