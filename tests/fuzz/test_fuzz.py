"""The fuzzer: kept seeds and some mutants of every reader are handled, and unhandled outcomes are found."""

import random

import pytest

from pipeproof.cli.file_kinds import KINDS, kind_of
from pipeproof.interop.importers import import_kinds
from tests.fuzz.mutate import mutant_of, outcome_of, problem_of
from tests.fuzz.readers import IMPORTED, READERS, SEEDS

WITHOUT_SEEDS = {"states of a run": "the newest one is read, and its files have seeds"}
"""Kinds of files without seeds, each with the reason."""


@pytest.mark.parametrize("path", sorted(SEEDS.glob("*.*")), ids=lambda path: path.name)
def test_kept_seeds_are_handled(path):
    assert outcome_of(READERS[path.name.partition(".")[0]], path.read_bytes()) is None


@pytest.mark.parametrize("name", READERS)
def test_mutants_of_every_reader_are_handled(name):
    draw = random.Random(name)
    for seed in READERS[name].all_seeds()[:2]:
        content = mutant_of(seed, draw)
        assert outcome_of(READERS[name], content) is None, content


def test_every_kind_of_file_that_a_command_reads_has_seeds(tmp_path):
    assert set(IMPORTED) == set(import_kinds.KINDS)
    found = set()
    for reader in READERS.values():
        for number, seed in enumerate(reader.all_seeds()):
            directory = tmp_path / reader.name / str(number)
            file = directory / reader.file
            file.parent.mkdir(parents=True)
            file.write_bytes(seed)
            found |= {kind.noun for kind in map(kind_of, (directory, file)) if kind is not None}
    assert {kind.noun for kind in KINDS if kind.commands} - found == set(WITHOUT_SEEDS)


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
