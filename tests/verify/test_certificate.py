"""Differences that the digest of a certificate shows, and those that it ignores, in arrays, tables and sets."""

import pytest

from pipeproof.comm.plan_context import Mesh
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.stages.describe.index_map import IndexMap
from pipeproof.verify.certificate import Verdict, graph_digest
from pipeproof.verify.check_plan import check_program
from pipeproof.verify.declared_facts import Facts, HeldTensor, RngFacts, RngRegion
from pipeproof.verify.subject import make_subject
from tests.plans import subject
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


def custom(**of_stem):
    """The digest of a plan of custom layers, with further keys of the first layer."""
    stem = {"name": "stem", "out": [{"shape": ["b", 4]}], "parameters": [{"name": "weight", "shape": [3, 4]}]}
    plan = {
        "pipeproof": 1,
        "model": {"kind": "layers", "layers": [{**stem, **of_stem}, {"name": "head"}]},
        "topology": {"pp": 2},
        "schedule": {"kind": "1f1b", "num_micro_batches": 4, "micro_batch_size": 2},
        "loss": {"normalization": "mean_of_micro_batches"},
    }
    return graph_digest(make_subject(plan_from_dict(plan)))


@pytest.mark.parametrize(
    "other",
    [
        {"kind": "Linear"},
        {"activation_bytes": 64},
    ],
    ids=str,
)
def test_what_no_operation_of_custom_layers_reads_is_in_no_digest(other):
    assert custom(**other) == custom()
    assert custom(**other, parameters=[{"name": "weight", "shape": [4, 4]}]) != custom()


def test_the_padding_of_the_vocabulary_is_in_no_digest():
    padded, whole = subject(model={"unpadded_vocab_size": 30}), subject()
    assert graph_digest(padded) == graph_digest(whole) != graph_digest(subject(model={"vocab_size": 30}))


def test_a_refused_program_has_a_verdict_and_no_certificate():
    report = check_program("rank 0: 0B0 0F0", file="order.txt")
    assert [(finding.code, finding.location.file) for finding in report.errors] == [("PP123", "order.txt")]
    assert (report.verdict, report.conclusion.verdict, report.certificate) == (Verdict.REFUSED, Verdict.REFUSED, None)
    right = check_program("rank 0: 0F0 0B0")
    assert right.certificate == right.conclusion
    assert right.verdict is Verdict.PROVED
