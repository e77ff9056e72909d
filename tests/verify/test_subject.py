"""Locations of findings on a program's text, and the queues by which a plan is checked."""

from __future__ import annotations

import pytest

from pipeproof.comm.plan_context import Mesh
from pipeproof.diagnostics.finding import OpsWitness
from pipeproof.schedule.op_table import Row, build_graph
from pipeproof.schedule.ops import parse_op
from pipeproof.specs.load_plan import plan_from_dict
from pipeproof.specs.schedule import ScheduleFileError
from pipeproof.stages.describe.index_map import IndexMap
from pipeproof.verify.certificate import Verdict, graph_digest
from pipeproof.verify.check_plan import check_program, check_subject
from pipeproof.verify.declared_facts import Facts, HeldTensor, RngFacts, RngRegion
from pipeproof.verify.lifetime.race_rules import NO_ORDER
from pipeproof.verify.subject import graph_subject, make_subject, of_small_plan, program_subject
from tests.plans import subject
from tests.verify.programs import program


def places(text):
    """(code, line, column) of the findings on a program; without a place, the code alone."""
    found = check_subject(program_subject(text)).findings
    return [(f.code, f.location.line, f.location.column) if f.location else (f.code,) for f in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rank 0: 0F0 0B0 0B0", ("PP122", 1, 13)),  # the first of two
        (
            "rank 0: 0F0 0SEND_F0{peer=1} 0F1 WAIT(0SEND_F0)\nrank 1: 1RECV_F0{peer=0} WAIT(1RECV_F0) 1F0 1F1",
            ("PP125", 2, 45),  # the two transfers are missing: where the tensor is used
        ),
        ("rank 0: 0F0 0F1 0B0", ("PP121",)),  # all that it is about is missing
    ],
)
def test_a_finding_is_where_the_first_row_of_its_witness_does(text, expected):
    assert expected in places(text)


def test_a_rank_that_does_nothing_is_no_reason_to_refuse_a_program():
    one = program_subject("rank 0:\nrank 1: 0F0 0B0")
    assert one.graph.num_ranks == 2
    assert check_subject(one).errors == ()


def test_a_plan_that_declares_the_queues_of_its_backend_is_checked_by_that_backend():
    own = subject().backend
    assert subject(transport={"queue": own.queue}).backend == own
    other = next(queue for queue in ("rank", "directed_edge", "device") if queue != own.queue)
    declared = subject(transport={"queue": other}).backend
    assert declared.queue == other
    assert declared.name == f"{own.name} with one FIFO per {other.replace('_', ' ')}"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("rank 0: 0F0.s0 0F1", "PP136"),  # some micro-batches are split and others are not
        ("rank 0:\nrank 1:", "PP131"),  # nothing to check
    ],
)
def test_a_program_that_is_none_is_refused(text, code):
    with pytest.raises(ScheduleFileError) as caught:
        program_subject(text)
    assert [finding.code for finding in caught.value.findings] == [code]


def test_a_program_alone_has_as_many_micro_batches_as_it_computes():
    assert program_subject("rank 0: 0F0 0F4").num_work_items == 5
    assert program_subject("rank 0: 0STEP").num_work_items == 0


def test_a_graph_alone_represents_no_other_ranks():
    one = program_subject("rank 0: 0F0 0B0")
    assert one.unfolded() is one


def test_a_rank_of_a_folded_plan_is_named_with_the_number_of_its_like():
    folded = subject(model={"num_layers": 8}, topology={"pp": 8, "tp": 4, "dp": 16}, schedule={"num_micro_batches": 32})
    assert folded.coords_text(1) == f"rank {folded.graph.global_rank[1]} (pp 1, and 63 more like it)"
    unfolded = subject(topology={"pp": 2, "dp": 2, "tp": 2})
    assert unfolded.coords_text(7) == "rank 7 (pp 1, dp 1, tp 1)"
    assert unfolded.unfolded() is unfolded


def test_a_witness_with_rows_of_a_file_and_others_is_where_the_first_row_of_the_file_is():
    one = program_subject("rank 0: 0F0 0B0")
    rows = one.graph.rows()
    rows[0].insert(0, Row(parse_op("0F1")))
    mixed = graph_subject(build_graph(rows, (), ()), origins=one.origins)
    found = mixed.placed(NO_ORDER.finding("message", witness=OpsWitness(tuple(map(mixed.witness_op, range(3))))))
    assert (found.location.line, found.location.column) == (1, 9)


def test_the_text_of_a_small_plan_makes_its_subject():
    names = {}
    exec(of_small_plan("{'pp': 2}", "rows[1].pop()"), names)
    assert names["subject"].graph.num_ops == names["base"].graph.num_ops - 1
    assert check_subject(names["base"]).errors == ()


def held(*parts):
    """A tensor of 8 elements; each (rank, first element) holds four of them, listed in this order."""
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
