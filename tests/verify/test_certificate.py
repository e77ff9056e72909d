"""Differences that the digest of a certificate shows, and those that it ignores, in arrays, tables and sets."""

import pytest

from pipeproof.comm.mesh import Mesh
from pipeproof.stages.describe.index_map import IndexMap
from pipeproof.verify.certificate import graph_digest
from pipeproof.verify.declared_facts import Facts, HeldTensor, RngFacts, RngRegion
from tests.verify.programs import program


def held(*parts):
    """A tensor of 8 elements of which (rank, first element) hold four each, listed in this order."""
    table = {rank: IndexMap.of([(0, start, 4)]) for rank, start in parts}
    return Facts(held_tensors=(HeldTensor("w", 8, table),))


def drawn(*axes):
    """A region whose random numbers differ over a set of axes."""
    return Facts(rng=RngFacts(Mesh(("tp", "dp"), (2, 2)), (RngRegion("dropout", frozenset(axes)),), ()))


def digest(facts, text="0F0"):
    return graph_digest(program(text, "0F0", facts=facts))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (held((0, 0), (1, 4)), held((0, 4), (1, 0))),  # the same table, with other numbers in its arrays
        (drawn("dp"), drawn("dp", "tp")),
        (drawn("dp"), drawn("tp")),
    ],
)
def test_facts_that_differ_in_an_array_or_a_set_have_different_digests(one, other):
    assert digest(one) != digest(other)


def test_the_order_in_which_a_table_or_set_is_written_makes_no_difference():
    assert digest(held((0, 0), (1, 4))) == digest(held((1, 4), (0, 0)))
    assert digest(drawn("dp", "tp")) == digest(drawn("tp", "dp"))


def test_each_attribute_of_a_row_is_in_the_digest():
    rows = ["0F0", "0F0{scale=1/2}", "0F0{queue=side}", "0F0{reads=a}", "0F0{writes=a}", "0F0{reads=b}", "0F0{batch=0}"]
    assert len({digest(Facts(), row) for row in rows}) == len(rows)
