"""Replicas are checked once: the verdict on a folded graph is the verdict on all its ranks."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeproof.comm.lower as lower_module
from pipeproof.schedule.op_table import build_graph
from pipeproof.schedule.ops import OpKind
from pipeproof.verify.check_plan import check_subject
from tests.plans import subject


def folded_subject(**sections):
    """The subject as a large plan would be lowered: one rank for each pipeline rank."""
    limit = lower_module.FOLD_ABOVE
    lower_module.FOLD_ABOVE = 0
    try:
        return subject(**sections)
    finally:
        lower_module.FOLD_ABOVE = limit


@st.composite
def replicated_plans(draw):
    chunks = draw(st.sampled_from([1, 1, 2]))
    pp = draw(st.sampled_from([2, 3, 4] if chunks == 1 else [2]))
    return {
        "topology": {
            "pp": pp, "tp": draw(st.sampled_from([1, 2])), "dp": draw(st.sampled_from([1, 2])),
            "sequence_parallel": draw(st.booleans()),
        },
        "schedule": {
            "kind": draw(st.sampled_from(["gpipe", "1f1b"])) if chunks == 1 else "interleaved",
            "num_micro_batches": pp * draw(st.integers(1, 2)), "num_chunks": chunks,
        },
        "transport": draw(st.sampled_from(["full", "partial"])),
    }  # fmt: skip


@settings(max_examples=40)
@given(replicated_plans())
def test_the_verdict_on_representatives_is_the_verdict_on_all_ranks(sections):
    folded, full = folded_subject(**sections), subject(**sections)
    assert folded.graph.num_ranks == sections["topology"]["pp"]
    ours, theirs = check_subject(folded), check_subject(full)
    assert {(f.code, f.severity) for f in ours.findings} == {(f.code, f.severity) for f in theirs.findings}
    assert ours.digest == theirs.digest


def test_a_witness_of_lost_elements_is_the_same_folded_or_not():
    corrupt = {"topology": {"pp": 2, "tp": 2, "dp": 2, "sequence_parallel": True}, "transport": "partial"}
    (ours,) = {f.witness for f in check_subject(folded_subject(**corrupt)).errors if "forward" in f.message}
    (theirs,) = {f.witness for f in check_subject(subject(**corrupt)).errors if "forward" in f.message}
    assert set(ours.lost) <= set(theirs.lost)
    assert set(ours.foreign) <= set(theirs.foreign)


@pytest.mark.parametrize("kind", [OpKind.SEND_FORWARD, OpKind.BACKWARD, OpKind.ALL_REDUCE])
def test_a_program_that_breaks_the_symmetry_is_still_found(kind):
    """Ranks 3 and 7 are replicas that a folded check never looks at; with programs of their own they are checked."""
    full = folded_subject(topology={"pp": 2, "tp": 2, "dp": 2}).unfolded()
    assert not check_subject(full).errors
    rows = full.graph.rows()
    rank = 3 if kind is OpKind.SEND_FORWARD else 7
    place = next(i for i, row in enumerate(rows[rank]) if row.op.kind is kind)
    if kind is OpKind.ALL_REDUCE:
        rows[rank][place] = replace(rows[rank][place], stop=rows[rank][place].stop + 1)
    else:
        del rows[rank][place]
    broken = full.with_graph(build_graph(rows, full.graph.tensors, full.graph.groups))
    assert check_subject(broken).errors
