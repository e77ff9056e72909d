"""The fuzzer: kept seeds are handled, some mutants of every reader are, and what is not handled is found."""

import random

import pytest

from tests.fuzz.mutate import mutant_of, outcome_of, problem_of
from tests.fuzz.readers import READERS, SEEDS


@pytest.mark.parametrize("path", sorted(SEEDS.glob("*.*")), ids=lambda path: path.name)
def test_kept_seeds_are_handled(path):
    assert outcome_of(READERS[path.name.partition(".")[0]], path.read_bytes()) is None


@pytest.mark.parametrize("name", READERS)
def test_mutants_of_every_reader_are_handled(name):
    draw = random.Random(name)
    for seed in READERS[name].all_seeds()[:2]:
        content = mutant_of(seed, draw)
        assert outcome_of(READERS[name], content) is None, content


def test_mutants_are_those_of_their_seed():
    def drawn(seed):
        draw = random.Random(seed)
        return [mutant_of(b"a: 1\nb: [2, 3]\n", draw) for _ in range(50)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert len(set(drawn(1))) > 40


@pytest.mark.parametrize(
    ("status", "output", "is_handled"),
    [(2, "error[PP100]: no", True), (0, "", True), (2, "error: ValueError: x\n did not expect this", False),
     (1, "Traceback (most recent call last):\nKeyError: 1", False), (-11, "", False), (70, "", False), (3, "", False)],
)  # fmt: skip
def test_what_counts_as_handled(status, output, is_handled):
    assert (problem_of(status, output) is None) is is_handled
